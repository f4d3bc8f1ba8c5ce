"""The worker process: runs one scenario after another as it is told over a control pipe.

The messages on that pipe are msgpack. A scenario is a coroutine function of an importable module that
takes the :class:`Child` and keyword arguments, and returns what msgpack can carry.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
import traceback
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import uvloop
from torch import nn

from aiosync import AiosyncError, WeightSyncScheme

__all__ = ["Child", "main"]

_FACTS = (
    "phase", "workers", "worker", "version", "missing", "unexpected", "reason", "remote_type",
)  # fmt: skip


class Child:
    """What a scenario has at hand.

    Attributes:
        scheme: the recipe that this process was given, or what came of it.
        index: which worker this is.
        arguments: for ``init_on_receiver``, besides model and index.
        model: set by the scenario that connects.
        notes: scenarios leave things to each other here.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        index: int,
        arguments: dict[str, Any],
        control: Connection[Any, Any],
    ) -> None:
        self.scheme = scheme
        self.index = index
        self.arguments = arguments
        self.model: nn.Module | None = None
        self.notes: dict[str, Any] = {}
        self._control = control
        self._told: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._tasks: set[asyncio.Task[None]] = set()
        self._exit = asyncio.Event()

    async def until_told(self, name: str) -> None:
        """Wait until the test says this word."""
        await self._told[name].wait()

    def was_told(self, name: str) -> bool:
        """Whether the test has said this word."""
        return self._told[name].is_set()

    def say(self, name: str, value: Any = None) -> None:
        """Tell the test something in the middle of a scenario."""
        self._send({"said": name, "value": value})

    def block(self) -> None:
        """Hold this process's event loop until the test says ``go``; nothing else may be told then."""
        os.set_blocking(self._control.fileno(), True)  # uvloop turns that off for what it watches
        self.say("blocked")
        while msgspec.msgpack.decode(self._control.recv_bytes()).get("tell") != "go":
            pass

    def outlive(self) -> None:
        """In a forked child: live on for some seconds, without the control pipe, which is to end with the
        worker."""
        self._control.close()
        time.sleep(5)
        os._exit(0)

    async def main(self) -> None:
        """Do as told until told to exit."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._readable)
        self.say("up", os.getpid())
        try:
            await self._exit.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.scheme.aclose()
        finally:
            loop.remove_reader(self._control.fileno())

    def _readable(self) -> None:
        while self._control.poll():
            try:
                message = msgspec.msgpack.decode(self._control.recv_bytes())
            except (EOFError, OSError):
                os._exit(3)  # the test is gone: nobody is left to clean up for
            match message:
                case {"tell": "exit"}:
                    self._exit.set()
                case {"tell": str(name)}:
                    self._told[name].set()
                case {"forget": str(name)}:
                    self._told[name].clear()
                case {"id": int(number), "call": str(path), "args": dict(args)}:
                    task = asyncio.create_task(self._run(number, path, args))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, path: str, args: dict[str, Any]) -> None:
        module, _, name = path.partition(":")
        try:
            value = await getattr(importlib.import_module(module), name)(self, **args)
        except Exception as exc:  # noqa: BLE001 - travels to the test
            self._send({"id": number, "error": _described(exc)})
        else:
            self._send({"id": number, "value": value})

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send_bytes(msgspec.msgpack.encode(message))


def _described(error: Exception) -> dict[str, Any]:
    facts = {}
    if isinstance(error, AiosyncError):
        facts = {name: getattr(error, name) for name in _FACTS if name in dir(error)}
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "facts": facts,
    }


def main(
    scheme: WeightSyncScheme,
    index: int,
    arguments: dict[str, Any],
    control: Connection[Any, Any],
    on_uvloop: bool,
) -> None:
    """A worker process's target."""
    torch.set_num_threads(1)
    child = Child(scheme, index, arguments, control)
    if on_uvloop:
        uvloop.run(child.main())
    else:
        asyncio.run(child.main())
