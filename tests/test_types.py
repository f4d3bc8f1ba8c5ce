"""What type checkers say of programs that use the package."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from aiosync.collectors import (
    BatchConfig,
    DeviceConfig,
    PolicyConfig,
    ProcessConfig,
    ReplayConfig,
    WeightConfig,
    options,
)

ROOT = Path(__file__).resolve().parents[1]

PROGRAMS = ROOT / "tests" / "typed"


def test_pyright_finds_the_mistakes_and_nothing_else(tmp_path: Path) -> None:
    """As mypy must, which reads the same programs with all other files."""
    pytest.importorskip("basedpyright")
    config = {
        "include": [str(PROGRAMS)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",  # a comment that hides a remark on style is not unnecessary
        "enableTypeIgnoreComments": True,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error",
         "--pythonpath", sys.executable, "-p", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode in (0, 1), found.stdout + found.stderr
    result = json.loads(found.stdout)
    assert result["summary"]["filesAnalyzed"] == len(list(PROGRAMS.glob("*.py")))
    assert [each for each in result["generalDiagnostics"] if each["severity"] == "error"] == []


@pytest.mark.parametrize(
    ("config", "typed"),
    [
        (BatchConfig, options.BatchOptions),
        (PolicyConfig, options.PolicyOptions),
        (DeviceConfig, options.DeviceOptions),
        (ProcessConfig, options.ProcessOptions),
        (WeightConfig, options.WeightOptions),
        (ReplayConfig, options.ReplayOptions),
    ],
)
def test_the_keywords_of_collectors_are_those_of_their_configuration(config: type, typed: type) -> None:
    names = {each.name for each in dataclasses.fields(config)}
    hints = typing.get_type_hints(config)
    assert typing.get_type_hints(typed) == {name: hints[name] for name in names}
    assert typing.get_type_hints(options.CollectorOptions).keys() >= names
