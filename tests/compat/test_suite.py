"""tools/torchrl_suite.py: which names mean the twins, what it reports, its exit status."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "torchrl_suite.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module."""
    monkeypatch.syspath_prepend(TOOL.parent)
    return importlib.import_module("torchrl_suite")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=ROOT)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["weight_update", "multi", "serving"])
def test_what_passes_with_torchrls_schemes_passes_with_the_twins(name: str) -> None:
    done = _run(f"tests/compat/suite/test_{name}.py", "-q", "--timeout", "120")
    assert done.returncode == 0, done.stdout + done.stderr


KINDS = """
import os
from torchrl.weight_update import SharedMemWeightSyncScheme

class TestSharedMemWeightSyncScheme:
    def test_sharedmem_flow(self):
        assert SharedMemWeightSyncScheme.__module__.startswith("torchrl")

def test_both():
    assert SharedMemWeightSyncScheme

def test_torchrls_alone():
    assert SharedMemWeightSyncScheme.__module__.startswith("torchrl"), "a twin"

def test_twins_alone():
    assert SharedMemWeightSyncScheme.__module__.startswith("aiosync")

def test_private():
    assert SharedMemWeightSyncScheme()._sender_transports is None

def test_ends_the_process():
    if SharedMemWeightSyncScheme.__module__.startswith("aiosync"):
        os._exit(1)

def test_after_that():
    assert SharedMemWeightSyncScheme
"""


def test_each_kind_of_test_is_reported_apart(tmp_path: Path) -> None:
    (tmp_path / "test_kinds.py").write_text(KINDS)
    done = _run(str(tmp_path), "-q")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "7 tests; 6 pass as they are, 2 of these with the twins" in done.stdout, done.stdout
    _, report = done.stdout.split("weights that were not sent;")
    not_sent, report = report.split("read a private attribute")
    private, report = report.split("only with the twins:")
    gained, lost = report.split("LOST")
    assert (
        "::TestSharedMemWeightSyncScheme::test_sharedmem_flow\n" in not_sent and "without send()" in not_sent
    )
    assert "::test_private\n" in private
    assert "SharedMemWeightSyncScheme._sender_transports" in private
    assert "::test_twins_alone\n" in gained
    assert "::test_torchrls_alone\n" in lost and "failed: AssertionError: a twin" in lost
    assert "::test_ends_the_process\n" in lost and "did not end" in lost


WAYS = """
import importlib, multiprocessing, operator, subprocess, sys
import pytest

NAMES = [
    "torchrl.weight_update.SharedMemWeightSyncScheme",
    "torchrl.weight_update.MultiProcessWeightSyncScheme",
    "torchrl.weight_update.NoWeightSyncScheme",
    "torchrl.weight_update.DistributedWeightSyncScheme",
    "torchrl.weight_update.RPCWeightSyncScheme",
    "torchrl.weight_update.RayWeightSyncScheme",
    "torchrl.weight_update.RayModuleTransformScheme",
    "torchrl.weight_update._shared.SharedMemWeightSyncScheme",
    "torchrl.weight_update._mp.MultiProcessWeightSyncScheme",
    "torchrl.weight_update._ray.RayWeightSyncScheme",
    "torchrl.collectors._multi_base.SharedMemWeightSyncScheme",
    "torchrl.collectors._multi_base.MultiProcessWeightSyncScheme",
    "torchrl.collectors._evaluator.MultiProcessWeightSyncScheme",
    "torchrl.collectors.distributed.generic.DistributedWeightSyncScheme",
]

def which(name):
    module, name = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), name).__module__.split(".")[0]

@pytest.mark.parametrize("name", NAMES)
def test_name(name):
    assert which(name) == "aiosync"

@pytest.mark.parametrize("backend", [
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"])
def test_backend(backend):
    from torchrl.weight_update import WeightSyncScheme
    made = WeightSyncScheme.from_backend(backend)
    assert type(made).__module__.startswith("aiosync") and isinstance(made, WeightSyncScheme)
    assert WeightSyncScheme.__module__.startswith("torchrl")

def test_names_that_keep_their_meaning():
    from torchrl.modules.inference_server import _server
    from torchrl.weight_update import MultiProcessWeightSyncScheme
    assert _server.SharedMemWeightSyncScheme.__module__.startswith("torchrl")
    assert isinstance(MultiProcessWeightSyncScheme(), _server.SharedMemWeightSyncScheme)
    assert which("torchrl.collectors.distributed.ray.RayWeightSyncScheme") == "torchrl"

def test_in_a_worker():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(which, (NAMES[10],)) == "aiosync"

def test_a_collectors_default():
    from torchrl.collectors import MultiSyncCollector
    from tensordict.nn import TensorDictModule
    from torch.nn import Linear
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
    policy = TensorDictModule(Linear(7, 7), in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector(
        [ContinuousActionVecMockEnv], policy, frames_per_batch=8, total_frames=16)
    try:
        assert type(collector._weight_sync_schemes["policy"]).__module__.startswith("aiosync")
        next(iter(collector))
        collector.update_policy_weights_()
    finally:
        collector.shutdown()
"""


