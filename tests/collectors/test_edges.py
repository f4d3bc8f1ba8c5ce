"""What a review found: two things at a time, and what comes after the last."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule

from aiosync import (
    InvalidArgumentError,
    NotConnectedError,
    SharedMemWeightSyncScheme,
    SyncTimeoutError,
    TCPWeightSyncScheme,
    WorkerLostError,
)
from aiosync.collectors import (
    Collector,
    CollectorConfig,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    ProcessConfig,
)
from aiosync.sync import collectors as sync_collectors
from tests.collectors.kit import ENVS, ListReplayBuffer, check, collecting, pids_of, workers_of
from tests.collectors.worlds import AsyncCounting, Counting, Failing, Odd, make_policy
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.marked import mark

BOTH = pytest.mark.parametrize("sync", [True, False])


def _gone(pids: list[int]) -> bool:
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


@BOTH
async def test_an_end_that_is_cancelled_at_each_await(sync: bool) -> None:
    for turns in range(1, 12, 2):
        collector = MultiCollector(
            ENVS, make_policy(), sync=sync, replay_buffer=ListReplayBuffer(), timeout=PATIENCE
        )
        await collector.connect()
        pids = pids_of(collector)
        await collector.start()
        closing = asyncio.ensure_future(collector.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert _gone(pids)


@BOTH
async def test_a_scope_that_is_cancelled_around_it(sync: bool) -> None:
    pids: list[int] = []
    with anyio.CancelScope() as scope:
        async with collecting(ENVS, make_policy(), sync=sync) as collector:
            await anext(collector)
            pids = pids_of(collector)
            scope.cancel()
            await anext(collector)
    assert _gone(pids)


@BOTH
async def test_a_pause_of_what_was_started(sync: bool) -> None:
    replay = ListReplayBuffer()
    async with collecting(ENVS, make_policy(), sync=sync, replay_buffer=replay, timeout=2) as collector:
        await collector.start()
        await eventually(lambda: len(replay.frames) >= 60, "it collects")
        async with collector.pause():
            await asyncio.sleep(0.2)
            settled = len(replay.frames)
            await asyncio.sleep(2.5)  # longer than a call may take
            assert len(replay.frames) == settled
        await eventually(lambda: len(replay.frames) >= settled + 60, "it goes on after a pause")


@pytest.mark.parametrize("kind", [Collector, MultiAsyncCollector, MultiSyncCollector])
async def test_a_pause_that_begins_during_the_last_batch(kind: type[MultiCollector]) -> None:
    """It begins when the batch is in the buffer, and does not wait for another message of a worker."""
    replay = ListReplayBuffer()
    envs = [functools.partial(AsyncCounting, name, seconds=0.02) for name in range(2)]
    given: dict[str, Any] = {
        "frames_per_batch": 20,
        "total_frames": 20,
        "timeout": PATIENCE,
        "replay_buffer": replay,
    }
    async with kind(envs[: 1 + (kind is MultiSyncCollector)], make_policy(), **given) as collector:
        await collector.start()
        await eventually(lambda: any(each.requested for each in workers_of(collector)), "it has begun")
        async with asyncio.timeout(PATIENCE / 2), collector.pause():
            assert len(replay.frames) == 20
        assert not collector.is_running()


async def test_a_worker_that_fails_while_others_deliver() -> None:
    envs = [Counting, functools.partial(Failing, "step")]
    async with collecting(envs, make_policy(), sync=False) as collector:
        with pytest.raises(Odd):
            for _ in range(2000):
                await anext(collector)
        with pytest.raises(Odd):
            await collector.update_policy_weights_()


async def test_a_state_of_an_asynchronous_one() -> None:
    async with collecting(ENVS, sync=False, total_frames=200) as collector:
        for _ in range(3):
            await anext(collector)
        async with collector.pause():
            state = await collector.state_dict()
    async with collecting(ENVS, sync=False, total_frames=200) as collector:
        await anext(collector)  # which is forgotten
        await collector.load_state_dict(state)
        rest = [batch.numel() async for batch in collector]
    assert sum(rest) == 140


@pytest.mark.parametrize("how", ["environments", "unpickling"])
async def test_a_refused_state_changes_nothing(how: str) -> None:
    async def rollout_of(collector: MultiCollector, worker: int) -> Any:
        async with collector.pause():
            return (await collector.state_dict())[f"worker{worker}"]["rollouts"][0]

    async with collecting(ENVS, sync=False, total_frames=200) as collector:
        await anext(collector)
        async with collector.pause():
            state = await collector.state_dict()
        taken = [await anext(collector) for _ in range(3)]
        refusing = 0 if how == "environments" else 1
        before = await rollout_of(collector, refusing)
        if how == "environments":
            state["worker1"]["rollouts"] *= 2
            with pytest.raises(InvalidArgumentError, match="expected 1 environments per worker, got 2"):
                await collector.load_state_dict(state)
        else:
            state["worker1"]["rollouts"][0]["env"] = b"no pickle"
            with pytest.raises(pickle.UnpicklingError):
                await collector.load_state_dict(state)
        after = await rollout_of(collector, refusing)
        assert torch.equal(before["current"]["observation"], after["current"]["observation"])
        assert before["next_traj_id"] == after["next_traj_id"]
        rest = [batch async for batch in collector]
    assert sum(batch.numel() for batch in taken + rest) == 180


def _vector() -> Any:
    return gym.vector.SyncVectorEnv([Counting] * 2)


@BOTH
async def test_seeds_of_vector_environments(sync: bool) -> None:
    async with collecting([_vector] * 2, sync=sync, envs_per_worker=1, frames_per_batch=40) as collector:
        assert await collector.set_seed(10) == 14
        seen: set[float] = set()
        while seen != {10.0, 11.0, 12.0, 13.0}:
            seen |= set((await anext(collector))["observation"][..., 3].reshape(-1).tolist())
            assert seen <= {10.0, 11.0, 12.0, 13.0}


@BOTH
async def test_the_version_of_a_part_of_the_policy(sync: bool) -> None:
    policy = make_policy()
    schemes = {"policy.module": SharedMemWeightSyncScheme(timeout=PATIENCE)}
    async with collecting(ENVS, policy, sync=sync, weight_sync_schemes=schemes) as collector:
        for version in range(1, 6):
            check(await anext(collector))
            mark(policy, version)
            await collector.update_policy_weights_(model_id="policy.module")
        assert collector.policy_version == 5


async def test_a_policy_of_buffers_only() -> None:
    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("choice", torch.tensor(1))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.choice).expand(observation.shape[:-1])

    module = Fixed()
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    async with collecting(ENVS, policy) as collector:
        assert (await anext(collector))["action"].unique().tolist() == [1]
        module.choice = torch.tensor(2)
        await collector.update_policy_weights_()
        assert (await anext(collector))["action"].unique().tolist() == [2]


async def test_a_batch_is_acted_at_random_or_it_is_not() -> None:
    async with collecting(ENVS, make_policy(), sync=True, init_random_frames=5) as collector:
        first, second = [await anext(collector) for _ in range(2)]
    assert "marks" not in first.keys()
    assert "marks" in second.keys()


@BOTH
async def test_a_start_of_which_one_fails(sync: bool) -> None:
    numbers: Any = (number for number in range(3))  # a generator cannot be pickled
    odd = functools.partial(Counting, name=numbers)
    with pytest.raises(TypeError, match="pickle"):
        async with collecting([Counting, odd], sync=sync):
            pass


@BOTH
async def test_who_waits_while_it_is_closed(sync: bool) -> None:
    envs = [functools.partial(AsyncCounting, seconds=3600)] * 2
    async with collecting(envs, sync=sync) as collector:
        waiting = asyncio.ensure_future(anext(collector))
        await asyncio.sleep(0.1)
        await collector.aclose(timeout=1)
        with pytest.raises(NotConnectedError, match="closed during the call"):
            await within(waiting, 2)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 0.4])
async def test_an_end_while_another_task_connects(seconds: float) -> None:
    for turns in (0, 1, 2, 3, 5, 8):
        collector = MultiCollector(ENVS, make_policy(), timeout=PATIENCE)
        connecting = asyncio.create_task(collector.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(seconds)
        connected = connecting.done()
        closing = asyncio.create_task(collector.aclose())
        await asyncio.sleep(0)
        await within(collector.aclose(timeout=1))
        assert multiprocessing.active_children() == []
        await within(closing)
        (outcome,) = await within(asyncio.gather(connecting, return_exceptions=True))
        assert outcome is None if connected else isinstance(outcome, NotConnectedError)
        with pytest.raises(NotConnectedError, match="was closed"):
            await collector.connect()


async def test_an_end_in_the_turn_in_which_another_task_connects() -> None:
    collector = MultiCollector(ENVS, make_policy(), timeout=PATIENCE)
    await within(asyncio.gather(collector.connect(), collector.aclose(), return_exceptions=True))
    with pytest.raises(NotConnectedError):
        await within(anext(collector), PATIENCE / 2)


async def test_an_end_while_it_connects_to_its_own_sender() -> None:
    """Which does not answer."""
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        upstream = TCPWeightSyncScheme(f"tcp://127.0.0.1:{port}", token="a token of the tests")
        options: dict[str, Any] = {"weight_recv_schemes": {"policy": upstream}, "worker_idx": 0}
        collector = MultiCollector(ENVS, make_policy(), timeout=PATIENCE, **options)
        connecting = asyncio.create_task(collector.connect())
        await within(asked.wait())
        await within(collector.aclose())
        with pytest.raises(NotConnectedError, match="while it connected"):
            await within(connecting)
        assert multiprocessing.active_children() == []


def test_an_end_while_another_thread_connects() -> None:
    collector = sync_collectors.MultiCollector(
        [functools.partial(_slow, 3.0)] * 2, make_policy(), timeout=PATIENCE
    )
    with ThreadPoolExecutor(1) as executor:
        connecting = executor.submit(collector.connect)
        time.sleep(0.5)
        collector.close()
        assert multiprocessing.active_children() == []
        with pytest.raises(NotConnectedError):
            connecting.result(PATIENCE)


def _slow(seconds: float) -> Any:
    time.sleep(seconds)
    return Counting()


async def test_trajectories_that_never_end() -> None:
    """The frames so far are kept: the next call goes on."""
    options: dict[str, Any] = {"frames_per_batch": 5, "trajs_per_batch": 1, "timeout": BRIEF}
    async with Collector(functools.partial(_Endless, 10**9), make_policy(), **options) as collector:
        with pytest.raises(SyncTimeoutError, match="no trajectory has ended"):
            await within(anext(collector))
        await collector.map_fn("env.end")
        (steps,) = (await within(anext(collector)))["observation"][..., 2].tolist()
        assert len(steps) > 10
        assert steps == list(range(len(steps)))


class _Endless(Counting):
    def __init__(self, length: int) -> None:
        super().__init__(length=length)

    def end(self) -> None:
        self.length = self.count + 1


@BOTH
async def test_several_take_the_last_ones(sync: bool) -> None:
    async with collecting(ENVS, sync=sync, total_frames=40) as collector:
        found = await asyncio.gather(*(_next(collector) for _ in range(4)))
        assert sum(batch is not None for batch in found) == 2
        assert collector.frames == 40


async def _next(collector: MultiCollector) -> Any:
    try:
        return await anext(collector)
    except StopAsyncIteration:
        return None


async def test_masks_of_parts_that_differ_in_length() -> None:
    replay = ListReplayBuffer()
    options: dict[str, Any] = {"frames_per_batch": [20, 28], "replay_buffer": replay}
    async with collecting([_vector] * 2, sync=True, **options) as collector:
        await anext(collector)
    # An episode has seven steps and one more that begins the next.
    assert len(replay.frames) == 2 * (10 - 1) + 2 * (14 - 1)
    assert all(frame["collector", "mask"] for frame in replay.frames)


async def test_many_batches_are_kept() -> None:
    async with collecting(ENVS[:1], make_policy(), sync=False) as collector:
        kept = [await anext(collector) for _ in range(80)]
        assert len(workers_of(collector)[0].loans.lent) <= 32
        steps = torch.cat([batch["observation"] for batch in kept])
    assert (steps[1:, 1:3] != steps[:-1, 1:3]).any(-1).all()


def test_a_configuration_of_processes_is_refused_too() -> None:
    config = CollectorConfig(processes=ProcessConfig(num_workers=2))
    with pytest.raises(InvalidArgumentError, match="num_workers: a Collector runs in this process"):
        Collector(Counting, config=config)


async def test_a_killed_worker_is_told_of_while_others_deliver() -> None:
    async with collecting(ENVS, make_policy(), sync=False) as collector:
        await anext(collector)
        os.kill(pids_of(collector)[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            for _ in range(2000):
                await anext(collector)


def test_an_environment_is_not_stepped_by_several_rollouts() -> None:
    given: list[tuple[type[MultiCollector], Any]] = [
        (Collector, Counting()),
        (MultiCollector, [Counting(), Counting()]),
    ]
    for kind, envs in given:
        with pytest.raises(InvalidArgumentError, match="give a function that makes one"):
            kind(envs, make_policy(), envs_per_worker=2)


async def test_a_pause_directly_after_another_one() -> None:
    async with collecting(ENVS, make_policy(), sync=True) as collector:
        await anext(collector)
        async with collector.pause():
            waiting = asyncio.create_task(anext(collector))
            await asyncio.sleep(0)
        async with collector.pause():
            await asyncio.sleep(0.2)
            assert not any(worker.requested for worker in workers_of(collector))
            assert not waiting.done()
        await within(waiting)


async def test_a_pause_between_the_batches_of_trajectories() -> None:
    """Of a call that goes on for many batches."""
    async with collecting(ENVS, make_policy(), sync=True, trajs_per_batch=300) as collector:
        waiting = asyncio.create_task(anext(collector))
        for _ in range(5):
            await asyncio.sleep(0.01)
            async with collector.pause():
                await asyncio.sleep(0.05)
                assert not waiting.done()
                assert not any(worker.requested for worker in workers_of(collector))
        await within(waiting)


async def test_a_pause_while_the_collector_sends_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that the task of start() has not taken wait for it, and it waits for the end of the pause."""
    replay, sending = ListReplayBuffer(), asyncio.Event()
    options: dict[str, Any] = {"sync": False, "replay_buffer": replay, "update_at_each_batch": True}
    async with collecting(ENVS, make_policy(), **options) as collector:
        send = collector.update_policy_weights_

        async def slowly() -> None:
            sending.set()
            await asyncio.sleep(0.3)
            await send()

        monkeypatch.setattr(collector, "update_policy_weights_", slowly)
        await collector.start()
        await eventually(lambda: bool(replay.frames), "it collects")
        sending.clear()
        await within(sending.wait())
        async with asyncio.timeout(PATIENCE), collector.pause(PATIENCE):
            before = len(replay.frames)
            await asyncio.sleep(0.5)
            assert len(replay.frames) == before
        await eventually(lambda: len(replay.frames) > before, "it goes on")


