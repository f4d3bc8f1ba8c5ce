"""The benchmark in its smallest form, from the command line to the JSON file and the picture."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cli import CASES, app
from benchmarks.harness.meters import spread
from benchmarks.harness.results import Case, Key, Results, check_targets
from tests.kit.clock import PROGRAM

ROOT = Path(__file__).resolve().parents[1]


def _run(options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cli", *options.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run with the tiny model and one worker wrote."""
    folder = tmp_path_factory.mktemp("bench")
    options = (
        "send --models=tiny --workers=1 --schemes=shared --contenders=aiosync,torchrl --rounds=4 "
        f"--deadline=60 --json={folder}/bench.json --png={folder}/bench.png"
    )
    _run(options)
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    return found


def _case(outcome: dict[str, Any], contender: str) -> dict[str, Any]:
    (case,) = [c for c in outcome["cases"] if c["contender"] == contender]
    found: dict[str, Any] = case
    return found


def test_it_says_what_it_ran_on_and_how(outcome: dict[str, Any]) -> None:
    assert outcome["machine"]["cores"] >= 1
    assert outcome["machine"]["torch"].startswith("2.")
    assert outcome["settings"]["models"] == ["tiny"]
    assert outcome["models"]["tiny"] == {"params": 19978, "tensors": 6, "nbytes": 79912}
    assert outcome["notes"]


def test_it_measures_aiosync(outcome: dict[str, Any]) -> None:
    case = _case(outcome, "aiosync")
    assert case["error"] == ""
    assert case["status"] == "ok"
    assert case["key"] == {"model": "tiny", "scheme": "shared", "mode": "plain", "workers": 1}
    send = case["send"]
    assert send["count"] == len(case["samples"]) == 4 * 10
    assert case["first"]["count"] == 4
    assert 0 < send["min"] <= send["median"] <= send["max"]
    assert case["commit"]["count"] == 4 * 10
    assert case["verified"] is True
    assert case["stall"]["sender"]["count"] > 0
    assert case["stall"]["worker"]["count"] > 0


def test_it_counts_torn_reads(outcome: dict[str, Any]) -> None:
    reads = _case(outcome, "aiosync")["reads"]
    assert reads["reads"] >= 1_000
    assert reads["versions"] > 1
    assert (reads["torn"], reads["leaked"], reads["moved"], reads["skewed"]) == (0, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_it_measures_memory(outcome: dict[str, Any]) -> None:
    memory = _case(outcome, "aiosync")["memory"]
    assert memory["sender"] > 0
    assert memory["worker"] > 0
    assert memory["shared"] > 0


def test_it_measures_the_limit_and_compares(outcome: dict[str, Any]) -> None:
    limit = _case(outcome, "memcpy")["send"]["median"]
    (ratios,) = outcome["ratios"]
    expected = limit / _case(outcome, "aiosync")["send"]["median"]
    assert ratios["memcpy_over_aiosync"] == pytest.approx(expected)


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="torchrl is not installed")
def test_it_measures_torchrl_beside(outcome: dict[str, Any]) -> None:
    case = _case(outcome, "torchrl")
    assert case["status"] == "ok", case["error"]
    assert case["verified"] is True
    assert case["send"]["count"] == 40
    assert outcome["ratios"][0]["torchrl_over_aiosync"] > 0


def _results(aiosync_ms: float) -> Results:
    key = Key("tiny", "shared", "plain", 1)
    sizes = {"tiny": {"params": 1, "tensors": 1, "nbytes": 4}}
    return Results(
        machine={},
        settings={},
        notes=[],
        models=sizes,
        cases=[
            Case(key, "aiosync", send=spread([aiosync_ms / 1e3])),
            Case(key, "torchrl", send=spread([1e-3])),
        ],
    )


@pytest.mark.parametrize(("aiosync_ms", "reached"), [(0.4, True), (0.6, False)])
def test_a_target_is_reached_or_missed(aiosync_ms: float, reached: bool) -> None:
    (found,) = check_targets(_results(aiosync_ms))
    assert found.ok is reached
    assert found.want == ">= 2"
    assert found.got == pytest.approx(1.0 / aiosync_ms)


def test_a_contender_that_failed_is_a_missed_target() -> None:
    results = _results(0.4)
    results.cases[0].status, results.cases[0].error = "timeout", "round: no answer within 60 s"
    (broken,) = [c for c in check_targets(results) if not c.ok]
    assert "no answer within 60 s" in broken.what


def test_a_spread_of_nothing_is_none() -> None:
    assert spread([]) is None


