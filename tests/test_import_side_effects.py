"""Importing aiosync changes nothing outside it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aiosync"
COMPAT = "aiosync.compat.torchrl"

AT_FORK = {
    "aiosync.receiver.commit_gate": "no child is to get a model half way through a commit",
    "aiosync.sync._portal": "a child has a portal of its own, since it has not the parent's thread",
    "aiosync.transports.sockets": "a child is not to keep its parent's connections open",
}
"""Modules that call os.register_at_fork, each with the reason. It cannot be undone, so it is done once, and
each callback does nothing in a process that does not use aiosync."""


def _sources() -> dict[str, ast.Module]:
    """Module -> its source, those that are in the package without being bundled."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "_bundled" not in parts:
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def _imports_of_others(source: ast.Module) -> Iterator[str]:
    """The statements that import what is not aiosync's, one name each."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (module or alias.name).partition(".")[0] not in ("aiosync", "__future__"):
                    yield (f"from {module} " if module else "") + f"import {alias.name}"


@cache
def _changed() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What importing each module of aiosync changes where its dependencies are imported already; and what
    importing the module for torchrl changes after that."""
    sources = _sources()
    dependencies = sorted(
        {statement for source in sources.values() for statement in _imports_of_others(source)}
    )
    steps = [[f"import {name}" for name in sources if name != COMPAT], [f"import {COMPAT}"]]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kit.outside"],
        input=json.dumps({"first": dependencies, "then": steps}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    package, compat = json.loads(ended.stdout.splitlines()[-1])
    return package, compat


def test_importing_every_module_changes_nothing_outside_the_package() -> None:
    package, _ = _changed()
    assert package["changed"] == []
    assert package["callbacks"] == [f"{name}: os.register_at_fork" for name in AT_FORK]


def test_the_modules_that_were_compared_are_those_of_the_package() -> None:
    package, _ = _changed()
    assert {name for name in package["new modules"] if not name.startswith("aiosync")} == set()
    optional = {"aiosync._demo", "aiosync.cli", "aiosync.metrics", COMPAT}
    assert set(_sources()) - set(package["new modules"]) <= optional


def test_the_module_for_torchrl_changes_what_its_documentation_says() -> None:
    pytest.importorskip("torchrl")
    _, compat = _changed()
    registry = "torchrl.weight_update.weight_sync_schemes._WEIGHT_SYNC_SCHEMES ["
    assert [change for change in compat["changed"] if not change.startswith(f"{registry}aiosync.")] == []
    assert f"{registry}aiosync.shared]" in compat["changed"]
    assert compat["callbacks"] == []


COMPILER = """
import json, sys
import torch.compiler, tensordict.nn
from tensordict import utils
from torch._dynamo import trace_rules

def where(value):
    code = getattr(value, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(type(value))

allowed = torch._C._functorch._add_batch_dim, torch._C._functorch._remove_batch_dim, torch._foreach_copy_
print(json.dumps({
    "sys.meta_path": [repr(finder) for finder in sys.meta_path if isinstance(finder, type)],
    "other finders": [type(finder).__qualname__ for finder in sys.meta_path if not isinstance(finder, type)],
    "sys.path_hooks": [where(hook) for hook in sys.path_hooks],
    "torch.compiler": {name: where(value) for name, value in sorted(vars(torch.compiler).items())},
    "torch._dynamo": where(torch._dynamo.allow_in_graph),
    "allowed in graphs": [*map(trace_rules.is_callable_allowed, allowed)],
    "how many": len(trace_rules._allowed_callable_ids()),
    "constant": utils._lock_warn._dynamo_marked_constant,
}))
"""


def _prints(script: str) -> dict[str, object]:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def test_torch_compiler_and_the_import_system_are_as_torch_and_tensordict_leave_them() -> None:
    plain = _prints(COMPILER)
    assert _prints(f"import aiosync\n{COMPILER}") == plain
    assert plain["allowed in graphs"] == [True] * 3
