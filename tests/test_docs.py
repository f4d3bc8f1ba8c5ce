"""Every Python block of README and docs runs as it is pasted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

import aiosync
from aiosync import cli, errors
from tests.kit.clock import PROGRAM
from tests.kit.doc_surroundings import surrounded

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^(?:<!-- around: (\w+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(from|import) ", re.MULTILINE)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks() -> Iterator[tuple[str, str]]:
    """Each block as a program. A comment before a block says what it has to be put into to be one."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            around, block = found.groups()
            if not block.startswith("--8<--"):  # a file that has tests of its own
                line = text.count("\n", 0, found.start()) + 1
                yield f"{page.name}:{line}", surrounded(around, block) if around else block


BLOCKS = dict(blocks())


def test_there_are_blocks() -> None:
    assert any(where.startswith("README") for where in BLOCKS)


def test_what_is_not_run_is_no_python() -> None:
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text(encoding="utf-8")):
            language, block = fence.groups()
            assert language in {"python", "bash", "text"}, f"{page.name}: {language}"
            assert language == "python" or not IMPORT.search(block), f"{page.name}: {block}"


def test_commands_are_ones_that_there_are() -> None:
    command: Any = typer.main.get_command(cli.app)
    found = 0
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text(encoding="utf-8")):
            for line in fence[2].splitlines() if fence[1] == "bash" else ():
                name, *words = shlex.split(line, comments=True) or [""]
                if name == "aiosync" and words[1:] and words[0] != "bench":  # those have a test of their own
                    chosen = command.commands[words[0]]
                    with pytest.raises(typer.Exit) if "--help" in words else nullcontext():
                        chosen.make_context(words[0], words[1:])
                    found += 1
    assert found >= 3


@pytest.mark.parametrize("where", BLOCKS)
def test_block_runs_as_pasted(where: str, tmp_path: Path) -> None:
    script = tmp_path / "pasted.py"
    script.write_text(BLOCKS[where], encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
