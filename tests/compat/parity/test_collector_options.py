"""The options of collectors: the same lines with torchrl's classes and with ours."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

pytest.importorskip("torchrl")

from torchrl import collectors as theirs

from aiosync.sync import SharedMemWeightSyncScheme
from aiosync.sync import collectors as ours
from tests.compat.policies import make_env, make_policy, mark

pytestmark = pytest.mark.filterwarnings("ignore")
ENVS = [make_env] * 2

# torchrl's default where that is None, and values that torchrl takes for "no limit" or ignores.
NONE: dict[str, Any] = dict.fromkeys(
    [
        "compile_policy",
        "cudagraph_policy",
        "device",
        "env_device",
        "num_threads",
        "policy_device",
        "policy_factory",
        "postproc",
        "preemptive_threshold",
        "replay_buffer",
        "split_trajs",
        "storing_device",
        "trust_policy",
        "use_buffers",
        "weight_recv_schemes",
        "weight_sync_schemes",
        "weight_updater",
        "worker_idx",
        "cat_results",
        "create_env_kwargs",
        "init_fn",
        "init_random_frames",
        "max_frames_per_traj",
        "total_frames",
    ]
)
NO_LIMIT = {"total_frames": -5, "max_frames_per_traj": -1, "init_random_frames": -1, "num_workers": 5}


@contextmanager
def running(module: Any, sync: bool, *args: Any, **options: Any) -> Iterator[Any]:
    """A collector that has started its workers: torchrl's constructor starts them."""
    made = (module.MultiSyncCollector if sync else module.MultiAsyncCollector)(*args, **options)
    try:
        if module is ours:
            made.connect()
        yield made
    finally:
        made.shutdown()


def both(lines: Callable[[Any], Any]) -> Any:
    """Run the same lines with both libraries; returns the result, which has to be the same."""
    expected, found = lines(theirs), lines(ours)
    assert found == expected
    return found


def kind_of_error(call: Callable[[], Any], *kinds: type[Exception]) -> set[str]:
    """Which of the kinds of errors a caller could catch."""
    with pytest.raises(Exception) as caught:
        call()
    return {kind.__name__ for kind in kinds if isinstance(caught.value, kind)}


@pytest.mark.parametrize("sync", [True, False])
def test_none_and_values_without_a_limit(sync: bool) -> None:
    def lines(module: Any) -> Any:
        found: list[Any] = []
        before = torch.get_num_threads()
        policy = make_policy()
        options = NONE | NO_LIMIT if sync else NONE
        with running(module, sync, ENVS, policy, frames_per_batch=15, **options) as collector:
            found.append(torch.get_num_threads() == max(1, before - 2))
            found.append(collector.num_workers)
            batches = iter(collector)
            data = next(batches)
            found.append(tuple(data.shape))
            found.append(("collector", "mask") in data.keys(True))
            weights = TensorDict.from_module(policy).data.clone()
            weights["module", "first"].fill_(1)
            collector.update_policy_weights_(weights, model_id=None, worker_ids=None)
            collector.update_policy_weights_(weights=weights)
            collector.update_policy_weights_(policy=policy)
            collector.update_policy_weights_(policy_weights=weights)
            collector.update_policy_weights_(weights_dict={"policy": policy}, worker_ids=[0, 1])
            mark(policy, 2)  # torchrl's policy shares its memory with the workers: the last update sets it
            collector.update_policy_weights_()
            found.append(
                {float(mark) for _ in range(6) for mark in next(batches)["marks"].unique()} - {0.0, 1.0}
            )
            for wrong in (
                {"weights": weights, "policy": policy},
                {"policy_or_weights": weights, "policy": policy},
                {"policy_or_weights": weights, "weights": weights},
                {"policy_or_weights": weights, "weights_dict": {"policy": weights}},
                {"model_id": "policy", "weights_dict": {"policy": weights}},
                {"weights": weights, "model_id": "value"},
            ):
                kind = KeyError if wrong.get("model_id") == "value" else ValueError
                found.append(kind_of_error(partial(collector.update_policy_weights_, **wrong), kind))
            found.append(collector.get_model("policy") is policy)
        torch.set_num_threads(before)
        return found

    assert both(lines)[3] is False


def test_a_collector_without_a_policy() -> None:
    def lines(module: Any) -> Any:
        found: list[Any] = []
        with running(
            module, True, ENVS, frames_per_batch=[3, 3], cat_results=-1, total_frames=6
        ) as collector:
            found.append([tuple(data.shape) for data in collector])
            found.append(kind_of_error(lambda: collector.get_model("policy"), ValueError))
            found.append(kind_of_error(collector.update_policy_weights_, RuntimeError))
        return found

    assert both(lines) == [[(6,)], {"ValueError"}, {"RuntimeError"}]


LOCK = threading.Lock()


def _updater() -> Any:
    return ours  # never called: the arguments are refused before


