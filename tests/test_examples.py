"""The examples that are started by hand, started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.clock import PATIENCE

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
        workers = [_start("tcp_worker.py", "--address", address) for _ in range(2)]
        said, complained = trainer.communicate(timeout=2 * PATIENCE)
        assert trainer.returncode == 0, complained
        assert "version 4 in" in said
        assert "joined 0" in said
        heard = [worker.communicate(timeout=2 * PATIENCE) for worker in workers]
        # One of them may have come too late; whoever was there has the last version.
        assert any("the end, at version 4: the sender has closed" in out for out, _ in heard), heard
    finally:
        trainer.kill()
        trainer.communicate()
