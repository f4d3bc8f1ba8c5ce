"""Arguments, receive(), figures, events, properties, and what users may replace."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import aiosync
import aiosync.sync
from aiosync import (
    InvalidArgumentError,
    SyncEvent,
    WorkerLostError,
)
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import steps, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster

# -- arguments ---------------------------------------------------------------------------------------

MODEL = Uniform()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "num_workers"),
        ({"model": MODEL}, "num_workers"),
        ({"model": MODEL, "num_workers": 0}, "num_workers"),
        ({"model": MODEL, "weights": {}, "num_workers": 1}, "weights"),
        ({"model": MODEL, "params_map": {0: MODEL}}, "model"),
        ({"params_map": {0: MODEL}, "num_workers": 1}, "num_workers"),
        ({"params_map": {}}, "params_map"),
        ({"params_map": {-1: MODEL}}, "params_map"),
        ({"model": MODEL, "devices": ["cpu"], "num_workers": 2}, "devices"),
        ({"model": MODEL, "devices": []}, "devices"),
        ({"model": MODEL, "devices": ["nowhere"]}, "nowhere"),
        ({"model": MODEL, "device_map_fn": lambda w, t: t}, "num_workers"),
        ({"model": MODEL, "devices": ["cpu"], "device_map_fn": lambda w, t: t}, "devices"),
        ({"context": object()}, "model_id"),
        ({"model": {"a": torch.zeros(1)}, "num_workers": 1}, "nn.Module"),
    ],
)
def test_wrong_mixes_of_arguments(case: SchemeCase, arguments: dict[str, Any], named: str) -> None:
    if case.elastic and arguments == {"model": MODEL}:
        return  # whoever comes
    recipe = case.build(1, {})
    with pytest.raises(InvalidArgumentError, match=named):
        recipe.scheme.init_on_sender(**arguments)
    recipe.close()


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "nonsense"},
        {"commit": "nonsense"},
        {"on_failure": "nonsense"},
        {"cast": torch.int8},
        {"max_slots": 1},
        {"timeout": 0},
    ],
)
def test_wrong_options(case: SchemeCase, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        case.build(1, options)


@pytest.mark.parametrize("package", [aiosync, aiosync.sync])
@pytest.mark.parametrize(
    "name",
    [
        "SharedMemWeightSyncScheme",
        "MultiProcessWeightSyncScheme",
        "TCPWeightSyncScheme",
        "DistributedWeightSyncScheme",
        "RPCWeightSyncScheme",
        "RayWeightSyncScheme",
        "RayModuleTransformScheme",
        "NoWeightSyncScheme",
        "MemoryWeightSyncScheme",
    ],
)
def test_a_misspelt_option_is_refused_with_the_known_one(package: Any, name: str) -> None:
    scheme = getattr(package, name)
    own = next(base for base in scheme.__mro__ if "__init__" in vars(base))
    options = inspect.signature(own.__init__).parameters.values()
    for option in [each.name for each in options if each.name != "self" and each.kind != each.VAR_KEYWORD]:
        with pytest.raises(
            InvalidArgumentError, match=f"{scheme.__name__}; did you mean {option}"
        ) as refused:
            scheme(**{option + "e": 3})
        assert str(refused.value).startswith(f"{option}e= is not an option of ")
    with pytest.raises(InvalidArgumentError, match="did you mean first_version"):
        scheme(frist_version=3)
    with pytest.raises(InvalidArgumentError, match=r"expected one of .*cast, .*commit, .*timeout"):
        scheme(zzz=3)


def test_from_backend() -> None:
    for name, kind in {
        "shared": aiosync.SharedMemWeightSyncScheme,
        "thread": aiosync.SharedMemWeightSyncScheme,
        "process": aiosync.MultiProcessWeightSyncScheme,
        "multiprocessing": aiosync.MultiProcessWeightSyncScheme,
        "none": aiosync.NoWeightSyncScheme,
        "direct": aiosync.NoWeightSyncScheme,
        "memory": aiosync.MemoryWeightSyncScheme,
    }.items():
        assert type(aiosync.WeightSyncScheme.from_backend(name, timeout=3)) is kind
    with pytest.raises(InvalidArgumentError, match="nonsense"):
        aiosync.WeightSyncScheme.from_backend("nonsense")


async def test_init_on_worker_is_the_same(case: SchemeCase) -> None:
    cluster = LocalCluster(case, workers=1)
    arguments = cluster.recipe.receiver_arguments.get(0, {})
    worker = cluster.workers[0]
    worker.scheme = copy.copy(cluster.scheme)
    worker.scheme.init_on_worker(model_id="policy", model=worker.model, worker_idx=0, **arguments)
    async with cluster:
        assert value_of(worker.model) == 0


# -- receive -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_receive_gives_the_strategys_form(case: SchemeCase, strategy: str) -> None:
    async with LocalCluster(case, workers=1, serve=False, strategy=strategy) as cluster:
        worker = cluster.workers[0]
        assert worker.scheme.strategy_str == strategy
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        weights: Any = await worker.scheme.receive()
        assert isinstance(weights, TensorDict if strategy == "tensordict" else dict)
        flat: Any = weights
        assert value_of((flat.flatten_keys(".") if strategy == "tensordict" else flat).values()) == 1


async def test_receive_beside_receiving(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        for version in range(1, 4):
            waiting = asyncio.create_task(worker.scheme.receive())
            await steps(5)
            fill(cluster.model, version)
            await cluster.scheme.send()
            weights: Any = await within(waiting)
            assert value_of(weights.values(True, True)) == version


async def test_receive_when_the_sender_has_gone(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, serve=False) as cluster:
        await cluster.scheme.aclose()
        with pytest.raises(WorkerLostError):
            await cluster.workers[0].scheme.receive()


async def test_what_the_body_raises_comes_out_of_receiving(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, serve=False) as cluster:
        with pytest.raises(ZeroDivisionError):
            async with cluster.workers[0].scheme.receiving():
                raise ZeroDivisionError


# -- figures and events ------------------------------------------------------------------------------


async def test_stats(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        for _ in range(3):
            await cluster.scheme.send()
        stats = cluster.scheme.stats
        assert (stats.updates, stats.failures, stats.lost) == (3, 0, 0)
        assert stats.nbytes == 3 * 4 * 16 * 4
        assert stats.lag == {0: 0, 1: 0}
        assert stats.phases["total"].count == 3
        assert stats.phases["total"].mean <= stats.phases["total"].max
        theirs = cluster.workers[0].scheme.stats
        assert theirs.updates == 4
        assert set(theirs.phases) >= {"stage", "wait", "commit"}


async def test_events(case: SchemeCase) -> None:
    sender: list[SyncEvent] = []
    receiver: list[SyncEvent] = []
    cluster = LocalCluster(case, workers=1)
    remove = cluster.scheme.on_event(sender.append)
    cluster.workers[0].scheme.on_event(receiver.append)
    async with cluster:
        await cluster.scheme.send()
        remove()
        await cluster.scheme.send()
    assert [e.kind for e in sender] == ["joined", "connected", "applied", "sent"]
    kinds = [e.kind for e in receiver]
    assert kinds == ["committed", "connected", "committed", "committed", "closed"]
    assert [e.version for e in receiver if e.kind == "committed"] == [0, 1, 2]
    assert all(e.model_id == "policy" for e in sender + receiver)


async def test_one_info_line_per_send(case: SchemeCase, caplog: pytest.LogCaptureFixture) -> None:
    async with LocalCluster(case) as cluster:
        with caplog.at_level(logging.INFO, "aiosync"):
            caplog.clear()
            for _ in range(3):
                await cluster.scheme.send()
        lines = [r for r in caplog.records if r.name.startswith("aiosync")]
        assert len(lines) == 3
        assert all(r.levelno == logging.INFO for r in lines)
        assert "version 1" in lines[0].getMessage()


async def test_properties(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    scheme, worker = cluster.scheme, cluster.workers[0].scheme
    assert scheme.initialized_on_sender and not scheme.initialized_on_receiver
    assert worker.initialized_on_receiver and not worker.initialized_on_sender
    assert not scheme.synchronized_on_sender
    async with cluster:
        assert scheme.synchronized_on_sender and not scheme.synchronized_on_receiver
        assert worker.synchronized_on_receiver and not worker.synchronized_on_sender
        assert scheme.model is cluster.model
        assert worker.model is cluster.workers[0].model
        assert scheme.model_id == worker.model_id == "policy"
        assert worker.worker_idx == 0
        assert scheme.worker_idx is None
        assert set(scheme.sender_transports) == {0, 1}
        assert all(t.check_connection() for t in scheme.sender_transports.values())
        assert worker.receiver_transport is not None
        assert worker.receiver_transport.check_connection()
        assert scheme.shared_transport is not None
        assert scheme.get_sender().version == 0
        assert worker.get_receiver().version == 0
        assert value_of(scheme.weights.values(True, True)) == 0


async def test_a_prepared_update_is_not_copied(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        weights = cluster.scheme.prepare_weights()
        fill(cluster.model, 3)
        assert value_of(weights.values(True, True)) == 3
        cluster.workers[0].scheme.apply_weights(Uniform(8.0))
        assert value_of(cluster.workers[0].model) == 8
        assert cluster.workers[0].scheme.version == 0
        await cluster.scheme.send()
        assert value_of(cluster.workers[0].model) == 3


async def test_weights_that_one_worker_applies_by_hand_are_its_own(case: SchemeCase) -> None:
    """Not those of the sender, nor of workers that read the same memory."""
    async with LocalCluster(case, workers=2) as cluster:
        one, other = cluster.workers
        fill(cluster.model, 1)
        await cluster.scheme.send()
        one.scheme.apply_weights(Uniform(8.0))
        assert [value_of(one.model), value_of(other.model)] == [8, 1]
        assert value_of(cluster.scheme.weights.values(True, True)) == 1
        one.scheme.get_receiver().apply_weights(Uniform(9.0))
        assert [value_of(one.model), value_of(other.model)] == [9, 1]
        await cluster.scheme.send({"values.1": torch.full_like(one.model.values[1], 2)}, strict=False)
        assert [value_of(each) for each in other.model.values[:2]] == [1, 2]
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert [value_of(one.model), value_of(other.model)] == [3, 3]


@pytest.mark.parametrize("kind", ["copy", "dict", "TensorDict"])
async def test_weights_that_are_applied_by_hand_are_written_in_place(case: SchemeCase, kind: str) -> None:
    """Where the sender's memory is only copied from: CUDA graphs, or other processes, have the addresses."""
    made: dict[str, Any] = {
        "dict": dict(Uniform().named_parameters()),
        "TensorDict": TensorDict(dict(Uniform().named_parameters())),
    }
    commit = "copy" if kind == "copy" else "flip"
    models = {0: made[kind]} if kind in made else None
    async with LocalCluster(case, workers=1, commit=commit, worker_models=models) as cluster:
        (worker,) = cluster.workers

        def addresses() -> list[int]:
            model = worker.model
            return [each.data_ptr() for each in (model if kind != "copy" else model.state_dict()).values()]

        await cluster.scheme.send()
        before = addresses()
        worker.scheme.apply_weights(Uniform(8.0))
        assert addresses() == before
        assert all(value_of(each) == 8 for each in _tensors(worker.model))
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert addresses() == before
        assert all(value_of(each) == 3 for each in _tensors(worker.model))


