"""The conformance suite with Ray's actors in the place of processes."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from tests import conformance
from tests.kit.cases import SchemeCase
from tests.ray.hosts import hosted, hosted_modules, start_in_an_actor

pytest.importorskip("ray")

RAY = [
    SchemeCase("ray", hosted, start=start_in_an_actor),
    SchemeCase("ray-modules", hosted_modules, start=start_in_an_actor),
]

for _path in sorted(Path(conformance.__file__).parent.glob("test_*.py")):
    if _path.stem != "test_cuda":
        _module = import_module(f"tests.conformance.{_path.stem}")
        _tests = {name: thing for name, thing in vars(_module).items() if name.startswith("test_")}
        # The others are of one scheme, or of none, and run where they are written.
        globals().update({name: t for name, t in _tests.items() if "case" in signature(t).parameters})


_UP_TO_THE_METHOD = {
    "test_parameters_keep_their_identity": "the method puts others in their place",
    "test_a_strategy_that_raises_half_way_is_taken_back": "the method is in the strategy's place",
    "test_how_a_commit_reaches_the_parameters": "the method says it, and commit='copy' is refused",
}
"""What does not hold for models that take weights by a method. What does instead: test_ray_modules.py."""


@pytest.fixture(params=RAY, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> SchemeCase:
    """Sender and workers wherever they can be."""
    found: SchemeCase = request.param
    if found.name == "ray-modules":
        copies = "commit" in request.node.callspec.params and request.node.callspec.params["commit"] == "copy"
        reason = _UP_TO_THE_METHOD.get(
            request.function.__name__, "commit='copy' is refused" if copies else ""
        )
        if reason:
            pytest.skip(reason)
    return found


process_case = case
