"""Where a worker may write into its parameters, no other process sees it, and the next update is whole."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from aiosync.weights import segment
from tests.kit.cases import SCHEMES
from tests.kit.clock import within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of

CASES = [case for case in SCHEMES if case.name in ("process", "process-pipes", "tcp")]
SIZES = [16, 1 << 18]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_own_writes_are_ones_own_and_gone_with_the_next_update(
    case: Any, size: int, commit: str
) -> None:
    async with LocalCluster(case, 2, model=lambda: Uniform(size=size), commit=commit) as cluster:
        for version in range(1, 7):  # often enough for each slot to be used again
            fill(cluster.model, float(version))
            assert (await within(cluster.scheme.send())).ok
            assert [value_of(worker.model) for worker in cluster.workers] == [version] * 2
            fill(cluster.workers[0].model, -1.0)
            assert value_of(cluster.workers[1].model) == version
            assert value_of(cluster.model) == version
            with torch.no_grad():
                cluster.workers[1].model.values[2][3] += 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_own_writes_survive_updates_of_other_entries(case: Any, size: int, commit: str) -> None:
    async with LocalCluster(case, 1, model=lambda: Uniform(size=size), commit=commit) as cluster:
        values = cluster.workers[0].model.values
        for version in range(1, 7):  # often enough for each slot to be used again
            with torch.no_grad():
                values[1].fill_(-version)
            given = {"values.0": torch.full((size,), float(version))}
            assert (await within(cluster.scheme.send(given, strict=False))).ok
            assert value_of([values[0].data]) == version
            assert value_of([values[1].data]) == -version
            assert value_of([values[2].data, values[3].data]) == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_own_writes_survive_the_sender(case: Any) -> None:
    cluster = LocalCluster(case, 1, model=lambda: Uniform(size=SIZES[1]))
    async with cluster:
        fill(cluster.workers[0].model, 7.0)
        await within(cluster.scheme.aclose())
        await cluster.workers[0].close()
        assert value_of(cluster.workers[0].model) == 7.0


@pytest.mark.parametrize(
    "case", [case for case in SCHEMES if case.name in ("process", "shared")], ids=lambda c: c.name
)
@pytest.mark.parametrize("size", SIZES)
async def test_weights_that_are_handed_on_by_multiprocessing(case: Any, size: int) -> None:
    """torch moves a tensor, and all that shares its storage, to pass it on to another process."""
    async with LocalCluster(case, 1, model=lambda: Uniform(size=size)) as cluster:
        model = cluster.workers[0].model
        for version in range(1, 9):
            fill(cluster.model, float(version))
            assert (await within(cluster.scheme.send())).ok
            assert value_of(model) == version
            if version in (2, 3, 6):
                model.share_memory()  # as its being pickled by multiprocessing does


async def test_a_process_whose_memory_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(buffer: torch.Tensor) -> None:
        raise OSError(errno.EINVAL, "locked")

    monkeypatch.setattr(segment, "_written_runs", refuse)
    case = next(case for case in CASES if case.name == "process")
    async with LocalCluster(case, 1, model=lambda: Uniform(size=SIZES[1])) as cluster:
        for version in range(1, 7):
            fill(cluster.model, float(version))
            assert (await within(cluster.scheme.send())).ok
            assert value_of(cluster.workers[0].model) == version
            fill(cluster.workers[0].model, -1.0)


class _Tied(torch.nn.Module):
    """Two parameters in the same memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(size))
        self.b = torch.nn.Parameter(self.a.data)


@pytest.mark.parametrize("size", [16, 1 << 20])  # the larger one is mapped
async def test_what_is_tied_stays_it_without_a_sender(size: int) -> None:
    case = next(case for case in CASES if case.name == "process")
    async with LocalCluster(case, 1, model=lambda: _Tied(size)) as cluster:
        model = cluster.workers[0].model
        await cluster.workers[0].close()
        fill(model, 3.0)
        assert model.a.data_ptr() == model.b.data_ptr()
