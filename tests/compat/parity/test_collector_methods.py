"""The methods and attributes of collectors: the same lines with torchrl's classes and with ours."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl import collectors as theirs
from torchrl.data import LazyTensorStorage, ReplayBuffer, StalenessAwareSampler, TensorDictReplayBuffer
from torchrl.envs import TransformedEnv, VecNormV2
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms import PolicyAgeFilter

from aiosync.sync import collectors as ours
from tests.compat.policies import make_env, make_policy, mark
from tests.kit.clock import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore")

FRAMES = 20


def _normalised() -> Any:
    return TransformedEnv(make_env(), VecNormV2(in_keys=["observation"], out_keys=["observation"]))


@contextmanager
def opened(library: Any, name: str, *args: Any, **options: Any) -> Iterator[Any]:
    """A collector of one of the libraries. Nothing but ``shutdown()`` follows what torchrl's users write."""
    if library is ours:
        options["timeout"] = PATIENCE
    found = getattr(library, name)(*args, frames_per_batch=FRAMES, **options)
    try:
        yield found
    finally:
        found.shutdown()


def both(name: str, lines: Callable[[Any], Any], *args: Any, **options: Any) -> Any:
    """Run the same lines with both libraries' collectors; the results are equal, and returned."""
    results = []
    for library in (theirs, ours):
        torch.manual_seed(0)
        with opened(library, name, *args, **options) as collector:
            results.append(lines(collector))
    assert results[0] == results[1]
    return results[0]


def _raised(call: Callable[[], Any], *kinds: type[Exception]) -> Any:
    with pytest.raises(kinds) as caught:
        call()
    return next(kind for kind in kinds if isinstance(caught.value, kind))


def _asked_of_workers(collector: Any) -> list[Any]:
    """What workers answer, and how calls of them fail."""
    each, whole = collector.stats("both"), collector.stats()
    return [
        isinstance(collector.set_seed(3), int),
        collector.getattr_policy("out_keys"),
        collector.getattr_policy("training"),
        collector.getattr_env("batch_size"),
        _raised(lambda: collector.getattr_policy("nmae"), AttributeError),
        _raised(lambda: collector.getattr_env("nmae"), AttributeError),
        collector.get_distant_attr("policy.training"),
        collector.get_distant_attr("worker_idx"),
        collector.map_fn("policy.state_dict")[1].keys(),
        collector.map_fn("env.set_seed", [(1,), (2,)]),
        _raised(lambda: collector.map_fn("reset", [()]), ValueError),
        collector.cascade_execute("requested_frames_per_batch"),
        _raised(lambda: collector.cascade_execute("num_workers", 1), ValueError),
        each.keys() >= whole.keys() and each["worker_1/requested_frames_per_batch"],
        collector.stats("per_worker").keys() & {"frames", "worker_0/frames", "workers"},
        _raised(lambda: collector.stats("all"), ValueError),
    ]


