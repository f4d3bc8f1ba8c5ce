"""Workers are forked from a server that has torch imported; the program's own settings stay as they are."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import asyncio, functools, json, multiprocessing, os, sys
from multiprocessing import forkserver
from pathlib import Path

from aiosync.collectors import MultiCollector
from tests.collectors.worlds import Counting


def settings():
    return [multiprocessing.get_start_method(), list(forkserver._forkserver._preload_modules)]


def make_env():
    parent = os.getppid()
    Path(sys.argv[1], "parent").write_text(json.dumps([parent, Path(f"/proc/{parent}/maps").read_text()]))
    return Counting(0)


async def main():
    before = settings()
    async with MultiCollector([make_env], None, frames_per_batch=20):
        pass
    return os.getpid(), before, settings()


if __name__ == "__main__":
    PRELOAD
    print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads another process's maps")
@pytest.mark.parametrize("own", [None, ["json"]], ids=["the default list", "a list of the program's"])
def test_the_server_that_workers_are_forked_from(own: list[str] | None, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    preload = "" if own is None else f"multiprocessing.set_forkserver_preload({own})"
    script.write_text(PROGRAM.replace("PRELOAD", preload), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    trainer, before, after = json.loads(ended.stdout)
    assert after == before == [multiprocessing.get_all_start_methods()[0], own or ["__main__"]]
    parent, maps = json.loads((tmp_path / "parent").read_text())
    assert parent != trainer
    assert ("libtorch" in maps) == (own is None)
