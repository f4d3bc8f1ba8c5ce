"""Weights on a GPU take the same path: an arena on the device, shared by CUDA IPC."""

from __future__ import annotations

import pytest
import torch

from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda:0"


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_on_one_device(case: SchemeCase, commit: str) -> None:
    source = Uniform().to(DEVICE)
    init = {"model": source, "devices": [DEVICE, DEVICE]}
    async with LocalCluster(case, model=lambda: Uniform().to(DEVICE), init=init, commit=commit) as cluster:
        for version in range(1, 5):
            fill(source, version)
            await cluster.scheme.send()
            fill(source, -1)
            assert [value_of(w.model) for w in cluster.workers] == [version, version]
            assert all(p.is_cuda for w in cluster.workers for p in w.model.parameters())


async def test_from_a_device_to_the_cpu_and_back(case: SchemeCase) -> None:
    source = Uniform().to(DEVICE)
    models = {0: Uniform(), 1: Uniform().to(DEVICE)}
    init = {"model": source, "devices": ["cpu", DEVICE]}
    async with LocalCluster(case, worker_models=models, init=init) as cluster:
        for version in range(1, 4):
            fill(source, version)
            await cluster.scheme.send()
            assert [value_of(w.model) for w in cluster.workers] == [version, version]


@pytest.mark.parametrize("size", [16, 1 << 22])
async def test_between_processes(process_case: SchemeCase, size: int) -> None:
    async with ProcessCluster(process_case, size=size, device=DEVICE) as cluster:
        for version in range(1, 5):
            fill(cluster.model, version)
            await cluster.scheme.send()
            fill(cluster.model, -1)
            for worker in cluster.workers.values():
                assert await worker.run(scenarios.report) == {"version": version, "value": version}
