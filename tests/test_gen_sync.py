"""The generated twins are what the generator makes today, and what ruff accepts."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tools import gen_sync

NAMES = ["_generated_schemes.py", "_generated_updaters.py", "_generated_collectors.py"]


_generated = cache(gen_sync.generated)  # takes a second; bound here, since a test replaces the name


def test_the_committed_files_are_current() -> None:
    assert {name: (gen_sync.FOLDER / name).read_text() for name in NAMES} == _generated()


@pytest.mark.parametrize("which", NAMES)
def test_check_reports_what_is_out_of_date(
    which: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gen_sync, "generated", _generated)
    assert gen_sync.main([], tmp_path) == 0
    (tmp_path / which).write_text("old\n")
    assert gen_sync.main(["--check"], tmp_path) == 1
    assert "-old" in capsys.readouterr().out
    assert gen_sync.main([], tmp_path) == 0
    assert gen_sync.main(["--check"], tmp_path) == 0


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff_accepts_the_generated_files(command: list[str]) -> None:
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *NAMES]
    ended = subprocess.run(ruff, cwd=gen_sync.FOLDER, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert f"{len(NAMES)} files" in ended.stdout or "All checks passed" in ended.stdout


SIGNATURES = """
class Twin(Base):
    kept: Annotated = default

    def method(self, own: Parameter = DEFAULT, *, other: "int | None" = None) -> Returned:
        return helper(own, other)

    renamed = method
"""


def test_imports_are_those_of_the_names_that_are_written() -> None:
    found = set(gen_sync.used_names(ast.parse(SIGNATURES).body))
    assert found == {"Base", "Annotated", "default", "Parameter", "DEFAULT", "Returned", "helper"}


def test_a_name_is_imported_as_its_module_imports_it() -> None:
    known = gen_sync.imports_of("aiosync.schemes.tcp")
    assert known["TCPWeightSyncScheme"] == "from aiosync.schemes.tcp import TCPWeightSyncScheme"
    assert known["Unpack"] == "from typing import Unpack"
    with pytest.raises(AssertionError, match="Annotated is imported in several ways, or in none"):
        gen_sync.import_block(SIGNATURES, [])
