"""aiosync's two schemes, as its README uses them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from multiprocessing.context import SpawnContext
from typing import cast

from torch import nn

import aiosync
from benchmarks.peers import ReceivePeer, SendPeer, Sent, Weights

__all__ = ["make_receiver", "make_sender"]

MODEL_ID = "policy"
TIMEOUT = 60.0
"""Seconds that any one call may take; a hang is a result, not the end of the run."""


def make_sender(name: str, scheme: str, model: nn.Module, num_workers: int, ctx: SpawnContext) -> SendPeer:
    """The sender's end, with every option at its default but the deadline."""
    return _AiosyncSender(scheme, model, num_workers, ctx)


def make_receiver(recipe: object, model: nn.Module, worker_idx: int) -> ReceivePeer:
    """A worker's end: a receiver task beside the worker's loop."""
    return _AiosyncReceiver(cast(aiosync.WeightSyncScheme, recipe), model, worker_idx)


class _AiosyncSender(SendPeer):
    def __init__(self, scheme: str, model: nn.Module, num_workers: int, ctx: SpawnContext) -> None:
        self._scheme = aiosync.WeightSyncScheme.from_backend(scheme, sync=True, timeout=TIMEOUT)
        self._scheme.init_on_sender(model_id=MODEL_ID, model=model, num_workers=num_workers, ctx=ctx)
        self.recipe = self._scheme

    async def connect(self) -> None:
        await self._scheme.connect()

    async def send(self, weights: Weights, *, off_loop: bool = False) -> Sent:
        report = await self._scheme.send(weights)
        commit = {
            idx: worker.seconds["commit"]
            for idx, worker in report.workers.items()
            if "commit" in worker.seconds
        }
        return Sent(commit=commit, phases=dict(report.seconds))

    async def close(self) -> None:
        await self._scheme.aclose()


class _AiosyncReceiver(ReceivePeer):
    def __init__(self, scheme: aiosync.WeightSyncScheme, model: nn.Module, worker_idx: int) -> None:
        self._scheme = scheme
        self._model = model
        self._idx = worker_idx
        self._receiving = AsyncExitStack()
        scheme.init_on_receiver(model_id=MODEL_ID, model=model, worker_idx=worker_idx)

    async def connect(self) -> None:
        await self._scheme.connect(worker_idx=self._idx)
        await self._receiving.enter_async_context(self._scheme.receiving())

    def version(self) -> int | None:
        return self._scheme.version

    def pinned(self) -> AbstractAsyncContextManager[int | None]:
        return self._scheme.pinned()

    async def close(self) -> None:
        # The receiver task was entered by the task that answers commands, and is left by it too.
        await self._receiving.aclose()
        await self._scheme.aclose()
