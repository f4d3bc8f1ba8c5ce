"""Collectors whose workers are collectors: torchrl's over torch.distributed, torch RPC and Ray.

Each test runs in a forked process of its own: torch.distributed can be left in one only at its end.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from tensordict import TensorDict
from torch import multiprocessing as mp
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.modules import RandomPolicy
from torchrl.testing.dist_utils import assert_no_new_python_processes, snapshot_python_processes

from tests.compat.suite.marking import FRAMES, fill, make_env, make_policy

INNER = [Collector, MultiSyncCollector, MultiAsyncCollector]
SECONDS = 100.0


def _forked(body: Callable[..., None], *arguments: Any) -> None:
    queue = mp.get_context("fork").Queue(1)
    before, began = snapshot_python_processes(), time.time()
    process = mp.get_context("fork").Process(target=_report, args=(queue, body, arguments))
    process.start()
    try:
        error = queue.get(timeout=SECONDS)
        assert error is None, error
    finally:
        process.join(10)
        if process.is_alive():
            process.terminate()
    assert_no_new_python_processes(baseline=before, baseline_time=began, timeout=20.0)


def _report(queue: Any, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    try:
        body(*arguments)
    except BaseException:
        queue.put(traceback.format_exc())
        raise
    else:
        queue.put(None)


def _kind(name: str) -> tuple[Any, dict[str, Any]]:
    module: Any = importlib.import_module("torchrl.collectors.distributed")
    options: dict[str, Any] = {"launcher": "mp"}
    if name in ("DistributedCollector", "DistributedSyncCollector"):
        options["backend"] = "gloo"
    if name == "RayCollector":
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        options = {"remote_configs": {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}}
    return getattr(module, name), options


def _updates(name: str, inner: Any, options: dict[str, Any], how: str) -> None:
    kind, always = _kind(name)
    policy = make_policy(1.0)
    weights = TensorDict.from_module(policy).lock_()
    given = {"policy_factory": _make_one} if how == "factory" else {"policy": policy}
    collector = kind(
        [make_env] * (1 if inner is MultiAsyncCollector else 2),
        collector_class=inner,
        frames_per_batch=FRAMES * 2,
        total_frames=FRAMES * 2 * 12,
        **{**always, **given, **options},
    )
    total, first, last = 0, None, None
    try:
        for batch in collector:
            total += batch.numel()
            first, last = batch if first is None else first, batch
            if total == batch.numel():
                fill(policy, 2.0)
                what = {"none": None, "module": policy}.get(how, weights)
                collector.update_policy_weights_(what)
    finally:
        collector.shutdown()
    assert total == FRAMES * 2 * 12 and first is not None and last is not None
    assert (first["mark"] == 1).all() and (first["stamp"] == 1).all()
    assert (last["mark"] == 2).all() and (last["stamp"] == 2).all()


def _make_one() -> Any:
    return make_policy(1.0)


@pytest.mark.parametrize("how", ["none", "module", "factory"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("name", ["DistributedCollector", "RPCCollector", "RayCollector"])
def test_updates_go_down(name: str, sync: bool, inner: Any, how: str) -> None:
    _forked(_updates, name, inner, {"sync": sync}, how)


@pytest.mark.parametrize("how", ["none", "module", "weights"])
def test_updates_of_a_synchronous_collector(how: str) -> None:
    _forked(_updates, "DistributedSyncCollector", Collector, {}, how)


def _no_weights(name: str) -> None:
    kind, always = _kind(name)
    policy = RandomPolicy(make_env().action_spec)
    collector = kind([make_env] * 2, policy, total_frames=FRAMES * 4, frames_per_batch=FRAMES, **always)
    assert sum(batch.numel() for batch in collector) == FRAMES * 4
    collector.shutdown()


@pytest.mark.parametrize(
    "name", ["DistributedCollector", "DistributedSyncCollector", "RPCCollector", "RayCollector"]
)
def test_a_policy_without_weights(name: str) -> None:
    _forked(_no_weights, name)