@pytest.mark.parametrize("name", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_the_same_lines(name: str) -> None:
    policy = make_policy()

    def lines(collector: Any) -> Any:
        # Before the first batch: a worker of torchrl that is called while it collects drops its batch and
        # waits to be told to go on. Its asynchronous collector, which waits for the batch, never does that.
        found = [*_asked_of_workers(collector), collector.stats() | {"policy_version": 0}]
        first = collector.next()
        found += [
            first.batch_size,
            collector.frames_per_batch_worker(worker_idx=0),
            collector.requested_frames_per_batch,
            collector.total_frames,
            collector.num_workers,
            collector.max_frames_per_traj,
            collector.storing_device,
            collector.weight_updater,
            collector.init_updater(),
            collector.closed,
            len(collector),
            collector.policy_version,
            collector.get_policy_version(),
        ]
        while (batch := collector.next()) is not None:
            found.append(batch.numel())
        found.append(_raised(lambda: collector.shutdown(close_env=False), RuntimeError))
        collector.async_shutdown(timeout=PATIENCE)
        collector.shutdown(timeout=PATIENCE, close_env=True, raise_on_error=False)
        return [*found, collector.closed]

    result = both(name, lines, [make_env] * 2, policy, total_frames=3 * FRAMES, track_policy_version=False)
    assert result[2] is True, "the mode in which the policy was given"
    both(name, lambda c: _raised(lambda: len(c), TypeError), [make_env], policy)


@pytest.mark.parametrize("name", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_workers_answer_while_they_collect(name: str) -> None:
    with opened(ours, name, [make_env] * 2, make_policy(), total_frames=6 * FRAMES) as collector:
        answers = _asked_of_workers(collector)
        frames = 0
        while (batch := collector.next()) is not None:
            assert _asked_of_workers(collector) == answers
            frames += batch.numel()
        assert frames == 6 * FRAMES


@pytest.mark.parametrize("mode", [True, False])
def test_a_policy_stays_in_its_mode(mode: bool) -> None:
    policy = make_policy().train(mode)
    found = both("MultiSyncCollector", lambda each: each.getattr_policy("training"), [make_env], policy)
    assert found is mode


@pytest.mark.parametrize("kind", [int, "uuid"])
def test_versions_of_one_process(kind: Any) -> None:
    for library in (theirs, ours):
        policy, tracker = make_policy(), PolicyVersion(kind)
        with opened(library, "Collector", make_env, policy, track_policy_version=tracker) as collector:
            names = [collector.get_policy_version()]
            for number in range(1, 4):
                assert set(_leaves(collector.next().get(("next", "policy_version")))) == {names[-1]}
                mark(policy, number)
                collector.update_policy_weights_()
                assert collector.policy_version == collector.get_policy_version() == tracker.version
                names.append(tracker.version)
            collector.increment_version()
            names.append(collector.policy_version)
            assert collector.state_dict()["policy_version"] == names[-1]
        assert len(set(names)) == 5
        assert [change.new_version for change in tracker.version_history] == names
        if kind is int:
            assert names == [0, 1, 2, 3, 4]
        else:
            assert all(uuid.UUID(name) for name in names)


def _leaves(names: Any) -> list[Any]:
    found = names.tolist() if hasattr(names, "tolist") else names
    return [leaf for each in found for leaf in _leaves(each)] if isinstance(found, list) else [found]


def test_versions_of_several_workers() -> None:
    """torchrl's workers count for themselves, and their collector's own tracker stays where it was."""
    policy, tracker = make_policy(), PolicyVersion("uuid")
    with opened(ours, "MultiAsyncCollector", [make_env] * 2, policy, track_policy_version=tracker) as each:
        seen: set[str] = set()
        names = {tracker.version: 0.0}
        for number in range(1, 5):
            batch = each.next()
            for name, acted in zip(_leaves(batch.get("policy_version")), batch["marks"], strict=True):
                assert names[name] == acted[0], "a name is that of the version that acted"
                seen.add(name)
            mark(policy, number)
            each.update_policy_weights_()
            names[tracker.version] = float(number)
            assert each.acknowledged_versions == dict.fromkeys(range(2), tracker.version)
        assert seen <= names.keys()
    started = PolicyVersion()
    started.version = 5
    with opened(ours, "MultiSyncCollector", [make_env] * 2, policy, track_policy_version=started) as each:
        assert each.next()["policy_version"].unique().tolist() == [5]
        each.update_policy_weights_()
        assert each.next()["policy_version"].unique().tolist() == [6] == [started.version]
        assert each.acknowledged_versions == {0: 6, 1: 6}
    with pytest.raises(ValueError, match="track_policy_version"):
        ours.MultiSyncCollector([make_env], policy, track_policy_version="yes")


def test_torchrls_state_is_restored() -> None:
    policy = make_policy()
    options: dict[str, Any] = {"total_frames": 5 * FRAMES, "track_policy_version": True}
    with opened(theirs, "MultiSyncCollector", [_normalised] * 2, policy, **options) as collector:
        collector.next()
        mark(policy, 7)
        collector.update_policy_weights_()
        ids = collector.next()["collector", "traj_ids"]
        state = collector.state_dict()
        loc = collector.map_fn("env.transform[0].state_dict")[0]  # torchrl has added a transform
    state["policy_version"] = 4
    mark(policy, 1)
    with opened(ours, "MultiSyncCollector", [_normalised] * 2, policy, **options) as collector:
        collector.load_state_dict(state)
        assert collector.policy_version == 4
        assert collector.frames == 2 * FRAMES
        assert all(
            torch.equal(value, loc[name])
            for name, value in collector.map_fn("env.transform.state_dict")[0].items()
            if isinstance(value, torch.Tensor)
        )
        batch = collector.next()
        assert batch["marks"].unique().tolist() == [7]
        assert batch["policy_version"].unique().tolist() == [4]
        assert batch["collector", "traj_ids"].min() > ids.max()
        again = collector.state_dict()
        assert (again["iter"], again["frames"]) == (2, 3 * FRAMES)
        assert {"worker0", "worker1", "policy_version"} <= again.keys()
        assert {"policy_state_dict", "env_state_dict", "frames", "iter"} <= again["worker1"].keys()
        assert len([*collector]) == 2
        with pytest.raises(ValueError, match="has 1 workers"):
            collector.load_state_dict({"worker0": state["worker0"], "frames": 1, "iter": 0})
        state["policy_version"] = "a name"
        with pytest.warns(UserWarning, match="policy_version: expected an integer"):
            collector.load_state_dict(state)


def _buffer(**options: Any) -> Any:
    return ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32, **options)


@pytest.mark.parametrize("how", ["sampler", "transform", "their filter"])
def test_old_frames_are_not_sampled(how: str) -> None:
    """torchrl's sampler gets its version from its user; here the collector sets it."""
    policy, limit = make_policy(), 1
    options: dict[str, Any] = {} if how == "their filter" else {"max_staleness": limit}
    if how == "sampler":
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(1000), sampler=StalenessAwareSampler(), batch_size=32
        )
    else:
        buffer = _buffer()
    with opened(ours, "MultiSyncCollector", [make_env] * 2, policy, replay_buffer=buffer, **options) as it:
        if how == "their filter":
            buffer.append_transform(PolicyAgeFilter(lambda: it.policy_version, max_policy_lag=limit))
        for number in range(1, 6):
            assert it.next() is None
            versions = buffer.sample()["policy_version"]
            assert versions.numel()
            assert versions.min() >= number - 1 - limit
            mark(policy, number)
            it.update_policy_weights_()
            if how == "sampler":
                assert buffer.sampler.consumer_version == number
        assert len(buffer) == 5 * FRAMES


