"""Copies that are queued on a GPU, and whether it is idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aiosync.weights import devices
from aiosync.weights.copying import Pairs, queue_copy
from tests.kit.clock import PATIENCE
from tests.kit.models import occupy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda:0")
SHAPE = 8, 8


@pytest.fixture(params=["asked", "not asked"])
def symbol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether CUDA's function that says whether a stream captures can be called."""
    if request.param == "not asked":
        monkeypatch.setattr(devices, "_ask_for_capture", lambda: None)
    else:
        assert devices._ask_for_capture() is not None


def on(device: Any, value: float = 0) -> Tensor:
    return torch.full(SHAPE, value, device=device)


def pinned(value: float = 0) -> Tensor:
    return on("cpu", value).pin_memory()


def test_nothing_is_queued_for_the_cpu() -> None:
    assert queue_copy([]) is None
    assert queue_copy([(on("cpu"), on("cpu", 1))]) is None
    assert devices.are_idle([])


@needs_gpu
@pytest.mark.parametrize("priority", [None, 0, -1, -2, -3])
def test_a_gpu_is_idle_when_all_its_work_is_done(symbol: None, priority: int | None) -> None:
    """``priority``: of a stream that has work; None: the default stream."""
    devices.wait_for_devices([DEVICE])
    assert devices.are_idle([DEVICE])
    with torch.cuda.stream(None if priority is None else torch.cuda.Stream(DEVICE, priority)):
        occupy(str(DEVICE), 0.3)
    assert not devices.are_idle([DEVICE])
    devices.wait_for_devices([DEVICE])
    assert devices.are_idle([DEVICE])


@needs_gpu
@pytest.mark.parametrize(
    "pairs",
    [
        lambda: [(on(DEVICE), on(DEVICE, 1))] * 3,
        lambda: [(pinned(), on(DEVICE, 1)), (on(DEVICE), on(DEVICE, 1))],
        lambda: [(on(DEVICE), pinned(1))],
        lambda: [(on(DEVICE), on(DEVICE, 1).bfloat16())],
    ],
)
def test_a_copy_is_queued(pairs: Callable[[], Pairs]) -> None:
    made = pairs()
    devices.wait_for_devices([DEVICE])
    queued = queue_copy(made)
    assert queued is not None
    queued.wait()
    assert queued.are_done()
    assert all(bool((destination == 1).all()) for destination, _ in made)


@needs_gpu
@pytest.mark.parametrize(
    "pairs",
    [
        lambda: [(on("cpu"), on(DEVICE, 1))],  # not pinned: torch waits until it is copied
        lambda: [(on(DEVICE), on("cpu", 1))],
        lambda: [(pinned(), on(DEVICE, 1).double())],  # converted by the CPU
        lambda: [(pinned().T, on(DEVICE, 1))],
        lambda: [(on(DEVICE), on(DEVICE, 1)), (on("cpu"), on("cpu", 1))],
        lambda: [(on(DEVICE), on(DEVICE, 1)), (pinned(), on("cpu", 1))],
        lambda: [(on(DEVICE), on(DEVICE, 1)), (pinned(), pinned(1))],
        lambda: [(on(DEVICE), torch.ones(3, device=DEVICE))],  # the caller's next step refuses it
        lambda: [(on(DEVICE), on(DEVICE, 1))] * 1000,
    ],
)
def test_a_copy_that_would_block_is_not_queued(pairs: Callable[[], Pairs]) -> None:
    made = pairs()
    devices.wait_for_devices([DEVICE])
    assert queue_copy(made) is None
    assert not any(bool((destination == 1).any()) for destination, _ in made)


@needs_gpu
def test_a_capture_in_another_thread_goes_on(symbol: None) -> None:
    """A user's capture, which this package does not know of."""
    source, graph, begun, done = on(DEVICE, 1), torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    results: list[object] = []

    def use() -> None:
        begun.wait(PATIENCE)
        devices.wait_for_devices([DEVICE])
        results.append(devices.are_idle([DEVICE]))
        if (queued := queue_copy([(target, source)])) is not None:
            queued.wait()
        done.set()

    target, thread = on(DEVICE), threading.Thread(target=use)
    thread.start()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        doubled = source * 2
        begun.set()
        assert done.wait(PATIENCE)
    thread.join()
    assert results == [True]
    assert bool((target == 1).all())
    graph.replay()
    assert bool((doubled == 2).all())
