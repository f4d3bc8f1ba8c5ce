"""Which tests run in one process, and which of them start first.

The unit that pytest-xdist gives to a process is one test function with all its parameters. Tests that
share something expensive are one unit. A unit that takes long starts early, so that no process works alone
at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_WITH_RAY = "ray in parts"

_TOGETHER = {
    # At most two clusters of Ray run at a time, and each is started once.
    "tests/ray/test_ray.py": "ray",
    "tests/ray/test_twins.py": "ray",
    "tests/ray/test_ray_modules.py": _WITH_RAY,
    "tests/ray/test_collectors.py": _WITH_RAY,
    "tests/ray/test_conformance.py": _WITH_RAY,
    # The tests of each of these look at what one process has done.
    "tests/test_bench_smoke.py": "benchmark",
    "tests/test_gen_sync.py": "generator",
    "tests/test_import_side_effects.py": "imports",
}
"""File -> the unit that all its tests are in."""

_STARTS_RAY = ("test_async_actors_that_play", "test_demo_ends_with_a_table_and_a_picture[ray]")
"""Tests of programs that start a cluster of Ray. So do some blocks of the documentation."""

_APART = ("tests/test_examples.py", "tests/test_docs.py", "tests/test_cli.py", "tests/compat/")
"""Files and folders whose tests take seconds each: every test is a unit of its own."""

_LONG = (
    "tests/ray/",
    "tests/test_examples.py",
    "tests/test_bench_smoke.py",
    "tests/test_docs.py",
    "tests/compat/",
    "tests/test_cli.py",
    "tests/test_import_side_effects.py",
    "tests/transports/test_rpc.py",
    "tests/collectors/test_start.py",
    "tests/transports/test_offload.py",
    "tests/collectors/",
    "tests/sync/",
    "tests/transports/",
    "tests/conformance/test_g12_late_and_returning.py",
    "tests/conformance/",
)
"""What takes longest, in this order; everything else comes after it."""


def arrange(items: list[pytest.Item], root: Path) -> None:
    """Mark each test with its unit, and put the long ones first."""
    ranks = {}
    for item in items:
        path = item.path.relative_to(root).as_posix()
        ranks[item] = next((n for n, start in enumerate(_LONG) if path.startswith(start)), len(_LONG))
        name = item.name if path.startswith(_APART) else getattr(item, "originalname", item.name)
        # The group ends the test's id for pytest-xdist, which looks for the last "@".
        unit = _WITH_RAY if _starts_ray(item) else _TOGETHER.get(path, f"{path}::{name}").replace("@", " ")
        item.add_marker(pytest.mark.xdist_group(unit))
    items.sort(key=ranks.__getitem__)


def _starts_ray(item: pytest.Item) -> bool:
    blocks = getattr(getattr(item, "module", None), "BLOCKS", {})  # of tests/test_docs.py
    parameters = getattr(item, "callspec", None)
    block = blocks.get(parameters.params.get("where"), "") if parameters is not None else ""
    return item.name in _STARTS_RAY or "import ray" in block
