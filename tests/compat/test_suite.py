"""A folder of tests in torchrl's names alone, run as they are and with the twins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl")

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "torchrl_suite.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_what_passes_with_torchrls_schemes_passes_with_the_twins() -> None:
    done = _run("tests/compat/suite", "-q")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_what_fails_only_with_the_twins_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_peers.py").write_text(
        "from torchrl.weight_update import SharedMemWeightSyncScheme\n"
        "def test_both():\n    assert SharedMemWeightSyncScheme\n"
        "def test_torchrls_alone():\n    assert SharedMemWeightSyncScheme.__module__.startswith('torchrl')\n"
        "def test_twins_alone():\n    assert SharedMemWeightSyncScheme.__module__.startswith('aiosync')\n"
    )
    done = _run(str(tmp_path), "-q")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 tests; 2 pass as they are, 1 of these with the twins" in done.stdout
    lost, gained = done.stdout.split("only without the twins:")[1].split("only with them:")
    assert "test_torchrls_alone" in lost and "test_twins_alone" in gained


def test_no_folder() -> None:
    done = _run("nowhere")
    assert done.returncode == 2 and "FOLDER" in done.stdout