@pytest.mark.parametrize(
    ("sync", "options", "kind"),
    [
        (True, {"split_trajs": True, "reset_when_done": False}, RuntimeError),
        (True, {"weight_updater": _updater, "weight_sync_schemes": {"policy": None}}, TypeError),
        (True, {"preemptive_threshold": 1.5}, ValueError),
        (True, {"preemptive_threshold": -0.5}, ValueError),
        (True, {"frames_per_batch": [3]}, ValueError),
        (True, {"create_env_kwargs": [{}]}, ValueError),
        (True, {"device": ["cpu"]}, RuntimeError),
        (True, {"storing_device": ["cpu"] * 3}, RuntimeError),
        (False, {"cat_results": 0}, ValueError),
        (True, {"cat_results": "cat"}, ValueError),
        (True, {"create_env_fn": [lambda: (LOCK, make_env())[1]] * 2}, RuntimeError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_refused_when_a_collector_is_made(
    sync: bool, options: dict[str, Any], kind: type[Exception]
) -> None:
    given = {"create_env_fn": ENVS, "policy": make_policy(), "frames_per_batch": 20} | options
    name = "MultiSyncCollector" if sync else "MultiAsyncCollector"
    both(lambda module: kind_of_error(lambda: getattr(module, name)(**given), kind))


def test_an_empty_mapping_of_schemes_is_the_default() -> None:
    def lines(module: Any) -> Any:
        policy = make_policy()
        with running(module, True, ENVS, policy, frames_per_batch=20, weight_sync_schemes={}) as collector:
            mark(policy, 1)
            collector.update_policy_weights_()
            return next(iter(collector))["marks"].unique().tolist()

    assert both(lines) == [1]


def test_frames_that_workers_do_not_divide() -> None:
    def lines(module: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = module.MultiSyncCollector(ENVS, make_policy(), frames_per_batch=7)
            if module is ours:
                made.connect()
        try:
            data = next(iter(made))
            return any("frames_per_batch" in str(each.message) for each in caught), tuple(data.shape)
        finally:
            made.shutdown()

    assert both(lines) == (True, (2, 4))


@pytest.mark.parametrize("join", ["stack", -1])
def test_an_interrupted_batch_has_a_frame_of_each_worker(join: Any) -> None:
    def lines(module: Any) -> Any:
        options = {"frames_per_batch": 400, "preemptive_threshold": 0.0, "cat_results": join}
        with running(module, True, ENVS, make_policy(), **options) as collector:
            data = next(iter(collector))
        mask, ids = data.get(("collector", "mask"), None), data["collector", "traj_ids"]
        if mask is None:
            return 2 <= data.numel() < 400, bool((ids >= 0).all())
        return bool((mask == (ids != -1)).all()), mask[:, 0].tolist()

    expected = (True, [True, True]) if join == "stack" else (True, True)
    assert both(lines) == expected


def test_a_scheme_of_ours_in_place_of_the_default() -> None:
    def lines(module: Any) -> Any:
        policy = make_policy()
        schemes = {"policy": SharedMemWeightSyncScheme()}
        with running(
            module, True, ENVS, policy, frames_per_batch=20, weight_sync_schemes=schemes
        ) as collector:
            mark(policy, 1)
            collector.update_policy_weights_()
            return next(iter(collector))["marks"].unique().tolist()

    assert both(lines) == [1]


@pytest.mark.parametrize("compact", [True, False])
def test_frames_without_the_next_observations(compact: bool) -> None:
    def lines(module: Any) -> list[str]:
        options = {"frames_per_batch": 20, "total_frames": 20, "compact_obs": compact}
        with running(module, True, ENVS, None, **options) as collector:
            for batch in collector:
                return sorted(map(str, batch["next"].keys(True, True)))
        raise AssertionError("no batch")

    found = set(lines(theirs)), set(lines(ours)) - {"policy_version"}  # ours tags frames by default
    assert found[0] == found[1]
    assert ("observation" in found[1]) is not compact


def _recurrent() -> Any:
    from torchrl.modules import GRUModule

    keys = {"in_keys": ["observation", "state", "is_init"], "out_keys": ["hidden", ("next", "state")]}
    gru = GRUModule(input_size=4, hidden_size=3, **keys)
    head = TensorDictModule(_Head(), in_keys=["hidden"], out_keys=["action"])
    return TensorDictSequential(gru, head)


class _Head(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.sum(-1) > 0).long()


def test_a_recurrent_policy_gets_its_transforms() -> None:
    def lines(module: Any) -> tuple[Any, ...]:
        options = {"frames_per_batch": 40, "total_frames": 40, "auto_register_policy_transforms": True}
        with running(module, True, ENVS, _recurrent(), **options) as collector:
            (batch,) = list(collector)
        first = batch["is_init"].view(-1)
        # The first step of each episode begins with the initial state, the others with the last one's.
        assert not batch["state"].reshape(40, -1)[first].any()
        later = ~batch["is_init"][:, 1:].squeeze(-1)
        assert torch.equal(batch["state"][:, 1:][later], batch["next", "state"][:, :-1][later])
        return batch["state"].shape, bool(first[0]), bool(batch["state"].any())

    assert both(lines)[1:] == (True, True)
