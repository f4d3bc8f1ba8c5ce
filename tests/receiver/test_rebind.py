"""A connected receiver goes on with another model, or tells another context."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import nn

from aiosync import AlreadyConnectedError, LayoutMismatchError, NotConnectedError
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.seams import binding_of, connections_of, session_of, waits_for_readers

CASES = {case.name: case for case in SCHEMES}

pytestmark = pytest.mark.parametrize(
    "case", [CASES[name] for name in ("shared", "memory", "process", "tcp")], ids=lambda c: c.name
)


async def test_another_model_gets_what_is_in_service_and_all_that_comes(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        worker, another = cluster.workers[0], Uniform(-1.0)
        await worker.scheme.rebind(model=another)
        assert value_of(another) == 1 and worker.scheme.model is another
        for version in (2, 3, 4):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert value_of(another) == version == worker.scheme.version
        # The one before keeps what it had, in memory of its own.
        assert value_of(worker.model) == 1


async def test_another_dtype(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        another = Uniform().to(torch.bfloat16)
        await cluster.workers[0].scheme.rebind(model=another)
        for version in (1, 2, 3):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert {p.dtype for p in another.parameters()} == {torch.bfloat16}
            assert value_of(another) == version


async def test_a_call_that_fails_half_way_changes_nothing(
    case: SchemeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker, another = cluster.workers[0], Uniform(-1.0).to(torch.float64)
        detaching, detach = asyncio.Event(), binding_of(worker.scheme).detach
        loop = asyncio.get_running_loop()

        def detach_slowly(is_lent: Any) -> None:
            detach(is_lent)
            loop.call_soon_threadsafe(detaching.set)
            raise ValueError("not now")

        with monkeypatch.context() as patch:
            patch.setattr(binding_of(worker.scheme), "detach", detach_slowly)
            with pytest.raises(ValueError, match="not now"):
                await worker.scheme.rebind(model=another)
        await within(detaching.wait())
        assert worker.scheme.model is worker.model
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert value_of(worker.model) == 3 and worker.scheme.version == 1
        assert {p.dtype for p in another.parameters()} == {torch.float64}


async def test_a_model_that_does_not_fit_changes_nothing(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        with pytest.raises(LayoutMismatchError):
            await worker.scheme.rebind(model=nn.Linear(3, 1))
        assert worker.scheme.model is worker.model
        fill(cluster.model, 5)
        await cluster.scheme.send()
        assert value_of(worker.model) == 5


async def test_a_commit_that_waits_comes_first(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker, another = cluster.workers[0], Uniform(-1.0)
        async with worker.scheme.pinned():
            fill(cluster.model, 1)
            sending = asyncio.create_task(cluster.scheme.send())
            rebinding = asyncio.create_task(worker.scheme.rebind(model=another))
            await asyncio.sleep(0.02)
        await within(sending)
        await within(rebinding)
        assert value_of(another) == 1


async def test_an_update_that_comes_meanwhile_is_not_lost(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker, another = cluster.workers[0], Uniform(-1.0)
        rebinding = asyncio.create_task(worker.scheme.rebind(model=another))
        version = 0
        while not rebinding.done():
            version += 1
            fill(cluster.model, version)
            await cluster.scheme.send()
        await rebinding
        assert value_of(another) == version == worker.scheme.version


@pytest.mark.parametrize("meanwhile", [False, True], ids=["after", "meanwhile"])
async def test_what_was_staged_for_the_model_before_is_staged_again(
    case: SchemeCase, meanwhile: bool
) -> None:
    async with LocalCluster(case, workers=1, serve=False) as cluster:
        worker, another = cluster.workers[0], Uniform().to(torch.bfloat16)
        fill(cluster.model, 1)
        sending = asyncio.create_task(cluster.scheme.send())
        async with worker.scheme.pinned():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await worker.scheme.receive()
        rebinding = asyncio.create_task(worker.scheme.rebind(model=another))
        if meanwhile:
            await asyncio.sleep(0)  # it has begun, and what is staged could be committed now
        else:
            await rebinding
        assert await worker.scheme.receive() is not None
        await rebinding
        await within(sending)
        assert value_of(another) == 1 and {p.dtype for p in another.parameters()} == {torch.bfloat16}


async def test_what_was_staged_for_the_model_before_is_not_taken_from_a_slot_given_back(
    case: SchemeCase,
) -> None:
    """The worker has reported that it copied the version. So the sender writes newer ones over it."""
    async with LocalCluster(case, workers=1, serve=False) as cluster:
        worker, another = cluster.workers[0].scheme, Uniform(-1.0)
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        async with asyncio.timeout(PATIENCE), worker.pinned():
            while not connections_of(cluster.scheme)[0].staged:
                assert await worker.receive(timeout=0.005) is None
        await worker.rebind(model=another)
        for version in (2, 3, 4):
            fill(cluster.model, version)
            await cluster.scheme.send(wait=False)
        assert await worker.receive(timeout=PATIENCE) is not None
        assert value_of(another) == worker.version
        while worker.version < 4:
            assert await worker.receive(timeout=PATIENCE) is not None
        assert value_of(another) == 4


class _Writer:
    """Takes weights as it likes: into the parameters, where they are."""

    def __init__(self, model: Uniform) -> None:
        self.model = model
        self.told: list[float] = []

    def update_policy_weights_(self, policy_or_weights: Any, model_id: str) -> None:
        assert model_id == "policy"
        given = policy_or_weights.flatten_keys(".")
        self.told.append(float(given["values.0"][0]))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(given[name] + 100)  # it may write anything


async def test_a_context_that_writes_never_writes_into_the_senders_memory(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=2) as cluster:
        first, second = cluster.workers
        context = _Writer(first.model)
        await first.scheme.rebind(context=context)
        assert first.scheme.context is context
        for version in (1, 2, 3, 4):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert value_of(first.model) == value_of(second.model) == version
        assert context.told == [1, 2, 3, 4]


async def test_the_model_is_guarded_all_the_time_while_only_the_context_changes(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        worker.scheme.get_receiver().model_applier.guard_forwards(PATIENCE)
        guarded = type(worker.model)
        await worker.scheme.rebind(context=_Writer(worker.model))
        # A pass that began while no guard, or another one, was there would keep no commit out.
        assert type(worker.model) is guarded is not Uniform


async def test_setting_it_is_for_before(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        with pytest.raises(AlreadyConnectedError, match=r"rebind\(model="):
            worker.scheme.model = Uniform()
        with pytest.raises(AlreadyConnectedError, match=r"rebind\(context="):
            worker.scheme.context = object()
    with pytest.raises(NotConnectedError):
        await worker.scheme.rebind(model=Uniform())


async def test_a_context_that_was_set_before_is_told(case: SchemeCase) -> None:
    cluster = LocalCluster(case, workers=1)
    scheme, context = copy.copy(cluster.scheme), _Writer(Uniform())
    scheme.context = context
    arguments = cluster.recipe.receiver_arguments.get(0, {})
    cluster.workers[0] = LocalWorker(scheme, 0, context.model, arguments)
    async with cluster:
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert scheme.context is context and context.told == [0, 3]
        assert value_of(context.model) == 3
        scheme.apply_weights(Uniform(8.0))
        assert value_of(context.model) == 8


async def test_receive_gives_what_has_come_before_it_was_called(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        for version in (1, 2):
            fill(cluster.model, version)
            await cluster.scheme.send()
        worker = cluster.workers[0]
        found: Any = await worker.scheme.receive(timeout=0)
        assert found is not None and float(found.flatten_keys(".")["values.0"][0]) == 2
        assert await worker.scheme.receive(timeout=0) is None


@pytest.mark.timeout(60)  # a call that spins cannot be cancelled
@pytest.mark.parametrize("inside", [False, True])
async def test_an_update_waits_for_the_caller(
    case: SchemeCase, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied to the other model, whether the call is made in the body or directly after it."""
    async with LocalCluster(case, workers=1) as cluster:
        worker, another = cluster.workers[0], Uniform(-1.0)
        session, skips = session_of(worker.scheme), []
        monkeypatch.setattr(session, "skip", lambda skip=session.skip: skips.append(skip()))
        fill(cluster.model, 1)
        async with worker.scheme.pinned():
            sending = asyncio.create_task(cluster.scheme.send())
            await eventually(lambda: waits_for_readers(worker.scheme), "the commit waits")
            if inside:
                await within(worker.scheme.rebind(model=another))
                assert value_of(another) == 0
        if not inside:
            await worker.scheme.rebind(model=another)
        await within(sending)
        assert value_of(another) == 1
        if case.name == "tcp":  # the bytes are here, and are not sent again
            assert not skips
