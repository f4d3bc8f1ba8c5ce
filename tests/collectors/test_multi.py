"""Collectors of several processes."""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from aiosync import (
    InvalidArgumentError,
    NotConnectedError,
    SyncTimeoutError,
    UnpicklableError,
    WorkerLostError,
    _processors,
)
from aiosync.collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from tests.collectors.kit import ENVS, check, collecting
from tests.collectors.worlds import AsyncCounting, Counting, Failing, Odd, make_policy
from tests.kit.clock import PATIENCE, within
from tests.kit.marked import mark


async def test_a_synchronous_batch_has_a_part_of_each_worker() -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=True, total_frames=200) as collector:
        seen = 0
        async for batch in collector:
            check(batch)
            assert batch.batch_size == (2, 10)
            assert batch["observation"][..., 0].tolist() == [[0.0] * 10, [1.0] * 10]
            assert batch["policy_version"].unique().tolist() == [seen]
            seen += 1
            mark(policy, seen)
            await collector.update_policy_weights_()
        assert seen == 10
        assert collector.frames == 200


async def test_an_asynchronous_batch_is_one_workers() -> None:
    policy = make_policy()
    workers = set()
    async with collecting(ENVS, policy, sync=False, total_frames=400) as collector:
        version = 0
        async for batch in collector:
            check(batch)
            assert batch.batch_size == (20,)
            (worker,) = batch["observation"][:, 0].unique().tolist()
            workers.add(worker)
            version += 1
            mark(policy, version)
            await collector.update_policy_weights_()
        assert collector.frames == 400
    assert workers == {0.0, 1.0}


@pytest.mark.parametrize(
    ("sync", "places"),
    [(True, [4, 7]), (False, [None, None])],
)
def test_workers_that_begin_together_begin_apart(
    sync: bool, places: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processors, "allowed_processors", lambda: [4, 7])
    specs = MultiCollector(ENVS, make_policy(), frames_per_batch=20, total_frames=-1, sync=sync)._specs()
    assert [spec.processor for spec in specs] == places


@pytest.mark.parametrize("join", ["stack", -1])
async def test_with_a_threshold_of_zero_no_worker_completes_its_part(join: Any) -> None:
    envs = [functools.partial(AsyncCounting, name, seconds=0.02) for name in range(2)]
    options = {"frames_per_batch": 10_000, "preemptive_threshold": 0.0, "cat_results": join}
    async with collecting(envs, make_policy(), sync=True, **options) as collector:
        for _ in range(2):
            assert (await within(anext(collector))).numel() < 100


async def test_a_fast_worker_does_not_wait_for_a_slow_one() -> None:
    envs = [functools.partial(AsyncCounting, name, seconds=0.05 * name) for name in range(2)]
    found = []
    async with collecting(envs, sync=False, total_frames=200) as collector:
        found += [int(batch["observation"][0, 0]) async for batch in collector]
    assert found.count(0) >= 6


async def test_trajectories_have_numbers_of_their_own() -> None:
    async with collecting(ENVS, make_policy(), sync=True, total_frames=400, cat_results=0) as collector:
        ids: dict[int, tuple[float, float]] = {}
        async for batch in collector:
            assert batch.batch_size == (20,)
            for number, (name, episode) in zip(
                batch["collector", "traj_ids"].tolist(), batch["observation"][:, :2].tolist(), strict=True
            ):
                assert ids.setdefault(number, (name, episode)) == (name, episode)
        assert len(set(ids.values())) == len(ids) > 50


@pytest.mark.parametrize("sync", [True, False])
async def test_seeded_runs_are_equal(sync: bool) -> None:
    runs: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        envs = [functools.partial(Counting, name) for name in range(2 if sync else 1)]
        async with collecting(envs, sync=sync, total_frames=120) as collector:
            assert await collector.set_seed(5) == 5 + len(envs)
            runs.append(torch.cat([batch.reshape(-1) async for batch in collector]))
    assert (runs[0] == runs[1]).all()
    assert set(runs[0]["observation"][:, 3].tolist()) == ({5.0, 6.0} if sync else {5.0})


