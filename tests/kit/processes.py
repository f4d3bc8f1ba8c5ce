"""Worker processes, seen from the test.

They are forked from a server that has imported torch already, so each costs some tens of
milliseconds in place of seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import uvloop

from aiosync import WeightSyncScheme
from tests.kit import child
from tests.kit.cases import Place, Recipe, SchemeCase, Start
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform

__all__ = ["ProcessCluster", "Scenario", "ScenarioError", "Worker", "warm_up"]

Scenario = Callable[..., Awaitable[Any]]

ROOT = Path(__file__).resolve().parents[2]


class ScenarioError(Exception):
    """A scenario raised in the worker.

    Attributes:
        kind: the exception's type there.
        facts: the attributes of an aiosync error.
    """

    def __init__(self, kind: str, message: str, trace: str, facts: dict[str, Any]) -> None:
        self.kind = kind
        self.facts = facts
        super().__init__(f"{kind}: {message}\n{trace}")


class WorkerDied(Exception):
    """The worker process ended while it was waited for."""


def warm_up() -> None:
    """Start the server that workers are forked from; it stays for the whole session."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), path]))
    modules = ["__main__", "torch", "uvloop", "aiosync", "tests.kit.scenarios"]
    modules += ["gymnasium", "aiosync.collectors.worker", "tests.compat.policies"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    first.close()
    os.environ["PYTHONPATH"] = path


class Forked:
    """Where a worker runs: see :class:`~tests.kit.cases.Place`. This one is a process from the server.

    Args:
        scheme: the recipe that it gets.
        index: which worker it is.
        arguments: for its ``init_on_receiver``.
        on_uvloop: which event loop it is to have.
    """

    def __init__(
        self, scheme: WeightSyncScheme, index: int, arguments: dict[str, Any], on_uvloop: bool
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self.control, theirs = context.Pipe()
        self._process = context.Process(target=child.main, args=(scheme, index, arguments, theirs, on_uvloop))
        self._process.start()
        theirs.close()  # held open here it would hide the worker's end

    @property
    def pid(self) -> int:
        """See :class:`~tests.kit.cases.Place`."""
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """See :class:`~tests.kit.cases.Place`."""
        self._process.join()
        self._process.close()


class Worker:
    """One worker process.

    Args:
        scheme: the recipe that it gets.
        index: which worker it is.
        arguments: for its ``init_on_receiver``.
        start: where it runs.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        index: int,
        arguments: dict[str, Any] | None = None,
        *,
        start: Start | None = None,
    ) -> None:
        self.index = index
        on_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
        self._place: Place = (start or Forked)(scheme, index, arguments or {}, on_uvloop)
        self._control = self._place.control
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._said: defaultdict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._next = 0
        self._stopped = False
        self.join_loop()

    def join_loop(self) -> None:
        """Listen to the worker on the running loop."""
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._readable)

    def leave_loop(self) -> None:
        """Do not listen on the running loop any more, which is about to be closed."""
        asyncio.get_running_loop().remove_reader(self._control.fileno())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._place.pid

    # -- scenarios ---------------------------------------------------------------------------------

    def begin(self, scenario: Scenario, **args: Any) -> asyncio.Future[Any]:
        """Start a scenario; await what this returns for its value."""
        number, self._next = self._next, self._next + 1
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        path = f"{scenario.__module__}:{scenario.__qualname__}"
        self._send({"id": number, "call": path, "args": args})
        return future

    async def run(self, scenario: Scenario, **args: Any) -> Any:
        """Run a scenario to its end; its exception is raised here as a :class:`ScenarioError`."""
        return await within(self.begin(scenario, **args))

    def tell(self, name: str) -> None:
        """Say a word that a scenario waits for."""
        self._send({"tell": name})

    async def says(self, name: str) -> Any:
        """Wait for a word from a scenario; returns what came with it."""
        return await within(self._said[name].get())

    def heard(self, name: str) -> bool:
        """Whether a scenario has said this word, and nobody has taken it yet."""
        return not self._said[name].empty()

    # -- faults ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP."""
        self._stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    async def ended(self) -> None:
        """Wait for the end of the process."""
        await within(self._ended.wait())

    async def close(self) -> None:
        """End the process, by force if it has to be, and let go of it."""
        if not self._ended.is_set():
            if self._stopped:
                self.kill()
                self.resume()
            else:
                self.tell("exit")
            try:
                await within(self._ended.wait(), PATIENCE / 3)
            except TimeoutError:
                self.kill()
                await self.ended()
        self._control.close()
        self._place.close()

    # -- the control pipe --------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send_bytes(msgspec.msgpack.encode(message))

    def _readable(self) -> None:
        try:
            while self._control.poll():
                self._take(msgspec.msgpack.decode(self._control.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._on_end()

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"said": str(name), "value": value}:
                self._said[name].put_nowait(value)
            case {"id": int(number), "value": value}:
                self._settle(number, value, None)
            case {"id": int(number), "error": dict(e)}:
                error = ScenarioError(e["type"], e["message"], e["traceback"], e["facts"])
                self._settle(number, None, error)

    def _settle(self, number: int, value: Any, error: Exception | None) -> None:
        future = self._calls.pop(number)
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _on_end(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerDied(f"worker {self.index}"))
                future.exception()  # whoever awaits it hears of it; nobody has to
        self._ended.set()


class ProcessCluster:
    """A sender here and its workers as processes; connected when it is entered, closed when left.

    Args:
        case: the scheme.
        workers: how many.
        tensors, size: of the model, see :class:`~tests.kit.models.Uniform`.
        serve: whether the workers' receiver tasks run from the beginning.
        device: where all models are.
        source: where the sender's model is, if not there.
        options: the scheme's.
    """

    def __init__(
        self,
        case: SchemeCase,
        workers: int = 2,
        *,
        tensors: int = 4,
        size: int = 16,
        serve: bool = True,
        device: str = "cpu",
        source: str = "",
        **options: Any,
    ) -> None:
        self.case = case
        self.recipe: Recipe = case.build(workers, {"timeout": PATIENCE, **options})
        self.scheme = self.recipe.scheme
        self.model = Uniform(tensors=tensors, size=size).to(source or device)
        self.workers: dict[int, Worker] = {}
        self._count = workers
        self._shape = {"tensors": tensors, "size": size, "device": device}
        self._devices = [device] * workers
        self._serve = serve
        self._all: list[Worker] = []
        self._ends: list[Connection[Any, Any]] = []

    def spawn(self, index: int) -> Worker:
        """A process for this worker; not connected."""
        arguments = self.recipe.receiver_arguments.pop(index, {})
        worker = self.workers[index] = Worker(self.scheme, index, arguments, start=self.case.start)
        self._all.append(worker)
        for end in arguments.values():
            if isinstance(end, Connection):
                end.close()  # the worker has it now; held here it would hide the worker's end
        return worker

    async def connect_worker(self, index: int, **args: Any) -> Any:
        """Have this worker connect and, if that is wanted, serve; returns its version."""
        from tests.kit import scenarios

        worker = self.workers[index]
        version = await worker.run(scenarios.connect, **{**self._shape, **args})
        if self._serve:
            await worker.run(scenarios.serve)
        return version

    async def __aenter__(self) -> Self:
        try:
            self.scheme.init_on_sender(model_id="policy", model=self.model, devices=self._devices)
            for index in range(self._count):
                self.spawn(index)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.scheme.connect())
                for index in range(self._count):
                    tasks.create_task(self.connect_worker(index))
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """End everything; what fails does not keep the rest from being ended."""
        async with AsyncExitStack() as stack:
            stack.callback(self.recipe.close)
            stack.push_async_callback(lambda: within(self.scheme.aclose()))
            for worker in self._all:
                stack.push_async_callback(worker.close)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
