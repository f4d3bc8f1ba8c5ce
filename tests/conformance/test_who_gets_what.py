"""Subsets of the entries, of the workers, and weights of a worker's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiosync import (
    InvalidArgumentError,
    LayoutMismatchError,
    UnknownWorkerError,
)
from tests.kit.cases import SchemeCase
from tests.kit.clock import steps
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of


async def test_a_subset_of_the_entries(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        for version in range(2, 7):
            report = await cluster.scheme.send({"values.2": torch.full((16,), float(version))}, strict=False)
            assert report.version == version
            assert report.nbytes == 64
            for worker in cluster.workers:
                found = [value_of([p]) for p in worker.model.values]
                assert found == [1, 1, version, 1]
        with pytest.raises(LayoutMismatchError) as caught:
            await cluster.scheme.send({"nonsense": torch.zeros(16)}, strict=False)
        assert caught.value.unexpected == ("nonsense",)
        with pytest.raises(LayoutMismatchError):
            await cluster.scheme.send({"values.2": torch.zeros(3)}, strict=False)


async def test_subsets_that_a_worker_skipped_are_not_lost(case: SchemeCase) -> None:
    async with LocalCluster(case, sync=False) as cluster:
        slow = cluster.workers[0]
        async with slow.scheme.pinned():
            for index in range(4):
                weights = {f"values.{index}": torch.full((16,), 10.0 + index)}
                await cluster.scheme.send(weights, strict=False)
                await steps(10)
        await cluster.scheme.wait_ack()
        for worker in cluster.workers:
            assert [value_of([p]) for p in worker.model.values] == [10, 11, 12, 13]


async def test_worker_ids(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=3) as cluster:
        for worker in (0, 1, 2):
            fill(cluster.model, 10 + worker)
            report = await cluster.scheme.send(worker_ids=worker)
            assert set(report.workers) == {worker}
        assert [value_of(w.model) for w in cluster.workers] == [10, 11, 12]
        assert cluster.scheme.worker_versions == {0: 1, 1: 2, 2: 3}
        fill(cluster.model, 20)
        await cluster.scheme.send(worker_ids=[0, 2])
        assert [value_of(w.model) for w in cluster.workers] == [20, 11, 20]
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [20, 20, 20]
        assert cluster.scheme.worker_versions == {0: 5, 1: 5, 2: 5}
        for wrong in (3, -1, [0, 9], True):
            with pytest.raises(UnknownWorkerError):
                await cluster.scheme.send(worker_ids=wrong)


async def test_many_sends_to_one_worker_hold_nobody_up(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=4) as cluster:
        for round_ in range(6):
            for worker in range(4):
                fill(cluster.model, 10 * round_ + worker)
                await cluster.scheme.send(worker_ids=worker)
        assert [value_of(w.model) for w in cluster.workers] == [50, 51, 52, 53]


async def test_weights_per_worker(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=2, per_worker_weights=True) as cluster:
        await cluster.scheme.send({0: Uniform(3.0), 1: Uniform(4.0)})
        assert [value_of(w.model) for w in cluster.workers] == [3, 4]
        report = await cluster.scheme.send({1: Uniform(5.0)})
        assert set(report.workers) == {1}
        assert [value_of(w.model) for w in cluster.workers] == [3, 5]
        fill(cluster.model, 6)
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [6, 6]


async def test_weights_per_worker_need_the_option(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=2) as cluster:
        with pytest.raises(InvalidArgumentError, match="per_worker_weights"):
            await cluster.scheme.send({0: Uniform(3.0), 1: Uniform(4.0)})


async def test_a_params_map(case: SchemeCase) -> None:
    shared, own = Uniform(1.0), Uniform(2.0)
    init = {"params_map": {0: shared, 1: shared, 2: own}}
    async with LocalCluster(case, workers=3, init=init) as cluster:
        assert [value_of(w.model) for w in cluster.workers] == [1, 1, 2]
        fill(shared, 3)
        fill(own, 4)
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [3, 3, 4]


async def test_a_device_map_fn(case: SchemeCase) -> None:
    def per_worker(worker: int, weights: Any) -> Any:
        return weights.apply(lambda t: t + worker)

    init = {"model": Uniform(1.0), "device_map_fn": per_worker, "num_workers": 2}
    async with LocalCluster(case, init=init) as cluster:
        assert [value_of(w.model) for w in cluster.workers] == [1, 2]
        await cluster.scheme.send(Uniform(5.0))
        assert [value_of(w.model) for w in cluster.workers] == [5, 6]
