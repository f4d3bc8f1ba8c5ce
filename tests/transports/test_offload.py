"""Detached threads do their queued work, also if the process ends first."""

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aiosync.transports._offload import DetachedThread


def _leave(path: Path) -> None:
    """End with a word that is still to be said."""
    thread = DetachedThread("aiosync-test")
    thread.submit(lambda: time.sleep(0.3))
    thread.submit(lambda: path.write_text("said"))
    thread.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_says_its_last_word(method: str, tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_leave, args=(tmp_path / "word",))
    process.start()
    process.join(30)
    code = process.exitcode
    process.close()
    assert code == 0
    assert (tmp_path / "word").read_text() == "said"


def test_a_script_says_its_last_word(tmp_path: Path) -> None:
    code = (
        "import pathlib; from tests.transports.test_offload import _leave;"
        f"_leave(pathlib.Path({str(tmp_path / 'word')!r}))"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)
    assert (tmp_path / "word").read_text() == "said"