async def test_the_first_frames_at_random() -> None:
    policy = make_policy()
    options = {"sync": True, "total_frames": 100, "init_random_frames": 40}
    async with collecting(ENVS, policy, **options) as collector:
        batches = [batch async for batch in collector]
    assert ["marks" in batch.keys() for batch in batches] == [False, False, True, True, True]
    assert batches[0]["action"].unique().numel() > 1


async def test_episodes_that_are_cut() -> None:
    async with collecting(ENVS, make_policy(), total_frames=40, max_frames_per_traj=3) as collector:
        async for batch in collector:
            counted = batch["next", "step_count"]
            assert counted.max() == 3
            assert torch.equal(batch["next", "truncated"], counted == 3)
            assert torch.equal(batch["next", "done"], batch["next", "truncated"])
            assert not batch["next", "terminated"].any()
            assert torch.equal(batch["step_count"] + 1, counted)


async def test_each_batch_can_begin_and_end_by_itself() -> None:
    options = {"total_frames": 40, "reset_at_each_iter": True, "set_truncated": True, "frames_per_batch": 10}
    async with collecting(ENVS, make_policy(), **options) as collector:
        async for batch in collector:
            assert (batch["observation"][:, 0, 2] == 0).all()
            assert batch["next", "truncated"][:, -1].all()
            assert not batch["next", "truncated"][:, :-1].any()
            assert batch["next", "done"][:, -1].all()


async def test_frames_that_workers_do_not_divide() -> None:
    with pytest.warns(UserWarning, match="not a multiple of 2 workers: a batch has 8 frames"):
        collecting_all = MultiCollector(ENVS, make_policy(), frames_per_batch=7, timeout=PATIENCE)
    async with collecting_all as c:
        batch = await anext(c)
        assert batch.shape == (2, 4)
        assert ("collector", "mask") not in batch.keys(include_nested=True)
    with pytest.warns(UserWarning, match="padded and masked"):
        MultiCollector(ENVS, frames_per_batch=[3, 5])
    async with collecting(ENVS, make_policy(), frames_per_batch=[3, 5], cat_results=0, total_frames=16) as c:
        assert [batch["observation"][:, 0].sum().item() async for batch in c] == [5, 5]


async def test_slow_workers_are_cut_short() -> None:
    envs = [functools.partial(AsyncCounting, name, seconds=0.5 * name) for name in range(2)]
    options = {"preemptive_threshold": 0.5, "cat_results": 0, "total_frames": 20}
    async with collecting(envs, **options) as collector:
        started = time.monotonic()
        batch = await anext(collector)
        check(batch[: int((batch["observation"][:, 0] == 0).sum())])
        names = batch["observation"][:, 0].tolist()
        assert names.count(0.0) == 10
        assert 1 <= names.count(1.0) < 10
        assert time.monotonic() - started < 4


async def test_a_cancelled_wait_loses_nothing() -> None:
    envs = [functools.partial(AsyncCounting, 0, 1000, seconds=0.002)]
    async with collecting(envs, sync=True, total_frames=60, frames_per_batch=20, cat_results=0) as collector:
        found: list[Any] = []
        while len(found) < 3:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    found.append(await anext(collector))
        frames: Any = torch.cat(found)
        steps = frames["observation"][:, 2]
        assert torch.equal(steps, torch.arange(60.0))


@pytest.mark.parametrize("phase", ["init", "reset", "step"])
@pytest.mark.parametrize("sync", [True, False])
async def test_a_workers_own_error_is_raised(phase: str, sync: bool) -> None:
    envs = [Counting, functools.partial(Failing, phase)]
    with pytest.raises(Odd, match=f"in {phase}") as caught:
        async with collecting(envs, make_policy(), sync=sync) as collector:
            async for _ in collector:
                pass
    assert caught.value.number == 13
    assert "_reach" in str(caught.value.__cause__)
    assert "worker 1" in caught.value.__notes__[0]


