"""torchrl's collectors over torch.distributed, torch RPC and Ray, with the twins for its schemes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torchrl")

from aiosync import sync
from tests.compat.policies import FRAMES, check, make_env, make_policy, mark
from tests.kit.clock import PATIENCE

UPDATES = 50


def run_distributed() -> None:
    """By ranks of torch.distributed."""
    module = importlib.import_module("torchrl.collectors.distributed")
    _run(
        module.DistributedCollector,
        sync.DistributedWeightSyncScheme(timeout=PATIENCE),
        launcher="mp",
        backend="gloo",
    )


def run_tcp() -> None:
    """Ranks of torch.distributed whose weights come over TCP."""
    module = importlib.import_module("torchrl.collectors.distributed")
    _run(
        module.DistributedCollector, sync.TCPWeightSyncScheme(timeout=PATIENCE), launcher="mp", backend="gloo"
    )


def run_rpc() -> None:
    """By calls of torch RPC."""
    module = importlib.import_module("torchrl.collectors.distributed")
    _run(module.RPCCollector, sync.RPCWeightSyncScheme(timeout=PATIENCE), launcher="mp")


def run_ray() -> None:
    """In Ray's actors."""
    from tests.ray.hosts import cluster

    module = importlib.import_module("torchrl.collectors.distributed")
    remote = {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}
    with cluster():
        _run(module.RayCollector, sync.RayWeightSyncScheme(timeout=PATIENCE), remote_configs=remote)


def _run(kind: Any, scheme: sync.WeightSyncScheme, **options: Any) -> None:
    collectors: Any = importlib.import_module("torchrl.collectors")
    policy, version = make_policy(), 0
    collector = kind(
        [make_env] * 2,
        policy,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * UPDATES,
        collector_class=collectors.Collector,
        weight_sync_schemes={"policy": scheme},
        sync=False,
        collector_kwargs={"track_policy_version": True},
        **options,
    )
    seen: set[int] = set()
    for version, batch in enumerate(collector, start=1):
        seen |= check(batch)
        mark(policy, version)
        collector.update_policy_weights_()
    assert version == UPDATES
    assert max(seen) >= UPDATES - 4, seen
    assert len(seen) >= UPDATES // 4, seen
    collector.shutdown()
    sys.stdout.write("frames are right")


# A process of its own each: torch.distributed and torch RPC can be left in one only at its end.
@pytest.mark.parametrize(
    "how",
    ["distributed", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tcp", "rpc", "ray"))],
)
def test_every_frame_claims_the_version_that_acted(how: str) -> None:
    if how == "ray":
        pytest.importorskip("ray")
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compat.test_many_hosts", how],
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE,
        check=False,
        env=environment,
    )
    assert done.returncode == 0 and "frames are right" in done.stdout, done.stdout + done.stderr


if __name__ == "__main__":
    globals()[f"run_{sys.argv[1]}"]()
