"""The conformance suite with Ray's actors in the place of processes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests import conformance
from tests.kit.cases import SchemeCase
from tests.ray.hosts import cluster, hosted, start_in_an_actor

pytest.importorskip("ray")

RAY = [SchemeCase("ray", hosted, start=start_in_an_actor)]

for _path in sorted(Path(conformance.__file__).parent.glob("test_*.py")):
    if _path.stem != "test_cuda":
        _module = import_module(f"tests.conformance.{_path.stem}")
        globals().update({name: thing for name, thing in vars(_module).items() if name.startswith("test_")})


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with cluster():
        yield


@pytest.fixture(params=RAY, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> SchemeCase:
    """Sender and workers wherever they can be."""
    found: SchemeCase = request.param
    return found


process_case = case
