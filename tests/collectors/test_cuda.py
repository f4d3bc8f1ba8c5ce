"""Collectors whose policies act on a GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aiosync.collectors import Collector
from tests.collectors.kit import ENVS, check, collecting
from tests.collectors.worlds import make_policy
from tests.kit.clock import within
from tests.kit.marked import mark

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda:0"


@pytest.mark.parametrize("capture", [None, {"warmup": 2}], ids=["plain", "graph"])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("source", ["cpu", DEVICE])
async def test_workers_act_on_a_device(source: str, sync: bool, capture: dict[str, int] | None) -> None:
    policy = make_policy().to(source)
    options = {"sync": sync, "policy_device": DEVICE, "cudagraph_policy": capture}
    async with collecting(ENVS, policy, **options) as collector:
        seen: set[int] = set()
        for version in range(1, 12):
            batch = await within(anext(collector))
            check(batch.cpu())
            seen.update(batch["policy_version"].unique().tolist())
            mark(policy, version)
            await collector.update_policy_weights_()
        assert collector.policy_version == 11
        assert len(seen) > 5


async def test_one_process_acts_on_a_device_beside_its_trainer() -> None:
    policy = make_policy().to(DEVICE)
    async with Collector(ENVS[0], policy, frames_per_batch=20, policy_device=DEVICE) as collector:
        for version in range(1, 6):
            check((await within(anext(collector))).cpu())
            mark(policy, version)
            await collector.update_policy_weights_()
            await asyncio.sleep(0)
        assert collector.policy_version == 5


async def test_batches_on_a_device() -> None:
    async with collecting(ENVS, make_policy(), device=DEVICE, storing_device=DEVICE) as collector:
        for _ in range(3):
            batch = await within(anext(collector))
            assert batch.device == torch.device(DEVICE)
            check(batch.cpu())
