"""Relays on loopback, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from aiosync import TCPWeightSyncScheme, WeightRelay
from aiosync.transfer.slots import Lease, LeaseKind
from tests.kit.clock import PATIENCE, within
from tests.kit.local import LocalWorker
from tests.kit.raw_peer import RawWorker
from tests.kit.seams import pool_of
from tests.kit.tcp import TOKEN, make_worker, sender_of

__all__ = ["beside_a_silent_worker", "connect", "read_slowly", "relay_below", "serve"]


@asynccontextmanager
async def relay_below(
    upstream: str, listen: str = "tcp://127.0.0.1:0", **options: Any
) -> AsyncIterator[WeightRelay]:
    """A relay, connected by whoever enters it; its trainer connects meanwhile."""
    above = TCPWeightSyncScheme(upstream, token=TOKEN, timeout=PATIENCE)
    below = TCPWeightSyncScheme(listen, token=TOKEN, **{"timeout": PATIENCE, **options})
    relay = WeightRelay(above, below, model_id="policy")
    try:
        yield relay
    finally:
        await within(relay.aclose())


async def connect(scheme: TCPWeightSyncScheme, *relays: WeightRelay) -> None:
    """A trainer and its relays."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scheme.connect(min_workers=len(relays)))
        for relay in relays:
            tasks.create_task(relay.connect())


@asynccontextmanager
async def beside_a_silent_worker(
    model: nn.Module,
) -> AsyncIterator[tuple[TCPWeightSyncScheme, WeightRelay, LocalWorker]]:
    """A trainer of ``model``, a relay, and a worker below it that serves, beside one that answers nothing."""
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        worker = make_worker(relay.address)
        await serve(worker)
        silent = await RawWorker.join(relay._downstream)
        await silent.hear()
        yield scheme, relay, worker
        await silent.close()
        await worker.close()


async def serve(*workers: Any) -> None:
    """Workers that connect now."""
    for worker in workers:
        await worker.connect()
        await worker.serve()


@dataclass
class _SlowWorker:
    """A worker that is slow but makes progress, so that its slots count."""

    worker: int = 99
    stalled: bool = False


def read_slowly(relay: WeightRelay) -> list[Lease]:
    """Have a slow worker read the versions that the relay's slots hold now, until the leases are released."""
    pool = pool_of(relay)
    return [pool.lease(slot, LeaseKind.READING, _SlowWorker()) for slot in pool.slots if slot.version >= 0]