@pytest.mark.parametrize("library", [theirs, ours])
def test_a_pause_is_quiet(library: Any) -> None:
    buffer, policy = ReplayBuffer(storage=LazyTensorStorage(100_000), shared=library is theirs), make_policy()
    with opened(library, "MultiAsyncCollector", [make_env] * 2, policy, replay_buffer=buffer) as collector:
        collector.start()
        while buffer.write_count < 5 * FRAMES:
            pass
        for _ in range(3):
            with collector.pause():
                count = buffer.write_count
                assert collector.map_fn("policy.state_dict")[0].keys() == policy.state_dict().keys()
                assert collector.get_distant_attr("policy.training") == [True, True]
                assert buffer.write_count == count
            while buffer.write_count == count:
                pass


def test_a_function_of_the_worker_is_called() -> None:
    def lines(collector: Any) -> Any:
        rolled_out = collector.map_fn("env.rollout", list_of_kwargs=[{"max_steps": n} for n in (1, 2)])
        return [
            collector.map_fn("policy.extra_repr"),
            [(sorted(map(str, each.keys(True, True))), each.shape) for each in rolled_out],
            collector.map_fn("env.batch_size.numel"),
        ]

    both("MultiSyncCollector", lines, [make_env] * 2, make_policy())


def test_a_batch_of_zeros() -> None:
    def lines(collector: Any) -> Any:
        fake = collector.fake_tensordict()
        real = collector.next()
        keys = set(real.keys(True, True)) - {"policy_version", ("next", "policy_version")}
        assert keys <= set(fake.keys(True, True))
        assert all(fake[key].shape == real[key].shape for key in keys)
        assert all(fake[key].dtype == real[key].dtype for key in keys)
        return fake.shape, all(not fake[key].any() for key in keys)

    both("Collector", lines, make_env, make_policy())
    both("Collector", lines, make_env(), make_policy())
    call: Callable[[Any], Any] = lambda each: _raised(each.fake_tensordict, NotImplementedError)  # noqa: E731
    both("MultiSyncCollector", call, [make_env], make_policy())


@pytest.mark.parametrize("name", ["Collector", "MultiSyncCollector"])
def test_a_profile_is_written(name: str, tmp_path: Any) -> None:
    envs = make_env if name == "Collector" else [make_env] * 2

    def lines(collector: Any) -> Any:
        path = tmp_path / f"{type(collector).__module__}_{{worker_idx}}.json"
        refused = _raised(lambda: collector.enable_profile(num_rollouts=1, warmup_rollouts=1), ValueError)
        collector.enable_profile(workers=[0], num_rollouts=2, save_path=path, with_stack=False)
        found = [collector.profile_config.num_rollouts]
        for _ in range(3):
            collector.next()
        collector.disable_profile()
        size = (tmp_path / str(path).format(worker_idx=0)).stat().st_size
        return [*found, collector.profile_config, size > 0, refused]

    both(name, lines, envs, make_policy())
