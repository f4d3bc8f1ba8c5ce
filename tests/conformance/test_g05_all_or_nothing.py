"""G5 and G6: a failed update leaves the version before it in service, whole, and its error travels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiosync import LayoutMismatchError, RemoteApplyError, WeightStrategy
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.local import LocalCluster
from tests.kit.models import Other, Uniform, fill, value_of
from tests.kit.processes import ProcessCluster, ScenarioError


def _weights(value: float) -> dict[str, Tensor]:
    return {f"values.{i}": torch.full((16,), value) for i in range(4)}


async def _still_works(cluster: LocalCluster, version: int) -> None:
    """The version before is whole everywhere, and the next good send goes through."""
    for worker in cluster.workers:
        assert value_of(worker.model) == version
        assert worker.scheme.version == version
    assert cluster.scheme.version == version
    for later in (version + 1, version + 2):
        fill(cluster.model, later)
        report = await cluster.scheme.send()
        assert report.version == later
        for worker in cluster.workers:
            assert value_of(worker.model) == later


async def test_a_wrong_shape_is_found_before_anything_is_sent(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        bad = _weights(9.0) | {"values.2": torch.full((5,), 9.0)}
        with pytest.raises(LayoutMismatchError) as caught:
            await cluster.scheme.send(bad)
        assert caught.value.differing == {"values.2": ("float32[16]", "float32[5]")}
        assert caught.value.worker is None
        await _still_works(cluster, 0)


async def test_missing_and_unexpected_keys_are_listed(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        bad = _weights(9.0)
        bad["extra"] = bad.pop("values.1")
        with pytest.raises(LayoutMismatchError) as caught:
            await cluster.scheme.send(bad)
        assert caught.value.missing == ("values.1",)
        assert caught.value.unexpected == ("extra",)
        assert isinstance(caught.value, KeyError)
        await _still_works(cluster, 0)


async def test_a_wrong_dtype_is_listed(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        bad = _weights(9.0) | {"values.0": torch.full((16,), 9, dtype=torch.int64)}
        with pytest.raises(LayoutMismatchError) as caught:
            await cluster.scheme.send(bad)
        assert caught.value.differing == {"values.0": ("float32[16]", "int64[16]")}
        await _still_works(cluster, 0)


async def test_a_worker_whose_model_does_not_fit_is_refused_at_connect(case: SchemeCase) -> None:
    cluster = LocalCluster(case, worker_models={1: Other()})
    try:
        good, bad = cluster.workers
        results = await asyncio.gather(
            cluster.scheme.connect(), good.connect(), bad.connect(), return_exceptions=True
        )
        ours, fine, theirs = results
        assert fine is None
        for error in (ours, theirs):
            assert isinstance(error, LayoutMismatchError)
            assert error.missing == ("weight",) or error.unexpected == ("weight",)
        assert isinstance(ours, LayoutMismatchError)
        assert ours.worker == 1
        assert torch.equal(bad.model.weight, torch.zeros(3, 2))
        assert value_of(good.model) == 0
    finally:
        await cluster.close()


class _Context:
    """Refuses updates while it is told to, in one of two ways."""

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self.bad = False
        self.told: list[Any] = []

    def update_policy_weights_(self, policy_or_weights: Any = None, model_id: str = "") -> None:
        if self.bad:
            raise OSError("the disk of the worker is full")
        self.told.append(model_id)


class _AsyncContext(_Context):
    async def update_policy_weights_(  # type: ignore[override]
        self, policy_or_weights: Any = None, model_id: str = ""
    ) -> None:
        super().update_policy_weights_(policy_or_weights, model_id)


@pytest.mark.parametrize("kind", [_Context, _AsyncContext])
async def test_a_context_that_raises(case: SchemeCase, kind: type[_Context]) -> None:
    contexts = [kind(0), kind(1)]
    cluster = LocalCluster(case)
    for worker, context in zip(cluster.workers, contexts, strict=True):
        worker.init(context=context)
    async with cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        assert contexts[0].told == ["policy", "policy"]
        for context in contexts:
            context.bad = True
        fill(cluster.model, 9)
        with pytest.raises(RemoteApplyError) as caught:
            await cluster.scheme.send()
        error = caught.value
        assert error.worker in (0, 1)
        assert error.version == 2
        assert error.remote_type == "OSError"
        assert error.remote_message == "the disk of the worker is full"
        assert "update_policy_weights_" in error.remote_traceback
        assert "the disk of the worker is full" in str(error)
        assert error.report is not None
        assert {r.status for r in error.report.workers.values()} == {"failed"}
        for context in contexts:
            context.bad = False
        await _still_works(cluster, 1)


async def test_one_worker_refuses_and_the_other_moves_on(case: SchemeCase) -> None:
    contexts = [_Context(0), _Context(1)]
    cluster = LocalCluster(case)
    for worker, context in zip(cluster.workers, contexts, strict=True):
        worker.init(context=context)
    async with cluster:
        contexts[0].bad = True
        fill(cluster.model, 1)
        with pytest.raises(RemoteApplyError) as caught:
            await cluster.scheme.send()
        assert caught.value.worker == 0
        assert cluster.scheme.version == 1
        assert cluster.scheme.worker_versions == {0: 0, 1: 1}
        assert value_of(cluster.workers[0].model) == 0
        assert value_of(cluster.workers[1].model) == 1
        contexts[0].bad = False
        fill(cluster.model, 2)
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [2, 2]


class _Sour(WeightStrategy):
    """Applies half of the weights and raises, while it is told to."""

    bad = False

    def apply_weights(self, destination: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        super().apply_weights(destination, weights, *args, **kwargs)
        if self.bad:
            raise ArithmeticError("half way")


async def test_a_strategy_that_raises_half_way_is_taken_back(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    strategies = [_Sour(), _Sour()]
    for worker, strategy in zip(cluster.workers, strategies, strict=True):
        worker.scheme.strategy = strategy
    async with cluster:
        for strategy in strategies:
            strategy.bad = True
        fill(cluster.model, 9)
        with pytest.raises(RemoteApplyError, match="half way") as caught:
            await cluster.scheme.send()
        assert caught.value.remote_type == "ArithmeticError"
        for strategy in strategies:
            strategy.bad = False
        await _still_works(cluster, 0)


class _Extra(nn.Module):
    """Refuses extra state that says 13."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(2))
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if int(state["count"]) == 13:
            raise LookupError("thirteen")
        self.count = int(state["count"])


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_set_extra_state_that_raises_is_taken_back(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, model=_Extra, commit=commit) as cluster:
        cluster.model.count = 13
        cluster.model.seen.fill_(9)
        fill(cluster.model, 9)
        with pytest.raises(RemoteApplyError, match="thirteen"):
            await cluster.scheme.send()
        for worker in cluster.workers:
            assert value_of(worker.model) == 0
            assert value_of([worker.model.seen]) == 0
            assert worker.model.count == 0
        cluster.model.count = 2
        cluster.model.seen.fill_(2)
        fill(cluster.model, 2)
        await cluster.scheme.send()
        for worker in cluster.workers:
            assert value_of(worker.model) == 2
            assert worker.model.count == 2