def _tensors(model: Any) -> list[Any]:
    return list((model.state_dict() if isinstance(model, nn.Module) else model).values())


# -- subclassing and no scheme at all ----------------------------------------------------------------


async def test_a_strategy_of_ones_own(case: SchemeCase) -> None:
    class Doubling(aiosync.WeightStrategy):
        def extract_weights(self, source: Any, *args: Any, **kwargs: Any) -> Any:
            weights: Any = super().extract_weights(source, *args, **kwargs)
            return weights.apply(lambda t: t * 2)

    cluster = LocalCluster(case, workers=1)
    cluster.scheme.strategy = Doubling()
    async with cluster:
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert value_of(cluster.workers[0].model) == 6


async def test_no_scheme_at_all() -> None:
    scheme = aiosync.NoWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=3)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=Uniform(), worker_idx=0)
    await scheme.connect()
    await worker.connect()
    assert (await scheme.send()).version == 1
    assert (await scheme.wait_ack()).ok
    assert await worker.receive() is None
    async with worker.receiving(), worker.pinned() as version:
        assert version == 0
    another = aiosync.NoWeightSyncScheme(first_version=5)
    another.init_on_sender(model_id="value", model=Uniform())
    await another.connect()
    assert another.version == 5
    async with aiosync.atomic(scheme, another) as tx:
        pass
    assert [tx.reports[each].version for each in (scheme, another)] == [2, 6]
    closing = asyncio.create_task(worker.wait_closed())
    await steps(2)
    await worker.aclose()
    await within(closing)
    await scheme.aclose()
    await scheme.aclose()


async def test_a_cast_between_processes(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=1, cast=torch.bfloat16) as cluster:
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert (await cluster.workers[0].run(scenarios.report))["value"] == 3
