"""What users can rely on stays as it is, whatever is moved or renamed inside the package."""

from __future__ import annotations

import ast
import difflib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiosync
from aiosync import errors
from tools.record_surface import RECORD, SCHEMES


def test_public_names_signatures_and_pickles_are_as_recorded() -> None:
    # In an interpreter of its own: Ray adds a parameter to the methods of its actors' classes.
    run = subprocess.run(
        [sys.executable, "-m", "tools.record_surface", "--print"],
        cwd=RECORD.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    recorded, now = RECORD.read_text(encoding="utf-8").splitlines(), run.stdout.splitlines()
    changes = list(difflib.unified_diff(recorded, now, "tests/surface.txt", "the package", lineterm="", n=0))
    assert not changes, "\n".join(
        ["if users are to see these changes: python tools/record_surface.py", *changes]
    )


def test_every_error_can_be_imported_from_the_package() -> None:
    raised = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert raised <= set(aiosync.__all__)


def test_the_package_knows_its_names_before_it_imports_them() -> None:
    source = ast.parse(Path(aiosync.__file__).read_text(encoding="utf-8"))
    (for_checkers,) = (node for node in source.body if isinstance(node, ast.If) and node.orelse == [] and
                       isinstance(node.test, ast.Name))  # fmt: skip
    imported = {
        alias.name: node.module
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {name: f"aiosync.{module}" for name, module in aiosync._MODULE_OF.items()}
    assert imported == lazy
    assert set(aiosync.__all__) == {*lazy, "__version__"}
    assert set(aiosync.__all__) <= set(dir(aiosync))


@pytest.mark.parametrize(
    "first",
    [
        "aiosync.WeightSyncScheme.from_backend('tcp')",
        "aiosync.errors.AiosyncError",
        "aiosync.collectors.MultiCollector",
        "aiosync.sync.SharedMemWeightSyncScheme.from_backend('ray_module')",
        "aiosync.TLSConfig",
        "aiosync.atomic",
    ],
)
def test_any_name_may_be_used_first(first: str) -> None:
    code = f"import aiosync, sys; assert 'torch' not in sys.modules; {first}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'TPCWeightSyncScheme'"):
        getattr(aiosync, "TPCWeightSyncScheme")  # noqa: B009 - for the message of a typo
    assert not hasattr(aiosync, "_nothing")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_pickled_scheme_comes_back_with_the_same_contents(name: str) -> None:
    scheme: Any = getattr(aiosync, name)(**SCHEMES[name])
    twin = pickle.loads(pickle.dumps(scheme))
    assert type(twin) is type(scheme)
    before, after = scheme.__getstate__(), twin.__getstate__()
    assert before.keys() == after.keys()
    assert before["spec"] == after["spec"]
    assert before["token"] == after["token"]
