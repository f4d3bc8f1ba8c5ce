"""Every Python block of README and docs runs as it is pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiosync
from aiosync import errors
from tests.kit.clock import PROGRAM

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if not found[1].startswith("--8<--"):  # a file that has tests of its own
                line = text.count("\n", 0, found.start()) + 1
                yield f"{page.name}:{line}", found[1]


BLOCKS = dict(blocks())


def test_there_are_blocks() -> None:
    assert any(where.startswith("README") for where in BLOCKS)


@pytest.mark.parametrize("where", BLOCKS)
def test_block_runs_as_pasted(where: str, tmp_path: Path) -> None:
    script = tmp_path / "pasted.py"
    script.write_text(BLOCKS[where], encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: aiosync\.(\w+)$", page, re.MULTILINE))
    in_errors = set(errors.__all__)
    public = {name for name in aiosync.__all__ if not name.startswith("__")}
    assert public - in_errors == documented - {"errors", "updaters", "metrics", "timeline"}


def test_troubleshooting_has_every_error() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name in errors.__all__ if name.endswith("Error") and name not in page] == []
