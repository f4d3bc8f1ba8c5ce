"""The same environments in torchrl's collectors and in ours: keys, shapes, dtypes and values are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl import collectors as theirs
from torchrl.envs import (
    EnvCreator,
    NextObservationDelta,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)

from aiosync import UnpicklableError
from aiosync.sync import collectors as ours
from tests.kit.clock import PATIENCE
from tests.kit.torchrl_envs import Growing, Speaking, Steps, Team, make_policy

pytestmark = pytest.mark.filterwarnings("ignore")

FRAMES = 12
LIBRARIES = [theirs, ours]

ENVS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "one": (Steps, make_policy),
    "batch": (partial(Steps, (2,)), make_policy),
    "two dimensions": (partial(Steps, (2, 3)), make_policy),
    "truncated": (partial(Steps, truncated=True), make_policy),
    "two actions": (partial(Steps, arm=True), partial(make_policy, arm=True)),
    "transformed": (lambda: TransformedEnv(Steps(length=9), StepCounter(3)), make_policy),
    "of environments": (lambda: SerialEnv(2, Steps), make_policy),
    "team": (Team, partial(make_policy, "agents")),
    "teams": (partial(Team, (2,), truncated=True), partial(make_policy, "agents")),
    "team of lone agents": (partial(Team, together=False), partial(make_policy, "agents")),
    "teams of lone agents": (partial(Team, (2,), together=False), partial(make_policy, "agents")),
}
NAMED = pytest.mark.parametrize(("make", "policy"), ENVS.values(), ids=ENVS)


@contextmanager
def open_(kind: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
    """A collector of one of the libraries, ready to collect."""
    if kind.__module__.startswith("aiosync"):
        options["timeout"] = PATIENCE
    given: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": 3 * FRAMES} | options
    collector = kind(*arguments, **given)
    try:
        if kind.__module__.startswith("aiosync"):
            collector.connect()
        yield collector
    finally:
        collector.shutdown()


def collect(kind: Any, *arguments: Any, **options: Any) -> list[Any]:
    """All batches of a collector."""
    with open_(kind, *arguments, track_policy_version=False, **options) as collector:
        return [None if batch is None else batch.clone() for batch in collector]


def check(expected: Any, found: Any, *, without: tuple[Any, ...] = ()) -> None:
    """That two batches are equal, as far as a reader can tell."""
    assert found.batch_size == expected.batch_size
    if isinstance(expected, LazyStackedTensorDict):
        assert isinstance(found, LazyStackedTensorDict)
        for one, other in zip(expected.unbind(-1), found.unbind(-1), strict=True):
            check(one, other, without=without)
        return
    assert set(found.keys(True)) == set(expected.keys(True))
    for key in expected.keys(True):
        one, other = expected[key], found[key]
        if isinstance(one, TensorDictBase):
            assert other.batch_size == one.batch_size, key
        elif not isinstance(one, torch.Tensor):
            assert other == one, key
        else:
            assert (other.dtype, other.shape) == (one.dtype, one.shape), key
            last = key if isinstance(key, str) else key[-1]
            assert {key, last} & {*without} or torch.equal(other, one), key


def both(make: Callable[[], Any], policy: Any, name: str = "Collector", **options: Any) -> None:
    """Check that both libraries' batches of an environment are equal."""
    expected, found = (collect(getattr(each, name), make(), policy(), **options) for each in LIBRARIES)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        check(one, other)


@NAMED
def test_keys_of_the_specs(make: Any, policy: Any) -> None:
    both(make, policy)


@NAMED
def test_a_limit_of_steps(make: Any, policy: Any) -> None:
    if make is ENVS["transformed"][0]:
        for each in LIBRARIES:
            with pytest.raises(ValueError, match="StepCounter"):
                collect(each.Collector, make(), policy(), max_frames_per_traj=2)
        return
    if "done" not in make().done_keys:
        # torchrl raises: its StepCounter writes entries of another batch size.
        batches = collect(ours.Collector, make(), policy(), max_frames_per_traj=2)
        for after in (batch["next", "agents"] for batch in batches):
            assert torch.equal(after["truncated"], after["step_count"] == 2)
        return
    both(make, policy, max_frames_per_traj=3)
    both(make, policy, max_frames_per_traj=2, set_truncated=True)


@NAMED
def test_ends_that_batches_set(make: Any, policy: Any) -> None:
    if any("truncated" in str(key) for key in make().done_keys):
        both(make, policy, set_truncated=True)
        return
    for each in LIBRARIES:
        with pytest.raises(RuntimeError, match="add_truncated_keys"):
            collect(each.Collector, make(), policy(), set_truncated=True)


