"""One cluster for all tests here, and both event loops for the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.kit.loops import LOOPS
from tests.ray.hosts import cluster


@pytest.fixture(scope="package", autouse=True)
def _cluster() -> Iterator[None]:
    with cluster():
        yield


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio and uvloop; what Ray itself does is the same on both."""
    both = item.path.stem == "test_conformance"
    return LOOPS if both else {"asyncio": LOOPS["asyncio"]}


_IN_THE_SOAK = {
    "test_a_killed_worker_is_started_again",  # test_ray.py has Ray start actors again
    "test_all_are_killed",
    "test_stopped_and_continued",
    "test_a_scheme_that_is_used_again",
    "test_a_sender_that_is_quicker_than_the_store",
    "test_an_actor_more",
    "test_no_forward_pass_is_torn",
    "test_the_mixin_before_there_is_a_sender",
    "test_a_compiled_module_with_tied_weights",
    "test_buffers_and_frozen_parameters",
    "test_one_put_for_several_actors",
}
"""Each starts actors of its own, which takes seconds."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first scheme on one loop; the rest in the soak: what they do with a loop is the same, and modules
    have tests of their own."""
    ours = (item for item in items if item.path.parent.name == "ray" and isinstance(item, pytest.Function))
    for item in ours:
        late = item.originalname in _IN_THE_SOAK
        if item.path.stem == "test_conformance":
            late = late or "uvloop" in item.name or "ray-modules" in item.name
        if late:
            item.add_marker(pytest.mark.soak)
