"""A program without mistakes. Type checkers read it; it is not run."""

from __future__ import annotations

from typing import assert_type

from tensordict import TensorDictBase
from torch import Tensor, nn

import aiosync
import aiosync.sync
from aiosync.collectors import Collector, MultiCollector


def make_env() -> object: ...


async def trainer() -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://0.0.0.0:1", token="t", timeout=3, first_version=2)
    report = await scheme.send(nn.Linear(2, 2), wait=False)
    assert_type(report.version, int)
    assert_type(await scheme.receive(), TensorDictBase | dict[str, Tensor] | None)
    async with MultiCollector([make_env], frames_per_batch=3, device="cpu", launcher="ray") as collector:
        async for batch in collector:
            assert_type(batch, TensorDictBase)
        assert_type(await collector.next(), TensorDictBase | None)
    aiosync.DistributedWeightSyncScheme("gloo", True, 3.0, cast=None, per_worker_weights=True)
    aiosync.RayModuleTransformScheme("state_dict", max_slots=4, share_memory=False, timeout=1)
    aiosync.MultiProcessWeightSyncScheme("state_dict", False, commit="copy")


def blocking() -> None:
    with aiosync.sync.SharedMemWeightSyncScheme(timeout=3, peft="adapter") as scheme:
        assert_type(scheme.version, int)
    Collector(make_env, total_frames=10)