async def test_a_second_start() -> None:
    replay = ListReplayBuffer()
    options: dict[str, Any] = {"total_frames": 40, "replay_buffer": replay}
    async with collecting(ENVS, make_policy(), **options) as collector:
        state = await collector.state_dict()
        await collector.start()
        await eventually(lambda: not collector.is_running(), "it ends")
        await collector.load_state_dict(state)
        await collector.start()
        await eventually(lambda: len(replay.frames) == 80, "it collects again")
        await eventually(lambda: not collector.is_running(), "it ends")
        await collector.load_state_dict(state)
        replay.extend = lambda frames: 1 / 0  # type: ignore[method-assign, assignment]
        await collector.start()
        await eventually(lambda: not collector.is_running(), "it fails")
        with pytest.raises(ZeroDivisionError):
            await collector.start()


async def test_a_collector_whose_buffer_failed_ends_with_its_environments_kept() -> None:
    env, replay = AsyncCounting(), ListReplayBuffer()
    replay.extend = lambda frames: 1 / 0  # type: ignore[method-assign, assignment]
    collector = Collector(env, make_policy(), frames_per_batch=20, replay_buffer=replay, timeout=PATIENCE)
    await collector.connect()
    await collector.start()
    await eventually(lambda: not collector.is_running(), "it fails")
    await collector.shutdown(close_env=False)
    assert not env.closed


async def test_a_failed_collector_ends_with_its_environments_kept() -> None:
    env = functools.partial(Failing, "step")
    collector = Collector(env, make_policy(), frames_per_batch=20, timeout=PATIENCE)
    await collector.connect()
    with pytest.raises(Odd):
        await anext(collector)
    await collector.shutdown(close_env=False, raise_on_error=False)
    with pytest.raises(NotConnectedError):
        await anext(collector)
