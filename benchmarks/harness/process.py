"""Objects in spawned processes of their own, which are called over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import anyio

SPAWN = get_context("spawn")


class RemoteError(Exception):
    """A call failed. ``status`` is ``failed`` (the message is the traceback), ``timeout`` or ``died``."""

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        super().__init__(message)


class Remote:
    """An object in a spawned process. Its coroutine methods are called by name, one call at a time.

    Args:
        make: makes the object in the process; importable by name.
        args: for ``make``; pickled while the process is spawned.
        uvloop: whether the process runs uvloop, or asyncio's own event loop.
        parent: whether the process starts processes of its own, which :meth:`kill` ends too. Otherwise it
            ends with this process.
    """

    def __init__(
        self, make: Callable[..., Any], *args: Any, uvloop: bool = False, parent: bool = False
    ) -> None:
        self._conn, theirs = SPAWN.Pipe()
        target = make, args, theirs, uvloop, parent
        self._process = SPAWN.Process(target=_process_main, args=target, daemon=not parent)
        self._process.start()
        theirs.close()
        self._parent = parent
        self.pid: int = self._process.pid or 0

    async def call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call ``method`` with the ``arguments`` and return its result, within ``timeout`` seconds.

        Raises:
            RemoteError: the method raised, the process ended, or no result came in time.
        """
        try:
            self._conn.send((method, arguments))
            async with asyncio.timeout(timeout):
                await anyio.wait_readable(self._conn)
            error, result = self._conn.recv()
        except TimeoutError:
            raise RemoteError("timeout", f"{method}: no answer within {timeout:g} s") from None
        except (EOFError, OSError):
            raise RemoteError("died", f"{method}: its process has ended") from None
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
        """Wait until the process has ended by itself, after ``close``. Raises :class:`RemoteError`."""
        await asyncio.to_thread(self._process.join, timeout)
        if self._process.is_alive():
            raise RemoteError("timeout", f"close: the process is still there after {timeout:g} s")

    def kill(self) -> None:
        """End the process by force, if it has not ended. Without a clean end, end its children too."""
        if self._conn.closed:
            return
        if self._parent and self._process.exitcode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._conn.close()


def _process_main(
    make: Callable[..., Any], args: Any, conn: Connection[Any, Any], uvloop: bool, parent: bool
) -> None:
    if parent:
        os.setpgrp()  # with the processes that it starts
    factory = importlib.import_module("uvloop").new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(make, args, conn))
    if threading.active_count() > 1:
        # Threads that torchrl or gloo cannot end, because they wait for a sender, would hold up the exit.
        os._exit(0)


async def _serve(make: Callable[..., Any], args: Any, conn: Connection[Any, Any]) -> None:
    """Answer calls until ``close`` has been answered or the caller has ended."""
    served, method = make(*args), ""
    with contextlib.suppress(EOFError, OSError):
        while method != "close":
            await anyio.wait_readable(conn)
            method, arguments = conn.recv()
            try:
                reply = "", await getattr(served, method)(**arguments)
            # The boundary of the process: any error is a result for the caller.
            except Exception:  # noqa: BLE001
                reply = traceback.format_exc(), None
            conn.send(reply)
