"""The examples that are started by hand, started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.clock import PATIENCE, PROGRAM

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def _start(name: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / name), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AIOSYNC_TOKEN": "a token of the tests"},
    )


def test_trainer_and_workers_in_terminals_of_their_own(tmp_path: Path) -> None:
    address = f"unix://{tmp_path / 'socket'}"
    trainer = _start("tcp_trainer.py", "--address", address, "--updates", "4", "--pause", "0.3")
    try:
        assert trainer.stdout is not None
        assert "waiting for the first worker" in trainer.stdout.readline()
        workers = [_start("tcp_worker.py", "--address", address, "--reconnect-for", "1") for _ in range(2)]
        said, complained = trainer.communicate(timeout=PROGRAM)
        assert trainer.returncode == 0, complained
        assert "version 4 in" in said
        assert "joined 0" in said
        heard = [worker.communicate(timeout=PROGRAM) for worker in workers]
        # One of them may have come too late. Those that were connected have looked for another trainer.
        connected = [(out, complained) for out, complained in heard if "acting with version" in out]
        assert any("acting with version 4" in out for out, _ in connected), heard
        assert all("the sender lost: the sender has closed" in text for _, text in connected), heard
    finally:
        trainer.kill()
        trainer.communicate()


def _torchrun(*args: str) -> str:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
            *("--nproc-per-node", "4"),
            *(str(EXAMPLES / "torchrun_trainer.py"), "--trainers", "2", *args),
        ],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_trainers_and_workers_under_torchrun() -> None:
    bits = _torchrun("--no-sync").split("losses' hash: ")[1].split()[0]
    for how in ([], ["--apart"]):
        said = _torchrun(*how)
        for worker in (0, 1):
            assert f"worker {worker} has acted with" in said
        assert said.count("the last is 200") == 2
        # The trainers' own process group is beside it, and their losses are the same to the bit.
        assert f"losses' hash: {bits}" in said


def test_async_actors_that_play() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_actors.py"), "--updates", "10"],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "version 10: return" in ran.stdout


@pytest.mark.soak
def test_a_script_of_torchrls_users() -> None:
    pytest.importorskip("torchrl")
    learner = _start("classic_collector.py", "--updates", "5", "--frames", "400")
    said, complained = learner.communicate(timeout=PROGRAM)
    assert learner.returncode == 0, complained
    assert "update 5: mean return" in said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ppo_with_both_kinds_of_batches(mode: str, tmp_path: Path) -> None:
    picture = tmp_path / "ppo.png"
    learner = _start("async_ppo.py", "--mode", mode, "--seeds", "1", "--updates", "12", "--out", str(picture))
    said, complained = learner.communicate(timeout=PROGRAM)
    assert learner.returncode == 0, complained
    assert "seed 0: return" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ppo_learns(mode: str, tmp_path: Path) -> None:
    learner = _start("async_ppo.py", "--mode", mode, "--seeds", "5", "--out", str(tmp_path / "ppo.png"))
    said, complained = learner.communicate(timeout=20 * PATIENCE)
    assert learner.returncode == 0, complained
    assert "4 of 5 seeds came to 450" in said or "5 of 5 seeds came to 450" in said


def test_slow_environments() -> None:
    player = _start("async_envs.py", "--frames", "1600")
    said, complained = player.communicate(timeout=PROGRAM)
    assert player.returncode == 0, complained
    assert "3200 would be ideal" in said
