"""Processes of a benchmark: objects that are called over a pipe, and programs that run one turn."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["SPAWN", "Remote", "RemoteError", "killer", "run_turn"]

SPAWN = get_context("spawn")


class RemoteError(Exception):
    """A process did not do what it was asked.

    Attributes:
        status: ``failed`` (an error, whose traceback is the message), ``timeout`` or ``died``.
    """

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        super().__init__(message)


class _Pipe:
    """One end of a pipe, awaited on the running event loop. Messages are small: reading one is short."""

    def __init__(self, conn: Connection[Any, Any]) -> None:
        self._conn = conn
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(conn.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            self._inbox.put_nowait(self._conn.recv())
        except (EOFError, OSError):
            self._loop.remove_reader(self._conn.fileno())
            self._inbox.put_nowait(None)

    def send(self, message: object) -> None:
        """Send one message; ``OSError`` when the other process has ended."""
        self._conn.send(message)

    async def receive(self) -> Any:
        """The next message, or None when the other process has ended."""
        return await self._inbox.get()

    def close(self) -> None:
        """Close this end. Closing twice does nothing."""
        if not self._conn.closed:
            self._loop.remove_reader(self._conn.fileno())
            self._conn.close()


class Remote:
    """An object in a spawned process of its own. Its coroutine methods are called by name.

    Args:
        make: makes the object in the process; importable by name.
        args: for ``make``; pickled while the process is spawned.
        uvloop: whether the process runs uvloop, or asyncio's own event loop.
        parent: whether the process starts processes of its own. Otherwise it ends with this process.
    """

    def __init__(
        self, make: Callable[..., Any], *args: Any, uvloop: bool = False, parent: bool = False
    ) -> None:
        ours, theirs = SPAWN.Pipe()
        target = make, args, theirs, uvloop
        self._process = SPAWN.Process(target=_process_main, args=target, daemon=not parent)
        self._process.start()
        theirs.close()
        self._pipe = _Pipe(ours)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    async def call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call ``method`` of the object and return its result.

        Args:
            method: name of a coroutine method.
            timeout: seconds to wait for the result; None: without limit.
            arguments: its arguments, by name.

        Raises:
            RemoteError: the method raised, the process ended, or no result came in time.
        """
        try:
            self._pipe.send((method, arguments))
            async with asyncio.timeout(timeout):
                reply = await self._pipe.receive()
        except TimeoutError:
            raise RemoteError("timeout", f"{method}: no answer within {timeout:g} s") from None
        except OSError:
            reply = None
        if reply is None:
            raise RemoteError("died", f"{method}: its process has ended")
        error, result = reply
        if error:
            raise RemoteError("failed", f"{method}: {error}")
        return result

    async def close(self, timeout: float) -> None:
        """Call the object's ``close`` and wait until the process has ended, ``timeout`` seconds each.

        Raises:
            RemoteError: as :meth:`call`, or the process has not ended.
        """
        await self.call("close", timeout=timeout)
        await self.wait_ended(timeout)

    async def wait_ended(self, timeout: float) -> None:
        """Wait until the process has ended by itself, after ``close``.

        Raises:
            RemoteError: it has not, after ``timeout`` seconds.
        """
        await asyncio.to_thread(self._process.join, timeout)
        if self._process.is_alive():
            raise RemoteError("timeout", f"close: the process is still there after {timeout:g} s")

    def kill(self) -> None:
        """End the process by force, if it has not ended."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _process_main(make: Callable[..., Any], args: Any, conn: Connection[Any, Any], uvloop: bool) -> None:
    factory = importlib.import_module("uvloop").new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(make, args, conn))
    if threading.active_count() > 1:
        # Threads that torchrl or gloo cannot end, because they wait for a sender, would hold up the exit.
        os._exit(0)


async def _serve(make: Callable[..., Any], args: Any, conn: Connection[Any, Any]) -> None:
    """Answer calls until ``close`` has been answered or the caller has ended."""
    pipe = _Pipe(conn)
    with contextlib.closing(pipe):
        served = make(*args)
        while (request := await pipe.receive()) is not None:
            method, arguments = request
            try:
                reply = "", await getattr(served, method)(**arguments)
            # The boundary of the process: any error is a result for the caller.
            except Exception:  # noqa: BLE001
                reply = traceback.format_exc(), None
            with contextlib.suppress(OSError):
                pipe.send(reply)
            if method == "close":
                return


def killer(pids: Sequence[int]) -> Callable[[], None]:
    """A function that kills these processes once, and no later process that reuses one of their ids."""
    handles = ExitStack()
    if sys.platform == "linux":
        for pid in pids:
            handles.callback(_kill_handle, os.pidfd_open(pid))
    return handles.close


def _kill_handle(handle: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def run_turn(module: str, argument: str, **environment: str) -> dict[str, Any]:
    """Run ``python -m module argument``; returns the JSON object that is the last line of its output.

    Args:
        module: name of a module.
        argument: its command line.
        environment: further environment variables.

    Raises:
        RuntimeError: the program failed; the message has what it printed.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **environment, "PYTHONPATH": path}
    command = [sys.executable, "-m", module, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
