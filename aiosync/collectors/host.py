"""Where workers run: each in a process of its own, or beside the collector on its event loop."""

from __future__ import annotations

import asyncio
import copy
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any, TypeAlias

import cloudpickle
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.collectors.channel import Channel, ChannelClosed, LocalChannel, PipeChannel
from aiosync.collectors.config import StartMethod
from aiosync.collectors.worker import WorkerSpec, serve
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transports._offload import offloaded, start_thread

__all__ = ["Host", "LocalHost", "MakeHost", "ProcessHost", "Schemes", "context_of"]

Schemes: TypeAlias = Mapping[str, WeightSyncScheme]
"""Model -> the scheme that its weights come by."""


class Host(ABC):
    """What one worker runs on."""

    @abstractmethod
    async def start(self, spec: WorkerSpec, schemes: Schemes) -> Channel:
        """Have a worker begin; what is talked over with it. If this is cancelled, :meth:`close` is called all
        the same.

        Raises:
            OSError: it cannot begin.
        """

    @abstractmethod
    async def ended(self, deadline: Deadline) -> bool:
        """Wait until it has ended; whether it has."""

    @abstractmethod
    def kill(self) -> None:
        """Have it end, whatever it does."""

    @abstractmethod
    def cause(self) -> str:
        """How it ended, or that it has not."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Its process's number, where it has one on this machine."""

    @abstractmethod
    def release(self) -> None:
        """It has ended, or was killed: let go of all that was it."""


MakeHost: TypeAlias = Callable[[], Host]


class ProcessHost(Host):
    """A process, and a pipe to it.

    Args:
        ctx: how processes begin.
    """

    def __init__(self, ctx: BaseContext) -> None:
        self._ctx: Any = ctx
        self._process: Any = None
        self._at_exit: Finalize[Any] | None = None

    async def start(self, spec: WorkerSpec, schemes: Schemes) -> Channel:
        data, shared = _packed(spec)
        ours, theirs = self._ctx.Pipe()
        # A server that processes are forked from has the variables of the moment when it began.
        variables = dict(os.environ)
        arguments = shared, dict(schemes), variables, theirs
        name = f"aiosync-collector-{spec.index}"
        # Not a daemon: that could have no children, as environments in processes of their own are.
        self._process = self._ctx.Process(target=_run, args=arguments, name=name, daemon=False)
        self._at_exit = Finalize(None, _kill, args=(weakref.ref(self._process),), exitpriority=_EXIT_PRIORITY)
        try:
            await offloaded(lambda: _start(self._process), "aiosync-start")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        channel = await PipeChannel.open(ours)
        # Not as an argument: what is long would be waited for until the process reads it.
        channel.send(data)
        return channel

    async def ended(self, deadline: Deadline) -> bool:
        process = self._process
        if process is None or process.pid is None or process.exitcode is not None:
            return True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        try:
            async with asyncio.timeout(deadline.remaining()):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(process.sentinel)
        process.join()
        return True

    def kill(self) -> None:
        if self.pid is not None:
            self._process.kill()

    def cause(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "its pipe closed, though its process still runs"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        hint = ""
        if code == 1:  # a worker reports its errors; this process ended before the worker began
            hint = (
                ": what it printed says why (a script that makes a collector needs "
                "`if __name__ == '__main__':`, since workers import it)"
            )
        return f"its process ended with exit code {code}{hint}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def release(self) -> None:
        process, self._process = self._process, None
        at_exit, self._at_exit = self._at_exit, None
        if at_exit is not None:
            at_exit.cancel()
        if process is not None and process.pid is not None:
            with suppress(ValueError):  # it still runs: nothing more can be done
                process.close()


_EXIT_PRIORITY = 5
"""After whatever closes collectors at the interpreter's exit; multiprocessing waits for its children then."""

_LAST_WORDS = 2.0
"""Seconds that a worker whose trainer is gone has to end by itself."""


def _kill(process: Callable[[], Any]) -> None:
    """At the trainer's exit: a collector was not closed, and its worker would be waited for."""
    found = process()
    if found is not None and found.is_alive():
        found.kill()


def _end_with_parent() -> None:
    """Have this process end when the trainer's has, whatever its event loop is busy with."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        # The loop finds its pipe closed, closes the environment and ends. It cannot while a step runs.
        time.sleep(_LAST_WORDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    start_thread(watch, "aiosync-parent")


def _run(
    shared: Sequence[Tensor],
    schemes: Schemes,
    variables: Mapping[str, str],
    connection: Connection[Any, Any],
) -> None:
    """A process's main."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer to act on
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(variables)
    _end_with_parent()

    async def main() -> None:
        channel = await PipeChannel.open(connection)
        with suppress(ChannelClosed):  # the collector has closed before this has begun
            spec = await channel.receive()
            await serve(lambda: _Unpickler(spec, shared).load(), schemes, channel)

    if sys.platform == "win32":
        asyncio.run(main())
    else:
        import uvloop

        uvloop.run(main())


def _start(process: Any) -> None:
    """Start a process that is deaf to a terminal's Ctrl-C until it says what to do about that: it inherits
    this thread's mask."""
    if sys.platform == "win32":
        process.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def context_of(method: StartMethod | None) -> BaseContext:
    """How processes begin. Blocking, if a server has to be started that forks them."""
    if method is None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":
        wanted = [*_PRELOADED, *(name for name in _PRELOADED_IF_USED if name in sys.modules)]
        if getattr(forkserver._forkserver, "_preload_modules", None) == [
            "__main__"
        ]:  # the default: the program has not set it
            forkserver.set_forkserver_preload(wanted)
        forkserver.ensure_running()
    return multiprocessing.get_context(method)


_PRELOADED = ["uvloop", "aiosync.collectors.host"]
_PRELOADED_IF_USED = ["gymnasium", "torchrl.envs"]
"""What a server has imported that processes are forked from."""


def _packed(spec: WorkerSpec) -> tuple[bytes, list[Tensor]]:
    """It, pickled, and the tensors that are to be the same in the worker."""
    data, shared = io.BytesIO(), []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: object) -> int | None:
            if not (spec.shares and isinstance(obj, Tensor) and obj.is_shared()):
                return None
            shared.append(obj)
            return len(shared) - 1

    Pickler(data).dump(spec)
    return data.getvalue(), shared


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, shared: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, number: int) -> Tensor:
        """A tensor that is the same here."""
        return self._shared[number]


class LocalHost(Host):
    """A task of the collector's own event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def start(self, spec: WorkerSpec, schemes: Schemes) -> Channel:
        ours, theirs = LocalChannel.pair()
        receiving = {model_id: copy.copy(scheme) for model_id, scheme in schemes.items()}
        work = serve(lambda: spec, receiving, theirs)
        self._task = asyncio.create_task(work, name="aiosync-collector")
        return ours

    async def ended(self, deadline: Deadline) -> bool:
        if self._task is None:
            return True
        await asyncio.wait([self._task], timeout=deadline.remaining())
        return self._task.done()

    def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def cause(self) -> str:
        return "its task has ended"

    def release(self) -> None:
        self._task = None

    @property
    def pid(self) -> int | None:
        return None