def test_every_way_to_a_scheme_gives_a_twin(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "test_ways.py"
    file.write_text(WAYS)
    done = tool.run([str(file), "-q"], twins=True)
    assert {name: outcome for name, outcome in done.outcomes.items() if outcome[0] != "passed"} == {}
    assert len(done.outcomes) == 26 and done.statuses == [0]


def _ended(tool: Any, **outcomes: str) -> Any:
    run = tool.Run()
    run.statuses = [0]
    for test, outcome in outcomes.items():
        run.note(f"test_x.py::{test}", outcome, "why")
    return run


@pytest.mark.parametrize(
    ("before", "after", "status", "said"),
    [
        ({"a": "passed"}, {"a": "passed"}, 0, "1 tests; 1 pass as they are, 1 of these with the twins"),
        ({"a": "passed"}, {"a": "failed"}, 1, "failed: why"),
        ({"a": "passed"}, {"a": "skipped"}, 1, "skipped: why"),
        ({"a": "passed"}, {"a": "begun"}, 1, "did not end"),
        ({"a": "passed"}, {}, 1, "did not run"),
        ({"a": "passed", "b": "passed"}, {"a": "private", "b": "passed"}, 0, "read a private attribute"),
        ({"a": "failed", "b": "passed"}, {"a": "failed", "b": "passed"}, 0, "2 tests; 1 pass as they are"),
        ({"a": "failed"}, {"a": "passed"}, 2, "nothing passes as it is"),
        ({}, {}, 2, "nothing passes as it is"),
    ],
)
def test_exit_status(
    tool: Any,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, str],
    after: dict[str, str],
    status: int,
    said: str,
) -> None:
    assert tool.compare(_ended(tool, **before), _ended(tool, **after)) == status
    assert said in capsys.readouterr().out


def test_an_incomplete_run_is_said(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = _ended(tool, a="passed"), _ended(tool, a="passed")
    after.statuses = [2]
    assert tool.compare(before, after) == 0
    assert "not all tests ran with the twins: pytest ended with 2" in capsys.readouterr().out


def test_the_worst_phase_of_a_test_counts_and_the_last_attempt(tool: Any) -> None:
    run = tool.Run()
    for outcome in ("begun", "passed", "failed", "passed"):
        run.note("a", outcome, "")
    assert run.of("a")[0] == "failed"
    for outcome in ("begun", "passed"):
        run.note("a", outcome, "")
    assert run.of("a")[0] == "passed"


def test_listed_tests_are_known_by_class_and_name(tool: Any) -> None:
    assert tool.listed("test/test_collectors.py::TestCollectorGeneric::test_update_weights[None-False-True]")
    assert tool.listed("test_collectors.py::TestPolicyFactory::test_update_weights[scheme_mp]") is None
    assert (
        tool.listed("test_collectors.py::TestCollectorGeneric::test_update_weights_shared_mem[True]") is None
    )


@pytest.mark.parametrize("arguments", [(), ("nowhere",), ("-k", "x"), ("nowhere::test",)])
def test_usage(arguments: tuple[str, ...]) -> None:
    done = _run(*arguments)
    assert done.returncode == 2 and "usage:" in done.stderr and "folder" in done.stderr


def test_help() -> None:
    done = _run("--help")
    assert done.returncode == 0
    assert "exit status: 0 nothing is lost, 1 a test is lost, 2 nothing could be compared" in done.stdout
    assert "TestCollectorGeneric::test_update_weights" in done.stdout