@NAMED
def test_batches_that_begin_episodes(make: Any, policy: Any) -> None:
    options: dict[str, Any] = {"reset_at_each_iter": True}
    expected, found = (collect(each.Collector, make(), policy(), **options) for each in LIBRARIES)
    # torchrl resets twice before the first batch, so episodes, and what depends on them, have other numbers.
    numbered = ("observation", "action", "reward", "traj_ids")
    for one, other in zip(expected, found, strict=True):
        check(one, other, without=numbered)
        for key in set(one.keys(True, True)):
            if key == "observation" or key[-1] == "observation":
                assert torch.equal(other[key][..., 1], one[key][..., 1])


@NAMED
def test_random_actions(make: Any, policy: Any) -> None:
    options: dict[str, Any] = {"init_random_frames": 2 * FRAMES}
    expected, found = (collect(each.Collector, make(), policy(), **options) for each in LIBRARIES)
    actions = list(make().action_keys)
    for one, other in zip(expected[:2], found, strict=False):
        check(one, other, without=("action", "reward"))
        assert all(len(other[key].unique()) > FRAMES / 2 for key in actions)
    check(expected[2], found[2])


@pytest.mark.parametrize("use_buffers", [None, False])
def test_specs_that_change_size(use_buffers: bool | None) -> None:
    policy = partial(_last)
    options: dict[str, Any] = {"use_buffers": use_buffers, "total_frames": FRAMES}
    expected, found = (collect(each.Collector, Growing(), policy, **options) for each in LIBRARIES)
    check(expected[0], found[0])
    assert [step["observation"].shape[0] for step in found[0].unbind(0)] == [1, 2, 3, 4] * 3


def _last(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", tensordict["observation"][-1:])


@pytest.mark.parametrize("name", ["team", "batch"])
def test_plain_buffers_are_not_needed(name: str) -> None:
    both(*ENVS[name], use_buffers=False)


def test_trajectories_as_rows() -> None:
    both(*ENVS["one"], split_trajs=True)
    both(*ENVS["team"], split_trajs=True, max_frames_per_traj=3)


@pytest.mark.parametrize(
    ("name", "envs"),
    {
        "teams": ("MultiSyncCollector", lambda: [Team((2,)), Team((2,), 3)]),
        "creators": ("MultiAsyncCollector", lambda: [EnvCreator(partial(Team, (2,)))]),
    }.values(),
    ids=["teams", "creators"],
)
def test_environments_that_are_made_already(name: str, envs: Any) -> None:
    policy = make_policy("agents")
    options: dict[str, Any] = {"frames_per_batch": 2 * FRAMES, "max_frames_per_traj": 3}
    expected, found = (collect(getattr(each, name), envs(), policy, **options) for each in LIBRARIES)
    for one, other in zip(expected, found, strict=True):
        check(one, other, without=("traj_ids",))


def test_specs_that_change_size_in_processes() -> None:
    options: dict[str, Any] = {"use_buffers": False, "total_frames": FRAMES}
    envs = [Growing, partial(Growing, 2)]
    expected, found = (collect(each.MultiSyncCollector, envs, _last, **options) for each in LIBRARIES)
    check(expected[0], found[0], without=("traj_ids",))


def test_arguments_for_an_environment_that_is_made_already() -> None:
    for each in LIBRARIES:
        with pytest.raises(RuntimeError, match="kwargs"):
            collect(each.Collector, Steps(), make_policy(), create_env_kwargs={"length": 2})
    made = [SerialEnv(2, Steps, create_env_kwargs={"length": 9}) for _ in LIBRARIES]
    one, other = (
        collect(each.Collector, env, make_policy(), create_env_kwargs={"length": 2})
        for each, env in zip(LIBRARIES, made, strict=True)
    )
    check(one[0], other[0])
    assert other[0]["next", "done"].sum() > 2


def test_a_sequence_of_one_environment() -> None:
    expected, found = (collect(each.Collector, [Steps], make_policy()) for each in LIBRARIES)
    check(expected[0], found[0])
    for each in LIBRARIES:
        with pytest.raises(ValueError, match="one environment"):
            collect(each.Collector, [Steps] * 2, make_policy())


def test_a_plain_policy_gets_the_observations() -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :1]

    both(Steps, lambda: policy)


