"""Joint updates: several models together, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

import aiosync
from aiosync import (
    InvalidArgumentError,
    JointUpdateError,
    LayoutMismatchError,
    RemoteApplyError,
    SyncTimeoutError,
    WorkerLostError,
)
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import BRIEF, PATIENCE, eventually, steps, within
from tests.kit.local import LocalCluster
from tests.kit.models import Norm, Uniform, fill, value_of
from tests.kit.seams import waits_for_readers


async def _send_both(*clusters: LocalCluster, **options: Any) -> aiosync.JointUpdate:
    async with aiosync.atomic(*(c.scheme for c in clusters), **options) as tx:
        pass
    return tx


async def test_a_joint_update(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case, model=Norm) as value:
        fill(policy.model, 1)
        head = {n: torch.full_like(p, 2.0) for n, p in value.model.state_dict().items()}
        async with aiosync.atomic(policy.scheme, value.scheme) as tx:
            tx.send(policy.scheme)
            tx.send(value.scheme, head)
            assert policy.scheme.version == value.scheme.version == 0
        assert tx.reports[policy.scheme].version == tx.reports[value.scheme].version == 1
        for one, two in zip(policy.workers, value.workers, strict=True):
            assert value_of(one.model) == 1
            assert value_of(two.model) == 2


async def test_a_joint_update_is_seen_as_one(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case) as value:
        stop = False

        async def reader() -> int:
            reads = 0
            while not stop:
                for one, two in zip(policy.workers, value.workers, strict=True):
                    assert value_of(one.model) == value_of(two.model)
                reads += 1
                await asyncio.sleep(0)
            return reads

        reading = asyncio.create_task(reader())
        for version in range(1, 30):
            fill(policy.model, version)
            fill(value.model, version)
            await _send_both(policy, value)
        stop = True
        assert await within(reading) > 20


async def test_a_joint_update_waits_for_both_pins(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as policy, LocalCluster(case, workers=1) as value:
        one, two = policy.workers[0], value.workers[0]
        fill(policy.model, 1)
        fill(value.model, 1)
        async with two.scheme.pinned():
            joint = asyncio.create_task(_send_both(policy, value))
            await steps(60)
            assert value_of(one.model) == value_of(two.model) == 0
            async with one.scheme.pinned():
                assert value_of(one.model) == 0
        await within(joint)
        assert value_of(one.model) == value_of(two.model) == 1


async def test_a_model_is_replaced_while_its_part_waits() -> None:
    (case,) = (case for case in SCHEMES if case.name == "shared")
    async with LocalCluster(case, workers=1) as policy, LocalCluster(case, workers=1) as value:
        one, another = policy.workers[0], Uniform(-1.0)
        fill(policy.model, 1)
        fill(value.model, 1)
        async with one.scheme.pinned():
            joint = asyncio.create_task(_send_both(policy, value))
            await eventually(lambda: waits_for_readers(one.scheme), "the part waits")
            await within(one.scheme.rebind(model=another))
            assert value_of(another) == value_of(value.workers[0].model) == 0
        await within(joint)
        assert value_of(another) == value_of(value.workers[0].model) == 1


class _Context:
    def __init__(self) -> None:
        self.worker_idx = 0
        self.bad = True

    def update_policy_weights_(self, policy_or_weights: Any = None, model_id: str = "") -> None:
        if self.bad:
            raise OSError("not this one")


@pytest.mark.parametrize("first", [True, False])
async def test_one_part_is_refused(case: SchemeCase, first: bool) -> None:
    policy, value = LocalCluster(case), LocalCluster(case)
    context = _Context()
    context.bad = False
    (policy if first else value).workers[1].init(context=context)
    async with policy, value:
        context.bad = True
        fill(policy.model, 1)
        fill(value.model, 1)
        with pytest.raises(RemoteApplyError, match="not this one") as caught:
            await _send_both(policy, value)
        assert caught.value.worker == 1
        for cluster in (policy, value):
            assert [value_of(w.model) for w in cluster.workers] == [1, 0]
        context.bad = False
        fill(policy.model, 2)
        fill(value.model, 2)
        await _send_both(policy, value)
        for cluster in (policy, value):
            assert [value_of(w.model) for w in cluster.workers] == [2, 2]
        for cluster in (policy, value):
            assert (await cluster.scheme.send()).ok


async def test_one_part_does_not_fit(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case) as value:
        with pytest.raises(LayoutMismatchError):
            async with aiosync.atomic(policy.scheme, value.scheme) as tx:
                tx.send(value.scheme, {"values.0": torch.zeros(16)})
        assert policy.scheme.version == value.scheme.version == 0
        await _send_both(policy, value)
        assert policy.scheme.version == value.scheme.version == 1


async def test_a_part_is_late(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case) as value:
        await value.workers[0].rest()
        fill(policy.model, 1)
        fill(value.model, 1)
        with pytest.raises(SyncTimeoutError) as caught:
            await _send_both(policy, value, timeout=BRIEF * 2)
        assert caught.value.workers == (0,)
        assert [value_of(w.model) for w in policy.workers] == [0, 1]
        assert [value_of(w.model) for w in value.workers] == [0, 1]
        await value.workers[0].serve()
        fill(policy.model, 2)
        fill(value.model, 2)
        await _send_both(policy, value)
        for cluster in (policy, value):
            assert [value_of(w.model) for w in cluster.workers] == [2, 2]


@pytest.mark.parametrize(("first", "lost"), [(True, True), (False, True), (True, False)])
async def test_a_worker_that_is_to_be_dropped(case: SchemeCase, first: bool, lost: bool) -> None:
    """It is lost, or late, for one part. No error is raised, also not for the other part."""
    async with (
        LocalCluster(case, on_failure="drop") as policy,
        LocalCluster(case, on_failure="drop") as value,
    ):
        cluster = policy if first else value
        if lost:
            await cluster.workers[1].close()
        else:
            await cluster.workers[1].rest()
        fill(policy.model, 1)
        fill(value.model, 1)
        tx = await _send_both(policy, value, timeout=None if lost else PATIENCE / 8)
        if not lost or not case.elastic:  # else the update was not for it
            assert tx.reports[cluster.scheme].dropped == (1,)
        assert value_of(policy.workers[0].model) == value_of(value.workers[0].model) == 1


async def test_a_joint_update_with_a_scheme_that_sends_nothing(case: SchemeCase) -> None:
    nothing = aiosync.NoWeightSyncScheme()
    nothing.init_on_sender(model_id="value")
    await nothing.connect()
    async with LocalCluster(case) as policy:
        fill(policy.model, 1)
        async with aiosync.atomic(policy.scheme, nothing) as tx:
            pass
        assert [tx.reports[each].version for each in (policy.scheme, nothing)] == [1, 1]
        assert [value_of(worker.model) for worker in policy.workers] == [1, 1]
        policy.workers[0].model.register_parameter("another", nn.Parameter(torch.ones(1)))
        tx = aiosync.atomic(policy.scheme, nothing)
        with pytest.raises((RemoteApplyError, LayoutMismatchError)):
            async with tx:
                pass
        assert [tx.reports[each].version for each in (policy.scheme, nothing)] == [2, 2]


@pytest.mark.parametrize("first", [True, False])
async def test_a_part_is_lost(case: SchemeCase, first: bool) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case) as value:
        lost, other = (policy, value) if first else (value, policy)
        await lost.workers[0].close()
        fill(policy.model, 1)
        fill(value.model, 1)
        tx = aiosync.atomic(policy.scheme, value.scheme)
        with pytest.raises(WorkerLostError) as caught:
            async with tx:
                pass
        assert caught.value.workers == (0,)
        if not case.elastic:  # else its workers are those that are connected
            # It did not wait for the part that is lost until the deadline.
            assert isinstance(tx.reports[other.scheme].workers[0].error, JointUpdateError)
        assert [value_of(w.model) for w in policy.workers] == [0, 1]
        assert [value_of(w.model) for w in value.workers] == [0, 1]


async def test_workers_that_come_again_get_both_parts_or_none(case: SchemeCase) -> None:
    """One part is refused since the other was lost: then neither is withdrawn."""
    async with LocalCluster(case, 1) as policy, LocalCluster(case, 1) as value:
        await policy.workers[0].close()
        fill(policy.model, 1)
        fill(value.model, 1)
        with pytest.raises(WorkerLostError):
            await _send_both(policy, value)
        assert policy.scheme.version == value.scheme.version == 1
        await value.workers[0].close()
        for cluster in (policy, value):
            await within(cluster.add(0).connect())
            assert value_of(cluster.workers[1].model) == 1


async def test_a_worker_that_gets_one_part_gets_it_alone(case: SchemeCase) -> None:
    """A version that waited for a slot, for more workers, is replaced by a part for one of them."""
    async with LocalCluster(case, max_slots=2) as policy, LocalCluster(case, 1) as value:
        async with policy.workers[0].scheme.pinned():
            for version in (1, 2):
                fill(policy.model, version)
                await policy.scheme.send(wait=False)
                await asyncio.sleep(BRIEF / 4)
            fill(policy.model, 3)
            joint = asyncio.create_task(_send_both(policy, value, worker_ids=0))
            await asyncio.sleep(BRIEF / 4)
        await within(joint)
        other = policy.workers[1]
        await eventually(lambda: value_of(other.model) >= 2, "the other worker gets what was sent to it")


class _Below:
    """A context that passes updates on."""

    def __init__(self) -> None:
        self.passed_on = 0

    def update_policy_weights_(self, weights: Any = None, **_: Any) -> None:
        self.passed_on += 1


async def test_a_part_that_was_called_off_is_not_passed_on(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case) as value:
        context = _Below()
        await value.workers[0].scheme.rebind(context=context)
        await policy.workers[0].close()
        with pytest.raises(WorkerLostError):
            await _send_both(policy, value)
        assert context.passed_on == 0
        await value.scheme.send()
        assert context.passed_on == 1


async def test_a_send_that_fails_calls_no_joint_update_off(case: SchemeCase) -> None:
    """It was about to take the slot of a part that a worker has not come for yet, and gave that up."""
    if not case.views:
        return  # its workers hold no slot
    options: dict[str, Any] = {"max_slots": 2}
    async with (
        LocalCluster(case, per_worker_weights=True, **options) as policy,
        LocalCluster(case, **options) as value,
    ):
        for cluster in (policy, value):
            fill(cluster.model, 1)
            await cluster.workers[0].rest()
        async with policy.workers[1].scheme.pinned():
            joint = asyncio.create_task(_send_both(policy, value))
            await asyncio.sleep(BRIEF)
            with pytest.raises(SyncTimeoutError):
                await policy.scheme.send(timeout=BRIEF)
        for cluster in (policy, value):
            await cluster.workers[0].serve()
        await within(joint)
        for cluster in (policy, value):
            assert [value_of(worker.model) for worker in cluster.workers] == [1, 1]


async def test_a_body_that_raises_sends_nothing(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy, LocalCluster(case) as value:
        with pytest.raises(ZeroDivisionError):
            async with aiosync.atomic(policy.scheme, value.scheme):
                raise ZeroDivisionError
        assert policy.scheme.version == value.scheme.version == 0


async def test_wrong_joint_updates(case: SchemeCase) -> None:
    async with LocalCluster(case) as policy:
        with pytest.raises(InvalidArgumentError):
            aiosync.atomic()
        with pytest.raises(InvalidArgumentError):
            aiosync.atomic(policy.scheme, policy.scheme)
        with pytest.raises(InvalidArgumentError):
            aiosync.atomic(policy.scheme).send(policy.workers[0].scheme)
