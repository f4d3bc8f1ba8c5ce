"""The same replay buffers, filled by torchrl's collectors and by ours: they have the same items."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from tests.compat.parity.test_environments import FRAMES, LIBRARIES, check, collect, open_
from tests.kit.clock import PATIENCE
from tests.kit.torchrl_envs import Steps, Team, make_policy

pytestmark = pytest.mark.filterwarnings("ignore")


def _prioritized() -> Any:
    try:
        return TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.9, storage=LazyTensorStorage(100), batch_size=4
        )
    except RuntimeError as exc:  # torchrl's extension in C++ does not fit this version of torch
        pytest.skip(str(exc))


BUFFERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4),
    "memmap": lambda: TensorDictReplayBuffer(storage=LazyMemmapStorage(100), batch_size=4),
    "list": lambda: ReplayBuffer(storage=ListStorage(100), batch_size=4, collate_fn=torch.stack),
    "prioritized": _prioritized,
    "slices": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(num_slices=2, traj_key=("collector", "traj_ids")),
        batch_size=4,
    ),
}
TEAM = {"policy": partial(make_policy, "agents")}


def fill(
    kind: Any,
    buffer: Any,
    make: Callable[[], Any] = Steps,
    policy: Callable[[], Any] = make_policy,
    **options: Any,
) -> Any:
    """The buffer, filled by a collector whose iterator returns None."""
    assert set(collect(kind, make(), policy(), replay_buffer=buffer, **options)) == {None}
    return buffer


def equal(expected: Any, found: Any, *, without: tuple[Any, ...] = ()) -> None:
    """Check that two buffers have the same items."""
    assert len(found) == len(expected)
    assert found.write_count == expected.write_count
    check(expected[:], found[:], without=without)


@pytest.mark.parametrize("extend", [True, False], ids=["extend", "add"])
@pytest.mark.parametrize("name", BUFFERS)
def test_any_buffer(name: str, extend: bool) -> None:
    one, other = (fill(each.Collector, BUFFERS[name](), extend_buffer=extend) for each in LIBRARIES)
    assert len(other) == 3 * FRAMES
    if name == "list":
        for expected, found in zip(one[:], other[:], strict=True):
            check(expected, found)
    else:
        equal(one, other)
    assert other.sample().batch_size == (4,)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("extend", [True, False], ids=["extend", "add"])
def test_environments_that_step_together(extend: bool, ndim: int) -> None:
    if ndim == 2 and not extend:
        pytest.skip("torchrl's add() takes no batch of a storage of two dimensions")
    made = [ReplayBuffer(storage=LazyTensorStorage(100, ndim=ndim)) for _ in LIBRARIES]
    batch = partial(Team, (2,))
    options: dict[str, Any] = {"extend_buffer": extend, **TEAM}
    one, other = (
        fill(each.Collector, rb, batch, **options) for each, rb in zip(LIBRARIES, made, strict=True)
    )
    equal(one, other)


def test_what_is_made_of_each_batch() -> None:
    def postproc(batch: Any) -> Any:
        return batch.set("double", 2 * batch["observation"])

    one, other = (fill(each.Collector, BUFFERS["plain"](), postproc=postproc) for each in LIBRARIES)
    equal(one, other)


def test_trajectories_as_items() -> None:
    options: dict[str, Any] = {"split_trajs": True}
    one, other = (fill(each.Collector, BUFFERS["plain"](), **options) for each in LIBRARIES)
    assert other[:].batch_size == (9, 4)
    equal(one, other)


@pytest.mark.parametrize(
    "options", [{"postproc": torch.nn.Identity()}, {"split_trajs": True}], ids=["postproc", "split_trajs"]
)
def test_single_steps_cannot_be_processed(options: dict[str, Any]) -> None:
    for each in LIBRARIES:
        with pytest.raises(TypeError, match="extend_buffer"):
            each.Collector(
                Steps(),
                make_policy(),
                frames_per_batch=4,
                replay_buffer=BUFFERS["plain"](),
                extend_buffer=False,
                **options,
            )


def test_frames_of_before_are_no_random_ones() -> None:
    options: dict[str, Any] = {"init_random_frames": FRAMES}
    for count, is_random in ((0, True), (FRAMES, False)):
        for each in LIBRARIES:
            buffer = fill(each.Collector, BUFFERS["plain"]())
            frames = buffer[:]
            buffer.empty()
            buffer = BUFFERS["plain"]()
            buffer.extend(frames[: count or 1])
            fill(each.Collector, buffer, total_frames=FRAMES, **options)
            first = buffer[count or 1 :]["action"]
            expected = frames["action"][:FRAMES]
            assert torch.equal(first, expected) is not is_random


@pytest.mark.parametrize("extend", [True, False], ids=["extend", "add"])
@pytest.mark.parametrize("name", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_workers_fill_it(name: str, extend: bool) -> None:
    found = []
    for each in LIBRARIES:
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
        options: dict[str, Any] = {"replay_buffer": buffer, "extend_buffer": extend}
        with open_(getattr(each, name), [Team], make_policy("agents"), **options) as collector:
            if name == "MultiSyncCollector":
                assert list(collector) == [None] * 3
                assert buffer.write_count == 3 * FRAMES
            else:
                collector.start()
                deadline = time.monotonic() + PATIENCE
                while buffer.write_count < 2 * FRAMES:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        found.append(buffer[: 2 * FRAMES])
    check(found[0], found[1].exclude("policy_version", ("next", "policy_version")))


def test_there_must_be_one_to_start() -> None:
    for each in LIBRARIES:
        with open_(each.Collector, Steps(), make_policy()) as collector, pytest.raises(RuntimeError):
            collector.start()


@pytest.mark.parametrize("name", ["replay_buffer_chunk", "local_init_rb"])
def test_options_that_torchrl_has_no_more(name: str) -> None:
    for each in LIBRARIES:
        with pytest.raises((TypeError, ValueError), match=name):
            each.Collector(Steps(), make_policy(), frames_per_batch=4, **{name: True})
