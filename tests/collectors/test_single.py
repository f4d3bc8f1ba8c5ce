"""A collector in this process."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import pytest
import torch

from aiosync import InvalidArgumentError, LayoutMismatchError, MemoryWeightSyncScheme, WorkerLostError
from aiosync.collectors import Collector
from aiosync.receiver.applier import WeightApplier
from aiosync.sync import collectors as blocking
from tests.collectors.kit import check
from tests.collectors.worlds import AsyncCounting, AsyncUnready, Counting, Failing, Odd, Unready, make_policy
from tests.kit.clock import PATIENCE, steps
from tests.kit.marked import mark

OPTIONS: dict[str, Any] = {"frames_per_batch": 20, "timeout": PATIENCE}


async def test_batches_of_the_version_that_was_sent() -> None:
    policy = make_policy()
    async with Collector(Counting, policy, total_frames=100, **OPTIONS) as collector:
        version = 0
        async for batch in collector:
            assert batch.batch_size == (20,)
            check(batch)
            assert batch["policy_version"].unique().tolist() == [version]
            version += 1
            mark(policy, version)  # no worker acts with it before it is sent
            await collector.update_policy_weights_()
        assert collector.policy_version == version == 5


async def test_a_worker_that_loses_its_sender_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(applier: WeightApplier) -> None:
        raise RuntimeError("the device has failed")

    policy = make_policy()
    async with Collector(Counting, policy, **OPTIONS) as collector:
        await anext(collector)
        monkeypatch.setattr(WeightApplier, "take_at_once", lambda applier, pending: False)
        monkeypatch.setattr(WeightApplier, "settle", fail)
        with pytest.raises(WorkerLostError, match="the device has failed"):
            await collector.update_policy_weights_()


async def test_an_environment_that_is_made_already() -> None:
    env = AsyncCounting(3)
    async with Collector(env, **OPTIONS) as collector:
        assert (await anext(collector))["observation"][:, 0].unique().tolist() == [3]
        assert await collector.getattr_env("closed") is False


class Closing(AsyncCounting):
    """Has a close()."""

    def close(self) -> None:
        """Be closed."""
        self.closed = True


@pytest.mark.parametrize("close_env", [True, False])
async def test_an_environment_may_be_kept(close_env: bool) -> None:
    env = Closing(3)
    async with Collector(env, **OPTIONS) as collector:
        await anext(collector)
        await collector.async_shutdown(close_env=close_env)
        assert collector.closed
    assert env.closed is close_env


class Recorded(AsyncCounting):
    """Adds itself to ``ended`` where it is closed, and then may raise."""

    ended: ClassVar[list[Any]] = []
    fails = False

    async def close(self) -> None:
        """See :class:`Recorded`."""
        await asyncio.sleep(0)
        self.ended.append(self)
        if self.fails:
            raise Odd("in close", 1)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_loaded_state_closes_the_environment_that_it_replaces(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Recorded.ended.clear()
    async with Collector(Recorded, **OPTIONS) as collector:
        await anext(collector)
        state = await collector.state_dict()
        for count in range(1, 3):
            env = await collector.get_distant_attr("env")
            env.fails = fails
            await collector.load_state_dict(state)
            assert Recorded.ended[count - 1] is env
            assert len(Recorded.ended) == count
            assert (await anext(collector))["observation"][0].tolist() == [0, 2, 6, -1]
        assert ("close() of the replaced environment raised Odd" in caplog.text) is fails
    assert len(Recorded.ended) == 3


@pytest.mark.parametrize("close_env", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
async def test_a_given_environment_that_is_replaced_is_closed_with_the_collector(
    as_list: bool, close_env: bool
) -> None:
    Recorded.ended.clear()
    env = Recorded()
    async with Collector([env] if as_list else env, **OPTIONS) as collector:
        await anext(collector)
        state = await collector.state_dict()
        await collector.load_state_dict(state)
        assert not Recorded.ended
        await collector.load_state_dict(state)  # which replaces a copy
        (copied,) = Recorded.ended
        assert copied is not env
        await collector.shutdown(close_env=close_env)
    assert (env in Recorded.ended) is close_env
    assert len(Recorded.ended) == (3 if close_env else 1)


async def test_seeds_and_where_it_stands() -> None:
    async with Collector(Counting, total_frames=80, **OPTIONS) as collector:
        assert await collector.set_seed(4) == 5
        first = await anext(collector)
        state = await collector.state_dict()
        rest = [batch async for batch in collector]
    async with Collector(Counting, total_frames=80, **OPTIONS) as collector:
        await collector.load_state_dict(state)
        again = [batch async for batch in collector]
    assert first["observation"][:, 3].unique().tolist() == [4]
    assert (torch.cat(rest) == torch.cat(again)).all()


class Slow(Counting):
    """Takes milliseconds for a step."""

    def step(self, action: Any) -> Any:
        """See :class:`Counting`."""
        time.sleep(0.002)
        return super().step(action)


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("make", [Unready, AsyncUnready])
@pytest.mark.parametrize("restored", [False, True])
async def test_after_a_reset_that_failed_the_next_frame_begins_with_one(
    restored: bool, make: Any, limit: int | None
) -> None:
    options = OPTIONS | {"frames_per_batch": 5, "max_frames_per_traj": limit}
    env = make()
    async with Collector(env, make_policy(), **options) as collector:
        before = await anext(collector)
        env.failures = 1
        with pytest.raises(Odd, match="in reset"):
            await collector.reset()
        if restored:
            await collector.load_state_dict(await collector.state_dict())
        after = await anext(collector)
    check(after)
    assert before["observation"][-1].tolist() == [0, 0, 4, -1]
    assert after["observation"][0].tolist() == [0, 1, 0, -1]
    assert (after["collector", "traj_ids"] > before["collector", "traj_ids"]).all()


@pytest.mark.parametrize("make", [Unready, AsyncUnready])
async def test_a_seed_is_that_of_the_next_reset_that_succeeds(make: Any) -> None:
    env = make()
    async with Collector(env, make_policy(), **OPTIONS) as collector:
        env.failures = 2
        for _ in range(2):
            with pytest.raises(Odd, match="in reset"):
                await collector.set_seed(3)
        assert (await anext(collector))["observation"][0].tolist() == [0, 0, 0, 3]
        await collector.reset()
        assert (await anext(collector))["observation"][0].tolist() == [0, 3, 0, 3]


async def test_others_have_their_turn() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async with Collector(Slow, **OPTIONS) as collector:
        before = turns
        await anext(collector)
        assert turns - before >= 20
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)


async def test_its_environments_error_is_raised() -> None:
    with pytest.raises(Odd, match="in step"):
        async with Collector(lambda: Failing("step"), **OPTIONS) as collector:
            await anext(collector)


@pytest.mark.parametrize("fails", ["policy", "connect"])
async def test_its_environment_is_closed_if_it_cannot_start(fails: str) -> None:
    released: list[str] = []

    class Closing(Counting):
        def close(self) -> None:
            released.append("environment")

    class Observed(MemoryWeightSyncScheme):
        async def aclose(self) -> None:
            if self.initialized_on_receiver:
                released.append("scheme")
            await super().aclose()

    def no_policy() -> Any:
        raise Odd("no policy", 1)

    if fails == "policy":
        with pytest.raises(Odd, match="no policy"):
            async with Collector(Closing, policy_factory=no_policy, **OPTIONS):
                pass
        assert released == ["environment"]
        return
    policy, wrong = make_policy(), MemoryWeightSyncScheme(timeout=PATIENCE)
    wrong.init_on_sender(model_id="policy.module", weights={"wrong": torch.zeros(1)}, num_workers=1)
    schemes = {"policy": Observed(timeout=PATIENCE), "policy.module": wrong}
    with pytest.raises(LayoutMismatchError):
        async with Collector(Closing, policy, weight_sync_schemes=schemes, **OPTIONS):
            pass
    assert released == ["scheme", "environment"]


async def test_the_workers_own_error_is_raised_if_both_sides_fail() -> None:
    sender_failed = asyncio.Event()

    class Refused(MemoryWeightSyncScheme):
        async def connect(self, **options: Any) -> None:
            if self.initialized_on_receiver:
                await sender_failed.wait()
                await steps(20)
                raise Odd("in connect", 1)
            sender_failed.set()
            raise WorkerLostError([0], "it refused")

    schemes = {"policy": Refused(timeout=PATIENCE)}
    with pytest.raises(Odd, match="in connect"):
        async with Collector(Counting, make_policy(), weight_sync_schemes=schemes, **OPTIONS):
            pass


def test_what_is_said_of_processes_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_workers: a Collector runs in this process"):
        Collector(Counting, num_workers=2)
    with pytest.raises(InvalidArgumentError, match="one environment"):
        Collector([Counting] * 2)


def test_the_blocking_twin() -> None:
    policy = make_policy()
    with blocking.Collector(Counting, policy, total_frames=40, **OPTIONS) as collector:
        for version, batch in enumerate(collector):
            check(batch)
            assert batch["policy_version"].unique().tolist() == [version]
            mark(policy, version + 1)
            collector.update_policy_weights_()


async def test_a_state_is_not_that_of_a_reset_in_progress() -> None:
    """A batch may be complete while the environment of another rollout begins its next episode."""
    envs = iter([_Timed("fast", 2, 0.0, 0.5), _Timed("slow", 100, 0.05, 0.0)] * 2)
    options = OPTIONS | {"frames_per_batch": 4, "envs_per_worker": 2}
    async with Collector(lambda: next(envs), make_policy(), **options) as collector:
        await anext(collector)
        state = await collector.state_dict()
    async with Collector(lambda: next(envs), make_policy(), **options) as restored:
        await restored.load_state_dict(state)
        batch = await anext(restored)
    ids, counts = batch["collector", "traj_ids"].flatten(), batch["observation"][..., 2].flatten()
    for number in ids.unique().tolist():
        first = 2 if number == 1 else 0  # the slow one's episode goes on
        found = counts[ids == number].tolist()
        assert found == [first + step for step in range(len(found))]


class _Timed(AsyncCounting):
    """Steps and resets that take time."""

    def __init__(self, name: str, length: int, step: float, reset: float) -> None:
        super().__init__(len(name), length, step)
        self._of_reset, self._resets = reset, 0

    async def reset(self, *, seed: int | None = None) -> Any:
        self._resets += 1
        if self._resets > 1:
            await asyncio.sleep(self._of_reset)
        return await super().reset(seed=seed)


async def test_zeros_of_a_collector_of_whole_trajectories() -> None:
    options = OPTIONS | {"trajs_per_batch": 3, "traj_format": "cat"}
    async with Collector(Counting, make_policy(), **options) as collector:
        assert (await collector.fake_tensordict()).batch_size == (20,)