async def test_a_hook_that_raises_fails_nothing(case: SchemeCase) -> None:
    def hook(event: object) -> None:
        raise RuntimeError("an observer's own fault")

    async with LocalCluster(case) as cluster:
        cluster.scheme.on_event(hook)
        cluster.workers[0].scheme.on_event(hook)
        await _still_works(cluster, 0)


async def test_a_refusal_that_nobody_waited_for_comes_out_later(case: SchemeCase) -> None:
    context = _Context(0)
    cluster = LocalCluster(case, workers=1)
    cluster.workers[0].init(context=context)
    async with cluster:
        context.bad = True
        await cluster.scheme.send(wait=False)
        with pytest.raises(RemoteApplyError, match="disk"):
            await cluster.scheme.wait_ack()
        context.bad = False
        fill(cluster.model, 5)
        await cluster.scheme.send()
        assert value_of(cluster.workers[0].model) == 5


async def test_refusals_between_processes(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        scheme, (first, second) = cluster.scheme, cluster.workers.values()
        await first.run(scenarios.refuse, on=True)
        fill(cluster.model, 1)
        with pytest.raises(RemoteApplyError) as caught:
            await scheme.send()
        assert caught.value.worker == 0
        assert caught.value.remote_type == "OSError"
        assert "update_policy_weights_" in caught.value.remote_traceback
        assert await first.run(scenarios.report) == {"version": 0, "value": 0}
        assert await second.run(scenarios.report) == {"version": 1, "value": 1}
        with pytest.raises(LayoutMismatchError):
            await scheme.send({"values.0": torch.zeros(16)})
        await first.run(scenarios.refuse, on=False)
        fill(cluster.model, 2)
        await scheme.send()
        for worker in (first, second):
            assert await worker.run(scenarios.report) == {"version": 2, "value": 2}


async def test_a_process_whose_model_does_not_fit(process_case: SchemeCase) -> None:
    cluster = ProcessCluster(process_case, workers=1)
    try:
        cluster.scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
        worker = cluster.spawn(0)
        connecting = asyncio.create_task(cluster.scheme.connect())
        with pytest.raises(ScenarioError) as caught:
            await worker.run(scenarios.connect, kind="other")
        assert caught.value.kind == "LayoutMismatchError"
        with pytest.raises(LayoutMismatchError) as ours:
            await connecting
        assert ours.value.worker == 0
    finally:
        await cluster.close()