class Remembering(TensorDictModuleBase):  # type: ignore[misc]
    """Keeps its state in the TensorDict: how often it has been called, and the action before.

    Args:
        how: whether it changes its input, or returns another TensorDict.
    """

    in_keys = ("observation",)
    out_keys = ("action", "calls", "before")

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action and the state."""
        none = torch.zeros(*tensordict.batch_size, 1)
        calls, before = tensordict.get("calls", none), tensordict.get("action", none)
        found = tensordict if self._how == "changes" else tensordict.empty()
        found.set("before", before.clone()).set("calls", calls + 1)
        return found.set("action", (tensordict["observation"][..., 1:] + calls) % 7)


@pytest.mark.parametrize("how", ["changes", "returns"])
@pytest.mark.parametrize("name", ["one", "batch", "of environments", "transformed"])
def test_what_a_policy_keeps_in_the_tensordict(name: str, how: str) -> None:
    make = ENVS[name][0]
    both(make, partial(Remembering, how))
    if name != "transformed":  # which counts steps itself
        both(make, partial(Remembering, how), max_frames_per_traj=3)


def test_a_policy_that_changes_its_state_now_and_then() -> None:
    class Sometimes(Remembering):
        calls = 0

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            if self.calls % 3 == 0:
                tensordict.set("calls", torch.full((1,), float(self.calls)))
            self.calls += 1
            return tensordict.set("action", tensordict["observation"][..., :1])

    batches = collect(ours.Collector, Steps(), Sometimes("changes"))  # torchrl raises a TypeError
    found = torch.cat([batch["calls"].view(-1) for batch in batches])
    assert torch.equal(found, (torch.arange(3 * FRAMES) // 3 * 3).float())


class Marking(Transform):  # type: ignore[misc]
    """Changes what the next step begins with, and the reward of this one."""

    def _post_step_mdp_hooks(self, one: TensorDictBase, following: TensorDictBase) -> Any:
        following.set("observation", following["observation"] + 100)
        one["next", "reward"].mul_(2)
        return one, following

    def _reset(self, one: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return following


@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 3}, {"max_frames_per_traj": 9}], ids=str)
@pytest.mark.parametrize("transform", [Marking, NextObservationDelta])
def test_hooks_between_two_steps(transform: Any, options: dict[str, Any]) -> None:
    both(lambda: TransformedEnv(Steps(), transform()), make_policy, **options)


@pytest.mark.parametrize("transform", [Marking, NextObservationDelta])
def test_hooks_without_resets(transform: Any) -> None:
    def of(library: Any, **options: Any) -> Any:
        env = TransformedEnv(Steps(length=50), transform())
        return collect(library.Collector, env, make_policy(), **options)

    for one, other in zip(of(theirs), of(ours, reset_when_done=False), strict=True):
        check(one, other)


@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 3}, {"split_trajs": True}], ids=str)
@pytest.mark.parametrize("size", [(), (2,)], ids=str)
def test_fields_that_are_no_tensors(size: tuple[int, ...], options: dict[str, Any]) -> None:
    if size and "max_frames_per_traj" in options:
        return  # torchrl raises in a partial reset
    both(partial(Speaking, size, 9 if size else 4), make_policy, **options)


@pytest.mark.parametrize("dim", ["stack", -1])
def test_fields_that_are_no_tensors_in_processes(dim: Any) -> None:
    options = {"cat_results": dim, "total_frames": FRAMES}
    expected, found = (
        collect(each.MultiSyncCollector, [Speaking] * 2, make_policy(), **options) for each in LIBRARIES
    )
    check(expected[0], found[0], without=("traj_ids",))
    assert isinstance(found[0].get("text"), NonTensorStack)
    parts = collect(ours.MultiAsyncCollector, [Speaking] * 2, make_policy())
    assert {*parts[0]["text"]} == {"step 0", "step 1", "step 2", "step 3"}


def test_the_order_of_split_trajectories() -> None:
    both(*ENVS["of environments"], split_trajs=True)
    both(*ENVS["batch"], split_trajs=True)


def test_whole_trajectories_with_fields_that_are_no_tensors() -> None:
    (batch,) = collect(ours.Collector, Speaking(), make_policy(), trajs_per_batch=2, total_frames=FRAMES)[:1]
    assert batch["text"] == [[f"step {i}" for i in range(4)]] * 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_state_does_not_end_processes_of_an_environment(library: Any) -> None:
    env = ParallelEnv(2, Steps)
    env.start()
    with open_(library.Collector, env, make_policy()) as collector:
        batches = []
        for batch in collector:
            batches.append(batch.clone())
            state = collector.state_dict()
        frames: Any = torch.cat(batches, -1)
        counts = frames["observation"][..., 1]
        assert torch.equal(counts, (torch.arange(3 * FRAMES // 2) % 4).float().expand_as(counts))
        if library is ours:
            with pytest.raises(UnpicklableError, match="cannot be copied: give a function"):
                collector.fake_tensordict()
            collector.load_state_dict(state)  # new episodes begin
            assert not env.is_closed
