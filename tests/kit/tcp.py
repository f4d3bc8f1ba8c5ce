"""TCP schemes on loopback, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from torch import nn

from aiosync import TCPWeightSyncScheme
from tests.kit.clock import PATIENCE, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform

__all__ = ["TOKEN", "break_off", "join", "make_worker", "sender_of"]

TOKEN = "a token of the tests"


def make_worker(address: str, model: nn.Module | None = None, **options: Any) -> LocalWorker:
    """A worker that knows address and token, as one on another machine would."""
    scheme = TCPWeightSyncScheme(address, token=TOKEN, **{"timeout": PATIENCE, **options})
    worker = LocalWorker(scheme, 0, Uniform(-1.0) if model is None else model, {})
    worker.init(worker_idx=None)
    return worker


@asynccontextmanager
async def sender_of(model: nn.Module, **options: Any) -> AsyncIterator[TCPWeightSyncScheme]:
    """An elastic sender on a free port; it listens when somebody connects it."""
    scheme = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN, **{"timeout": PATIENCE, **options})
    scheme.init_on_sender(model_id="policy", model=model)
    try:
        yield scheme
    finally:
        await within(scheme.aclose())


def break_off(scheme: TCPWeightSyncScheme) -> None:
    """End a sender's connections without a goodbye."""
    for transport in scheme.sender_transports.values():
        transport.abort()  # type: ignore[attr-defined]


async def join(scheme: TCPWeightSyncScheme, *workers: LocalWorker) -> None:
    """Connect a sender and its first workers, and have them serve."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scheme.connect(min_workers=len(workers)))
        for worker in workers:
            tasks.create_task(worker.connect())
    for worker in workers:
        await worker.serve()