def test_a_spread_is_in_milliseconds() -> None:
    found = spread([0.003, 0.001, 0.002])
    assert found is not None
    assert (found.count, found.median, found.min, found.max) == (3, 2.0, 1.0, 3.0)
    assert found.p99 == pytest.approx(2.98)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("send --models huge", "expected some of tiny, medium, large"),
        ("send --contenders torchlr", "expected some of aiosync, torchrl, torchrl-alias"),
        ("send --workers 0", "expected whole numbers of at least 1"),
        ("send --json no-such-folder/x.json", "expected a file in a folder that exists"),
        ("send --json .", "expected a file in a folder that exists"),
        ("send --png picture.doc", "expected a file named"),
        ("distributed --schemes rcp", "expected some of distributed, rpc"),
        ("distributed --models mediun", "expected some of tiny, medium, large"),
        ("ray --schemes actor", "expected some of actors, modules"),
        ("network --links udp", "expected some of tcp, unix, tls"),
        ("network --mib many", "expected whole numbers of at least 1"),
        ("collectors --schemes server", "expected some of sync, async, or --inside-torchrl"),
        ("sned", "No such command"),
    ],
)
def test_a_wrong_option_is_refused_before_the_work(options: str, message: str) -> None:
    refused = CliRunner().invoke(app, options.split(), env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert message in refused.output


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    options = ["relay", "--json", str(tmp_path / "x.json")]
    refused = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "expected a file that can be written" in refused.output


def test_every_case_is_a_command_with_help() -> None:
    listed = CliRunner().invoke(app, [])
    assert listed.exit_code == 2
    assert all(case in listed.output for case in CASES)
    for case in CASES:
        assert CliRunner().invoke(app, [case, "--help"]).exit_code == 0


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="torchrl is not installed")
@pytest.mark.parametrize("every", [0, 5])
def test_sends_to_acting_workers_are_timed(every: int, tmp_path: Path) -> None:
    path, short = tmp_path / "acting.json", "--workers=1 --threads=1 --rounds=1 --sends=20"
    _run(f"acting --schemes=process {short} --every={every} --json={path}")
    (found,) = json.loads(path.read_text(encoding="utf-8"))["acting"]
    for library in ("aiosync", "torchrl"):
        (turn,) = found[library]
        assert len(turn["seconds"]) == 20 and min(turn["seconds"]) > 0
        assert turn["forwards"] > 0 and turn["behind"] == 0


def test_receivers_of_a_small_model_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "fanout.json"
    _run(f"fanout --receivers=2 --rounds=1 --sends=5 --json={path}")
    for found in json.loads(path.read_text(encoding="utf-8"))["fanout"]:
        (turn,) = found["turns"]
        assert len(turn["cpu"]) == len(turn["seconds"]) == 5 and min(turn["cpu"]) > 0


def test_first_batches_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    _run(f"start --rounds=1 --json={path}")
    (found,) = json.loads(path.read_text(encoding="utf-8"))["start"]
    (turn,) = found["turns"]
    assert found["imports"][0] > 0 and turn["seconds"][0] > max(turn["seconds"][1:]) > 0


def test_cuda(tmp_path: Path) -> None:
    """On the CPU, so that the case itself is tested without a GPU."""
    path = tmp_path / "cuda.json"
    _run(f"cuda --device=cpu --models=tiny --workers=1 --rounds=1 --json={path}")
    found = json.loads(path.read_text(encoding="utf-8"))["cuda"]
    assert len(found) == 3
    assert all(row["send"]["median"] > 0 and row["torn reads"].startswith("0 of ") for row in found)


def test_requests_beside_updates_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    _run(f"serving --rounds=1 --seconds=1 --mebibytes=1 --clients=2 --json={path}")
    found = json.loads(path.read_text(encoding="utf-8"))
    turns = {(each["way"], each["updated"]): each["turns"][0] for each in found["serving"]}
    assert len(turns) == 6
    for (_, updated), turn in turns.items():
        assert 0 < turn["p50"] <= turn["p99"] and turn["requests"] > 0
        assert (turn["updates"] > 0) == updated
    (table,) = found["tables"]
    for row in table["rows"]:  # which is in milliseconds
        calm = turns[row["way"], False]
        assert row["p99, ms"]["median"] == pytest.approx(1e3 * calm["p99"])


def _wheel(folder: Path) -> Path:
    """What a wheel has of the benchmarks, where it has it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in included.items():
        if source.startswith("benchmarks"):
            there = folder / Path(target).relative_to("aiosync/_bundled")
            there.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, there)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs ``aiosync bench`` with no more of the benchmarks than a wheel has."""
    folder = _wheel(tmp_path_factory.mktemp("wheel"))

    def bench(options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.cli", *options.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=PROGRAM,
            check=False,
        )

    return bench


@pytest.mark.parametrize("case", ["network", "distributed", "ray", "collectors"])
def test_an_installed_package_says_what_it_cannot_compare(
    case: str, installed: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    refused = installed(f"{case} --rounds 1")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"aiosync bench {case} compares with other software: it is in aiosync's repository, and not in the "
        "installed package\n"
    )


def test_an_installed_package_measures_aiosync_beside_memcpy(
    installed: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    done = installed(f"send --models=tiny --workers=1 --schemes=shared --rounds=2 --json={path}")
    assert done.returncode == 0, done.stderr
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert [case["contender"] for case in cases] == ["memcpy", "aiosync"]
    assert [case["error"] for case in cases] == ["", ""]
    refused = installed("send --contenders=aiosync,torchrl")
    assert refused.returncode == 2
    assert "torchrl needs torchrl, and a checkout of aiosync's repository" in " ".join(
        refused.stderr.replace("│", " ").split()
    )


def test_collectors_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    options = f"collectors --models=cartpole --schemes=async --rounds=1 --total=1000 --json={tmp_path}/c.json"
    _run(options)
    (case,) = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["collectors"]
    (ours,), (theirs,) = case["aiosync"], case["torchrl"]
    assert ours["wrong"] == 0
    assert ours["total"] >= 1000 <= theirs["total"]
    for turn in (ours, theirs):
        assert all(turn[figure] > 0 for figure in ("frames", "update", "first", "memory"))