@pytest.mark.parametrize("phase", ["init", "reset", "step"])
@pytest.mark.parametrize(("how", "cause"), [("kill", "SIGKILL"), ("exit", "exit code 3")])
async def test_a_worker_that_dies_is_named_with_the_cause(phase: str, how: str, cause: str) -> None:
    envs = [Counting, functools.partial(Failing, phase, how)]
    with pytest.raises(WorkerLostError, match=f"worker 1 lost: .*{cause}"):
        async with collecting(envs, make_policy()) as collector:
            async for _ in collector:
                pass


@pytest.mark.parametrize("phase", ["init", "reset", "step"])
async def test_a_worker_that_hangs_costs_the_deadline(phase: str) -> None:
    envs = [Counting, functools.partial(Failing, phase, "stop")]
    started = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        async with collecting(envs, make_policy(), timeout=3) as collector:
            async for _ in collector:
                pass
    assert time.monotonic() - started < PATIENCE


async def test_one_that_is_closed() -> None:
    async with collecting(ENVS, make_policy(), sync=False) as collector:
        await anext(collector)
    await collector.aclose()
    with pytest.raises(NotConnectedError, match="connect"):
        await anext(collector)


async def test_plain_policies() -> None:
    module = torch.nn.Linear(4, 3)
    async with collecting(ENVS, module, total_frames=20) as collector:
        assert (await anext(collector))["action"].shape == (2, 10, 3)
    async with collecting(ENVS, lambda observation: 2, total_frames=20) as collector:
        assert ((await anext(collector))["next", "reward"] == 2).all()
    async with collecting(ENVS, policy_factory=make_policy, total_frames=20) as collector:
        assert "marks" in (await anext(collector)).keys()


async def test_attributes_of_the_workers() -> None:
    async with collecting(ENVS, make_policy()) as collector:
        assert await collector.getattr_env_all("name") == [0, 1]
        assert await collector.getattr_policy_all("module.net.out_features") == [3, 3]
        with pytest.raises(AttributeError, match="nmae"):
            await collector.getattr_env("nmae")


class Unloadable(Exception):
    """Can be pickled, and not unpickled: only its message is passed to its class."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class Keeping(Counting):
    """Keeps an exception, and takes what it is given."""

    last_error = Unloadable("in step", 13)

    def take(self, given: Any) -> str:
        """Return the name of its type."""
        return type(given).__name__


async def test_what_cannot_be_unpickled_fails_one_call_only() -> None:
    async with collecting([Keeping], make_policy()) as collector:
        with pytest.raises(UnpicklableError, match=r"get_attribute\(\) .*, a Unloadable, .*TypeError"):
            await collector.getattr_env("last_error")
        with pytest.raises(UnpicklableError, match=r"the arguments of execute\(\).*TypeError"):
            await collector.map_fn("env.take", [[Unloadable("an argument", 1)]])
        assert await collector.map_fn("env.take", [[1]]) == ["int"]
        check(await anext(collector))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_per_batch": 3}, "did you mean frames_per_batch"),
        ({"frames_per_batch": 0}, "expected a positive number"),
        ({"frames_per_batch": [3]}, "one per worker, 2; got 1"),
        ({"cat_results": "cat"}, "expected 'stack' or"),
        ({"preemptive_threshold": 1.5}, "a fraction of the workers"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        MultiCollector(ENVS, **options)


def test_sync_by_name() -> None:
    assert MultiSyncCollector(ENVS).sync
    assert not MultiAsyncCollector(ENVS).sync
    with pytest.raises(InvalidArgumentError, match="sync=False"):
        MultiAsyncCollector(ENVS, sync=True)
    assert MultiSyncCollector(ENVS, num_workers=3).num_workers == 2
    with pytest.warns(UserWarning, match="12 more"):
        MultiSyncCollector(ENVS, frames_per_batch=16, total_frames=20)
