"""What a worker runs in: a process of its own, a task of the collector's event loop, or an actor of Ray."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import signal
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any, TypeAlias

import cloudpickle
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.collectors.command_pipe import (
    CommandPipe,
    CommandPipeClosed,
    LocalCommandPipe,
    RayCommandPipe,
    future_of,
)
from aiosync.collectors.pickling import dump_spec, load_spec
from aiosync.collectors.process_pipe import ProcessCommandPipe
from aiosync.collectors.worker import run_worker
from aiosync.collectors.worker_spec import Schemes, WorkerSpec
from aiosync.transports._offload import offloaded, start_thread


class Host(ABC):
    """Runs one worker.

    Methods in the order of their calls: :meth:`start`, then :meth:`ended` or :meth:`kill`, then
    :meth:`release`.
    """

    # Done when the worker has ended. A subclass sets it, or implements ended() and release().
    _running: asyncio.Future[Any] | None = None

    @abstractmethod
    async def start(self, spec: WorkerSpec, schemes: Schemes) -> CommandPipe:
        """Start the worker and return the pipe to it. OSError: it cannot be started. If this call is
        cancelled, :meth:`release` is called all the same."""

    async def ended(self, deadline: Deadline) -> bool:
        """Wait until the worker has ended; return whether it has, False after the deadline."""
        if self._running is None:
            return True
        await asyncio.wait([self._running], timeout=deadline.remaining())
        return self._running.done()

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker."""

    @abstractmethod
    def cause(self) -> str:
        """Describe how the worker ended, for an error message."""

    @property
    def pid(self) -> int | None:
        """The worker's process id, if it has a process on this machine."""
        return None

    def release(self) -> None:
        """Release all resources of a worker that has ended or was killed."""
        self._running = None


MakeHost: TypeAlias = Callable[[], Host]


