"""torchrl's collectors of several processes, with the twins in the place of its schemes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer

from aiosync import InvalidArgumentError, RemoteApplyError, WorkerLostError, sync
from tests.compat.policies import (
    FRAMES,
    Transient,
    check,
    collecting,
    make_env,
    make_normalised_env,
    make_policy,
    make_scaling_env,
    mark,
)
from tests.kit.clock import PATIENCE

SCHEMES = {
    "shared": sync.SharedMemWeightSyncScheme,
    "process": sync.MultiProcessWeightSyncScheme,
    "tcp": sync.TCPWeightSyncScheme,
}
KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
UPDATES = 50
INNER = "env.transform[0].module"
NORM = "env.transform[0]"


def _soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("sync", "shared"),
        ("async", "process"),
        _soak("async", "tcp"),
        _soak("sync", "process"),
        _soak("async", "shared"),
        _soak("sync", "tcp"),
    ],
)
def test_every_frame_claims_the_version_that_acted(kind: str, scheme: str) -> None:
    policy = make_policy()
    schemes = {"policy": SCHEMES[scheme](timeout=PATIENCE)}
    seen: set[int] = set()
    with collecting(KINDS[kind], policy, schemes, total_frames=FRAMES * (UPDATES + 1)) as collector:
        for version, batch in enumerate(collector, start=1):
            found = check(batch)
            seen |= found
            if kind == "sync":
                assert found == {version - 1}
            mark(policy, version)
            collector.update_policy_weights_()
    assert max(seen) >= UPDATES - 2
    assert version == UPDATES + 1


def test_a_shared_replay_buffer_that_is_filled_beside() -> None:
    size = 20_000
    policy = make_policy()
    buffer = ReplayBuffer(storage=LazyTensorStorage(size), batch_size=size, shared=True)
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    options: dict[str, Any] = {"total_frames": -1, "replay_buffer": buffer}
    with collecting(MultiAsyncCollector, policy, schemes, **options) as collector:
        collector.start()
        deadline = time.monotonic() + PATIENCE
        for version in range(1, UPDATES + 1):
            mark(policy, version)
            collector.update_policy_weights_()
        # A sample waits for the workers' writes; buffer[:] shows frames that they have not written.
        while not buffer.write_count or UPDATES not in check(buffer.sample()):
            assert time.monotonic() < deadline
            os.sched_yield()


@pytest.mark.parametrize("given", [_soak(True), False], ids=["with a policy", "without"])
def test_policy_factories(given: bool) -> None:
    policy = make_policy()
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    options: dict[str, Any] = {"policy_factory": make_policy, "total_frames": FRAMES * 3}
    with collecting(MultiSyncCollector, policy if given else None, schemes, **options) as collector:
        for version, batch in enumerate(collector, start=1):
            assert check(batch) == {version - 1}
            mark(policy, version)
            collector.update_policy_weights_(None if given else policy)
        if not given:
            with pytest.raises(InvalidArgumentError, match="policy_factory"):
                collector.update_policy_weights_()


@pytest.mark.soak
def test_weights_for_some_workers() -> None:
    policy = make_policy()
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE, per_worker_weights=True)}
    with collecting(
        MultiSyncCollector, policy, schemes, total_frames=FRAMES * 3, cat_results="stack"
    ) as collector:
        iterator = iter(collector)
        check(next(iterator))
        mark(policy, 1)
        collector.update_policy_weights_(worker_ids=[1])
        batch = next(iterator)
        assert batch["marks"][0].unique().tolist() == [0]
        assert batch["marks"][1].unique().tolist() == [1]


def test_several_models() -> None:
    policy, scaled = make_policy(), torch.nn.Linear(1, 1)
    inner = sync.MultiProcessWeightSyncScheme(timeout=PATIENCE)
    inner.init_on_sender(model_id=INNER, model=scaled, num_workers=2)
    schemes = {"policy": sync.MultiProcessWeightSyncScheme(timeout=PATIENCE), INNER: inner}
    options: dict[str, Any] = {"env": make_scaling_env, "total_frames": FRAMES * 4}
    with collecting(MultiSyncCollector, policy, schemes, **options) as collector:
        for version, batch in enumerate(collector, start=1):
            assert check(batch) == {version - 1}
            if version > 1:
                assert batch["next", "scaled"].unique().tolist() == [10 * (version - 1)]
            mark(policy, version)
            torch.nn.init.constant_(scaled.weight, 10.0 * version)
            torch.nn.init.zeros_(scaled.bias)
            collector.update_policy_weights_(weights_dict={"policy": policy, INNER: scaled})


def _collector_in_the_middle(scheme: Any, pipe: Any, late: bool) -> None:
    """Receives, and hands on to two workers of its own; answers with what acted in its next batch."""
    below = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    above = {"policy": scheme}
    options: dict[str, Any] = {
        "worker_idx": 0,
        "total_frames": -1,
        "weight_recv_schemes": None if late else above,
    }
    with collecting(MultiSyncCollector, make_policy(), below, **options) as collector:
        if late:
            collector.register_scheme_receiver(above)
        iterator = iter(collector)
        while pipe.recv():
            pipe.send(next(iterator)["marks"].unique().tolist())


@pytest.mark.soak
@pytest.mark.parametrize("late", [False, True], ids=["before they start", "when they run"])
def test_collectors_below_collectors(late: bool) -> None:
    policy = make_policy()
    scheme = sync.TCPWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    middle = context.Process(target=_collector_in_the_middle, args=(scheme, theirs, late))
    middle.start()
    try:
        scheme.connect()
        for version in range(1, 11):
            mark(policy, version)
            scheme.send()  # the first of them while the workers below are just being started
            pipe.send(True)
            assert pipe.poll(PATIENCE)
            assert pipe.recv() == [version]
    finally:
        pipe.send(False)
        middle.join(PATIENCE)
        scheme.close()
    assert middle.exitcode == 0


def test_a_worker_that_fails_at_its_start_is_not_waited_for() -> None:
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    schemes[INNER] = sync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    schemes[INNER].init_on_sender(model_id=INNER, model=torch.nn.Linear(1, 1), num_workers=2)
    with pytest.raises(WorkerLostError, match="a size of -1"):
        MultiSyncCollector(
            [make_scaling_env, partial(make_scaling_env, -1)],
            make_policy(),
            frames_per_batch=FRAMES,
            total_frames=-1,
            weight_sync_schemes=schemes,
        )
    for scheme in schemes.values():
        scheme.close()


def test_another_models_updates_are_not_the_policys() -> None:
    scaled = torch.nn.Linear(1, 1)
    inner = sync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    inner.init_on_sender(model_id=INNER, model=scaled, num_workers=2)
    schemes = {"policy": sync.NoWeightSyncScheme(), INNER: inner}
    options: dict[str, Any] = {
        "env": make_scaling_env,
        "policy_factory": make_policy,
        "total_frames": FRAMES * 5,
    }
    with collecting(MultiSyncCollector, make_policy(), schemes, **options) as collector:
        for batch in collector:
            assert check(batch) == {0}
            collector.update_policy_weights_(weights_dict={INNER: scaled})


def test_running_statistics() -> None:
    trained = make_normalised_env(frozen=False)
    norm = trained.transform[0]
    trained.rollout(50, break_when_any_done=False)
    inner = sync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    inner.init_on_sender(model_id=NORM, model=norm, num_workers=2)
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE), NORM: inner}
    policy = make_policy()
    options: dict[str, Any] = {"env": make_normalised_env, "total_frames": FRAMES * 4}
    with collecting(MultiSyncCollector, policy, schemes, **options) as collector:
        for version, batch in enumerate(collector, start=1):
            assert check(batch) == {version - 1}
            expected = (batch["next", "observation"] - norm.loc["observation"]) / norm.scale["observation"]
            torch.testing.assert_close(batch["next", "normalised"], expected)
            trained.rollout(50, break_when_any_done=False)
            mark(policy, version)
            collector.update_policy_weights_(weights_dict={"policy": policy, NORM: norm})


@pytest.mark.parametrize("name", ["process", _soak("shared"), _soak("tcp")])
def test_a_collector_by_itself(name: str) -> None:
    trained = make_policy()
    scheme = SCHEMES[name](timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiver = copy.copy(scheme)
    connecting = threading.Thread(target=scheme.connect)
    connecting.start()
    collector = Collector(
        make_env,
        make_policy(),
        frames_per_batch=FRAMES,
        total_frames=FRAMES * (UPDATES + 1),
        weight_recv_schemes={"policy": receiver},
        worker_idx=0,
        track_policy_version=True,
    )
    connecting.join(PATIENCE)
    try:
        for version, batch in enumerate(collector, start=1):
            assert check(batch) == {version - 1}
            mark(trained, version)
            scheme.send()
    finally:
        collector.shutdown()
        receiver.close()
        scheme.close()


def test_a_worker_that_is_killed_is_named() -> None:
    policy = make_policy()
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    with collecting(MultiSyncCollector, policy, schemes, total_frames=-1) as collector:
        check(next(iter(collector)))
        os.kill(collector.procs[1].pid, signal.SIGKILL)
        collector.procs[1].join(PATIENCE)
        with pytest.raises(WorkerLostError) as caught:
            collector.update_policy_weights_()
        assert caught.value.workers == (1,)


def _make_narrow() -> Any:
    return TensorDictModule(torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["action"])


def test_what_does_not_fit_is_told_at_once() -> None:
    policy = make_policy()
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    with collecting(MultiSyncCollector, policy, schemes, total_frames=-1) as collector:
        iterator = iter(collector)
        check(next(iterator))
        with pytest.raises(KeyError, match=r"module\.weight"):
            collector.update_policy_weights_(_make_narrow())
        mark(policy, 1)
        collector.update_policy_weights_()
        assert check(next(iterator)) == {1}


@pytest.mark.parametrize("scheme", ["shared", "process"])
def test_buffers_that_state_dicts_leave_out(scheme: str) -> None:
    policy = TensorDictModule(Transient(), in_keys=["observation"], out_keys=["action", "marks"])
    bias = policy.module.net.bias.data
    schemes = {"policy": SCHEMES[scheme](timeout=PATIENCE)}
    with collecting(MultiSyncCollector, policy, schemes, total_frames=-1) as collector:
        iterator = iter(collector)

        def marks() -> list[list[float]]:
            return next(iterator)["marks"].reshape(-1, 2).unique(dim=0).tolist()  # type: ignore[no-any-return]

        bias.fill_(0)
        collector.update_policy_weights_()
        assert marks() == [[3, 0]]
        bias.fill_(1)
        policy.module.transient.fill_(4)
        collector.update_policy_weights_()
        assert marks() == [[4, 1]]
        bias.fill_(2)
        collector.update_policy_weights_(TensorDict(policy.state_dict(), []).unflatten_keys("."))
        assert marks() == [[4, 2]]
        policy.module.transient.fill_(5)
        collector.update_policy_weights_(TensorDict.from_module(policy))
        assert marks() == [[5, 2]]


@pytest.mark.soak
def test_the_trainers_memory_is_its_own() -> None:
    policy = make_policy()
    before = policy.module.net.weight.data_ptr()
    schemes = {"policy": sync.SharedMemWeightSyncScheme(timeout=PATIENCE)}
    with collecting(MultiSyncCollector, policy, schemes, total_frames=-1) as collector:
        iterator = iter(collector)
        check(next(iterator))
        mark(policy, 7)  # and not sent
        assert check(next(iterator)) == {0}
        assert policy.module.net.weight.data_ptr() == before
        assert not policy.module.net.weight.is_shared()


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["process", "shared"])
def test_an_evaluator_in_a_process(scheme: str) -> None:
    evaluated: list[Any] = []

    def metrics(batch: Any) -> dict[str, float]:
        evaluated.append(batch["marks"].unique().tolist())
        return {}

    evaluator = Evaluator(
        make_env,
        policy_factory=make_policy,
        num_trajectories=1,
        max_steps=20,
        backend="process",
        weight_sync_schemes={"policy": SCHEMES[scheme](timeout=PATIENCE)},
        metrics_fn=metrics,
    )
    try:
        policy = make_policy()
        for version in range(1, 5):
            mark(policy, version)
            evaluator.evaluate(weights=policy)
    finally:
        evaluator.shutdown()
    # torchrl's collector has a batch in hand when new weights come.
    assert evaluated[0] == [1]
    assert all(version - 1 <= max(found) <= version for version, found in enumerate(evaluated, start=1))


class _Refusing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(observation, self.weight).argmax(-1)

    def get_extra_state(self) -> dict[str, int]:
        return {"mood": int(self.weight[0, 0].item())}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if int(state["mood"]) == 13:
            raise ValueError("not on a Friday")


def test_a_refused_update_is_told_and_changes_nothing() -> None:
    policy = TensorDictModule(_Refusing(), in_keys=["observation"], out_keys=["action"])
    scheme = sync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    collector = MultiSyncCollector(
        [make_env] * 2,
        policy,
        frames_per_batch=FRAMES,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
    )
    try:
        next(iter(collector))
        torch.nn.init.constant_(policy.module.weight, 13.0)
        with pytest.raises(RemoteApplyError, match="Friday"):
            collector.update_policy_weights_()
        torch.nn.init.constant_(policy.module.weight, 14.0)
        collector.update_policy_weights_()
        assert set(scheme.worker_versions.values()) == {1}  # nobody has had the other
    finally:
        collector.shutdown()
