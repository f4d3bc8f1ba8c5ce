"""Sender and workers on one event loop: everything but the second process."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from torch import nn

from aiosync import WeightSyncScheme, WorkerLostError
from tests.kit.cases import Recipe, SchemeCase
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform
from tests.kit.seams import lookups_ended

__all__ = ["LocalCluster", "LocalWorker"]


class LocalWorker:
    """A worker on the test's own loop.

    Attributes:
        scheme: its copy of the recipe.
        model: its model.
        lost: what ``receiving()`` raised at its end, if it did.
    """

    def __init__(self, scheme: WeightSyncScheme, index: int, model: Any, arguments: dict[str, Any]) -> None:
        self.scheme = scheme
        self.index = index
        self.model = model
        self.lost: WorkerLostError | None = None
        self._arguments = arguments
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.init()

    def init(self, **arguments: Any) -> None:
        """Call ``init_on_receiver``."""
        given = {"model_id": "policy", "model": self.model, "worker_idx": self.index}
        self.scheme.init_on_receiver(**{**given, **self._arguments, **arguments})

    async def connect(self, timeout: float | None = None) -> None:
        """Connect, without a receiver task."""
        await self.scheme.connect(timeout=timeout)

    async def serve(self) -> None:
        """Run the receiver task until :meth:`rest`."""
        ready = asyncio.Event()
        self._stop.clear()
        self._task = asyncio.create_task(self._serve(ready))
        await ready.wait()

    async def rest(self) -> None:
        """End the receiver task."""
        task, self._task = self._task, None
        if task is not None:
            self._stop.set()
            await within(task)

    async def close(self) -> None:
        """End the receiver task and the endpoint."""
        await self.rest()
        await within(self.scheme.aclose())

    async def _serve(self, ready: asyncio.Event) -> None:
        try:
            async with self.scheme.receiving():
                ready.set()
                await self._stop.wait()
        except WorkerLostError as exc:
            self.lost = exc


class LocalCluster:
    """A sender and its workers, connected when it is entered and closed when it is left.

    Args:
        case: the scheme.
        workers: how many.
        model: makes a model, for the sender and for each worker.
        serve: whether the workers' receiver tasks run from the beginning.
        init: what ``init_on_sender`` is given in place of the model and the number of workers.
        options: the scheme's.
    """

    def __init__(
        self,
        case: SchemeCase,
        workers: int = 2,
        *,
        model: Callable[[], Any] = Uniform,
        worker_models: dict[int, Any] | None = None,
        serve: bool = True,
        init: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.case = case
        self.recipe: Recipe = case.build(workers, {"timeout": PATIENCE, **options})
        self.scheme = self.recipe.scheme
        self.model = model()
        self.workers: list[LocalWorker] = []
        self._make_model = model
        self._serve = serve
        source: dict[str, Any] = {"model": self.model, "num_workers": workers}
        self.scheme.init_on_sender(**{"model_id": "policy", **(source if init is None else init)})
        given = worker_models or {}
        for index in range(workers):
            self.add(index, given.get(index))

    def add(self, index: int, model: nn.Module | None = None) -> LocalWorker:
        """Another worker endpoint (a late one, or one that comes again); not connected."""
        arguments = self.recipe.receiver_arguments.get(index, {})
        made = self._make_model() if model is None else model
        worker = LocalWorker(copy.copy(self.scheme), index, made, arguments)
        self.workers.append(worker)
        return worker

    async def connect(self) -> None:
        """Connect everybody."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.scheme.connect())
            for worker in self.workers:
                tasks.create_task(worker.connect())
        if self._serve:
            for worker in self.workers:
                await worker.serve()

    async def close(self) -> None:
        """Close everybody, the workers first."""
        async with AsyncExitStack() as stack:
            stack.callback(self.recipe.close)
            stack.push_async_callback(lambda: within(self.scheme.aclose()))
            stack.push_async_callback(lookups_ended)
            for worker in self.workers:
                stack.push_async_callback(worker.close)

    async def __aenter__(self) -> Self:
        try:
            await within(self.connect())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