class ProcessHost(Host):
    """Runs a worker in a process, with a pipe to it. ``ctx`` is multiprocessing's context."""

    def __init__(self, ctx: BaseContext) -> None:
        self._ctx: Any = ctx
        self._process: Any = None
        self._at_exit: Finalize[Any] | None = None

    async def start(self, spec: WorkerSpec, schemes: Schemes) -> CommandPipe:
        data, shared = dump_spec(spec)
        ours, theirs = self._ctx.Pipe()
        # A fork server has the environment variables of the moment when it was started.
        arguments = shared, dict(schemes), dict(os.environ), theirs
        name = f"aiosync-collector-{spec.index}"
        # Not a daemon: daemons may not have children, and some environments start processes.
        self._process = self._ctx.Process(target=_run, args=arguments, name=name, daemon=False)
        self._at_exit = Finalize(
            None, _kill_at_exit, args=(weakref.ref(self._process),), exitpriority=_EXIT_PRIORITY
        )
        try:
            await offloaded(lambda: _start(self._process), "aiosync-start")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        pipe = await ProcessCommandPipe.open(ours)
        # Not as an argument of the process: start() would block until the process has read all of it.
        pipe.send(data)
        return pipe

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
            return "its pipe closed, but its process still runs"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        if code != 1:
            return f"its process ended with exit code {code}"
        # A worker reports its errors: this process ended before the worker began.
        return (
            "its process ended with exit code 1: the reason is in its output (a script that makes a "
            "collector needs `if __name__ == '__main__':`, since workers import it)"
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def release(self) -> None:
        process, self._process = self._process, None
        at_exit, self._at_exit = self._at_exit, None
        if at_exit is not None:
            at_exit.cancel()
        if process is not None and process.pid is not None:
            with suppress(ValueError):  # the process still runs, even after kill()
                process.close()


_EXIT_PRIORITY = 5
"""Lower than the priority of what closes collectors at the interpreter's exit, higher than that of
multiprocessing's own wait for its children."""

_EXIT_SECONDS = 2.0
"""Seconds that a worker has to end by itself after its trainer's process has ended."""


def _kill_at_exit(process: Callable[[], Any]) -> None:
    """Kill the worker of a collector that was not closed, at the trainer's exit: multiprocessing would wait
    for it."""
    found = process()
    if found is not None and found.is_alive():
        found.kill()


def _end_with_parent() -> None:
    """End this process when the trainer's process has ended, whatever the event loop is doing."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        # The event loop sees its pipe close, closes the environment and ends, unless a step blocks the loop.
        time.sleep(_EXIT_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    start_thread(watch, "aiosync-parent")


def _run(
    shared: list[Tensor], schemes: Schemes, environ: dict[str, str], theirs: Connection[Any, Any]
) -> None:
    """The main function of a worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles a terminal's Ctrl-C
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(environ)
    _end_with_parent()

    async def main() -> None:
        pipe = await ProcessCommandPipe.open(theirs)
        with suppress(CommandPipeClosed):  # the collector closed before this worker began
            spec = await pipe.receive()
            await run_worker(lambda: replace(load_spec(spec, shared), own_loop=True), schemes, pipe)

    if sys.platform == "win32":
        asyncio.run(main())
    else:
        import uvloop

        uvloop.run(main())


def _start(process: Any) -> None:
    """Start a process that ignores a terminal's Ctrl-C until it has set its own handler: it inherits this
    thread's signal mask."""
    if sys.platform == "win32":
        process.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def context_of(method: str | None) -> BaseContext:
    """Return multiprocessing's context for a start method. Blocking, if it has to start a fork server."""
    if method is None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":
        _start_server()
    return multiprocessing.get_context(method)


def _start_server() -> None:
    """Start the server that processes are forked from, with the workers' modules imported, unless it runs.

    A process has one server and one list of modules for it. A list that the program has set is used as it
    is; else the default is put back afterwards, so that the program finds it as it was.
    """
    default = ["__main__"]
    if getattr(forkserver._forkserver, "_preload_modules", None) != default:
        forkserver.ensure_running()
        return
    used = (name for name in _PRELOADED_IF_USED if name in sys.modules)
    forkserver.set_forkserver_preload([*_PRELOADED, *used])
    try:
        forkserver.ensure_running()
    finally:
        forkserver.set_forkserver_preload(default)


_PRELOADED = ["uvloop", "aiosync.collectors.host"]
_PRELOADED_IF_USED = ["gymnasium", "torchrl.envs"]
"""What a server has imported that processes are forked from."""


class LocalHost(Host):
    """Runs a worker in a task of the collector's event loop."""

    async def start(self, spec: WorkerSpec, schemes: Schemes) -> CommandPipe:
        ours, theirs = LocalCommandPipe.pair()
        receiving = {model_id: copy.copy(scheme) for model_id, scheme in schemes.items()}
        work = run_worker(lambda: spec, receiving, theirs)
        self._running = asyncio.create_task(work, name="aiosync-collector")
        return ours

    def kill(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def cause(self) -> str:
        return "its task has ended"


@dataclass(eq=False, repr=False)
class RayHost(Host):
    """Runs a worker in a Ray actor."""

    ray: Any  # the module
    options: Mapping[str, Any]  # Ray's, for the actor
    _handle: Any = None

    async def start(self, spec: WorkerSpec, schemes: Schemes) -> CommandPipe:
        # An async actor: a call that waits for messages does not block other calls.
        self._handle = self.ray.remote(_WorkerActor).options(**self.options).remote()
        self._running = future_of(self._handle.run.remote(cloudpickle.dumps(spec), dict(schemes)))
        return RayCommandPipe(self._handle)

    def kill(self) -> None:
        if self._handle is not None:
            self.ray.kill(self._handle)

    def cause(self) -> str:
        if self._running is None or not self._running.done():
            return "its actor sends nothing more, but still runs"
        error = self._running.exception()
        if error is None:
            return "its actor has ended"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"Ray reports: {' '.join(lines)[:400]}"

    def release(self) -> None:
        self.kill()  # an idle actor stays alive as long as a process has its handle
        self._handle = self._running = None


class _WorkerActor:
    """The actor: runs a worker on its event loop."""

    def __init__(self) -> None:
        self._ours, self._theirs = LocalCommandPipe.pair()
        self._expected = 0
        self._out_of_order: dict[int, bytes | None] = {}

    async def run(self, spec: bytes, schemes: Schemes) -> None:
        """Run a worker until the collector closes the pipe."""
        await run_worker(partial(cloudpickle.loads, spec), schemes, self._theirs)

    async def deliver(self, number: int, data: bytes | None) -> None:
        """Deliver message ``number`` to the worker; None closes the pipe. Ray may run the calls of an async
        actor in another order."""
        self._out_of_order[number] = data
        while self._expected in self._out_of_order:
            message = self._out_of_order.pop(self._expected)
            self._expected += 1
            if message is None:
                self._ours.close()
            else:
                self._ours.send(cloudpickle.loads(message))

    async def messages(self) -> list[Any]:
        """Wait for messages of the worker and return them; an empty list after the last one."""
        try:
            return await self._ours.receive_all()
        except CommandPipeClosed:
            return []
