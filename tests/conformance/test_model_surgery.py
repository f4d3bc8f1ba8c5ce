"""G13: what was applied is what the model computes with, whatever its owner has done to it since."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.surgery import Surgery

CASES = [case for case in SCHEMES if case.name in ("shared", "process", "tcp", "memory")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """OpenMP's threads do not survive a fork: a forked child that computes with several would hang."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _run(case: SchemeCase, commit: str, sequences: int, *, same_each_time: bool = False) -> None:
    factory: Any = lambda: Surgery(case, commit)  # noqa: E731
    run_state_machine_as_test(
        factory,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=15,
            derandomize=same_each_time,
            # Making a failing sequence shorter takes minutes: the soak does that.
            phases=(Phase.generate,) if same_each_time else tuple(Phase),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.parametrize("commit", ["flip", "copy"])
@pytest.mark.parametrize("surgical", CASES, ids=lambda case: case.name)
def test_surgery(surgical: SchemeCase, commit: str) -> None:
    _run(surgical, commit, 20, same_each_time=True)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("commit", ["flip", "copy"])
@pytest.mark.parametrize("surgical", CASES, ids=lambda case: case.name)
def test_much_surgery(surgical: SchemeCase, commit: str) -> None:
    _run(surgical, commit, int(os.environ.get("AIOSYNC_TEST_SEQUENCES", "2000")))
