"""A GPU that is busy, without one: what a send and a commit do while a device has not done what was queued.

The stand-in says that all tensors are on one device, and lets the test decide when that is done. With a real
GPU see test_cuda.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from aiosync import NotConnectedError, SyncTimeoutError
from aiosync.receiver import applier, staging
from aiosync.sender import publisher, slot_write, worker_group
from aiosync.transports import _offload
from aiosync.weights import binding
from tests.kit.cases import SchemeCase, named
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of

DEVICE = torch.device("cuda:0")
SHARED = SchemeCase("shared", named("shared"), views=True)


class Device:
    """Is busy until :meth:`finish`, which first runs the work that was queued."""

    def __init__(self) -> None:
        self._idle = threading.Event()
        self._idle.set()
        self._queue: list[Callable[[], object]] = []

    def occupy(self, *work: Callable[[], object]) -> None:
        self._queue += work
        self._idle.clear()

    def finish(self) -> None:
        while self._queue:
            self._queue.pop(0)()
        self._idle.set()

    def is_idle(self, devices: Collection[torch.device]) -> bool:
        return not devices or self._idle.is_set()

    def wait(self, devices: Collection[torch.device]) -> None:
        assert not devices or self._idle.wait(PATIENCE)


def _acts_on(worker: LocalWorker, version: int) -> bool:
    return bool(worker.scheme.version == version)


def all_on_device(tensors: Iterable[Tensor]) -> frozenset[torch.device]:
    return frozenset({DEVICE} if any(True for _ in tensors) else ())


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The trainer's weights are on it."""
    device = Device()
    monkeypatch.setattr(slot_write, "cuda_devices", all_on_device)
    monkeypatch.setattr(worker_group, "QUICK_COPY", -1)
    monkeypatch.setattr(_offload, "wait_for_devices", device.wait)
    for module in (_offload, publisher):
        monkeypatch.setattr(module, "are_idle", device.is_idle)
    yield device
    device.finish()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The workers' models are on it."""
    device = Device()
    for module in (staging, binding):
        monkeypatch.setattr(module, "cuda_devices", all_on_device)
    for module in (_offload, applier, staging):
        monkeypatch.setattr(module, "wait_for_devices", device.wait)
    monkeypatch.setattr(_offload, "are_idle", device.is_idle)
    yield device
    device.finish()


async def test_what_is_queued_is_sent_and_the_loop_runs_meanwhile(trainers: Device) -> None:
    async with LocalCluster(SHARED) as cluster:
        trainers.occupy(lambda: fill(cluster.model, 1))
        sending = asyncio.create_task(cluster.scheme.send())
        await asyncio.sleep(0.1)  # the loop runs
        assert not sending.done()
        assert [worker.scheme.version for worker in cluster.workers] == [0, 0]
        trainers.finish()
        await within(sending)
        assert [value_of(worker.model) for worker in cluster.workers] == [1, 1]


async def test_a_send_is_given_up_and_nothing_is_lost(trainers: Device) -> None:
    async with LocalCluster(SHARED) as cluster:
        for _ in range(5):  # more often than there are slots
            trainers.occupy(lambda: fill(cluster.model, 7))
            began = time.perf_counter()
            with pytest.raises(SyncTimeoutError, match="queued there before this call"):
                await cluster.scheme.send(timeout=0.05)
            assert time.perf_counter() - began < PATIENCE / 2
            trainers.finish()
        assert [value_of(worker.model) for worker in cluster.workers] == [0, 0]
        fill(cluster.model, 1)
        report = await cluster.scheme.send()
        assert [worker.scheme.version for worker in cluster.workers] == [report.version] * 2
        assert [value_of(worker.model) for worker in cluster.workers] == [1, 1]


async def test_a_send_can_be_cancelled(trainers: Device) -> None:
    async with LocalCluster(SHARED) as cluster:
        trainers.occupy()
        sending = asyncio.create_task(cluster.scheme.send())
        await asyncio.sleep(0.05)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(sending)
        trainers.finish()
        fill(cluster.model, 1)
        await cluster.scheme.send()
        assert [value_of(worker.model) for worker in cluster.workers] == [1, 1]


async def test_a_worker_answers_when_nothing_reads_the_version_before(workers: Device) -> None:
    """It acts on the new version at once, but the sender may not write over the one before."""
    async with LocalCluster(SHARED, workers=1) as cluster:
        (worker,) = cluster.workers
        for version in range(1, 5):
            workers.occupy()
            fill(cluster.model, version)
            sending = asyncio.create_task(cluster.scheme.send())
            await eventually(partial(_acts_on, worker, version), "the commit")
            assert value_of(worker.model) == version
            await asyncio.sleep(0.02)
            assert not sending.done()
            workers.finish()
            await within(sending)


async def test_a_worker_that_was_cancelled_meanwhile_answers_later(workers: Device) -> None:
    async with LocalCluster(SHARED, workers=1) as cluster:
        (worker,) = cluster.workers
        workers.occupy()
        fill(cluster.model, 1)
        sending = asyncio.create_task(cluster.scheme.send())
        await eventually(lambda: worker.scheme.version == 1, "the commit")
        await worker.rest()  # cancels the receiver loop
        assert not sending.done()
        await worker.serve()
        await asyncio.sleep(0.02)
        assert not sending.done()
        workers.finish()
        await within(sending)
        assert value_of(worker.model) == 1


async def test_a_commit_in_place_waits_for_the_device(workers: Device) -> None:
    """What is queued reads the memory that it writes. Commits in place may block the loop for that."""
    async with LocalCluster(SHARED, workers=1, commit="copy") as cluster:
        (worker,) = cluster.workers
        read: list[float] = []
        workers.occupy(lambda: read.append(value_of(worker.model)))
        threading.Timer(0.1, workers.finish).start()
        fill(cluster.model, 1)
        await within(cluster.scheme.send())
        assert read == [0]
        assert value_of(worker.model) == 1


async def test_closing_ends_a_send_that_waits(trainers: Device) -> None:
    async with LocalCluster(SHARED) as cluster:
        trainers.occupy()
        sending = asyncio.create_task(cluster.scheme.send())
        await asyncio.sleep(0.05)
        await within(cluster.scheme.aclose(), PATIENCE / 2)
        with pytest.raises(NotConnectedError):
            await within(sending)
        trainers.finish()


async def test_closing_does_not_wait_for_a_send_that_was_given_up(trainers: Device) -> None:
    async with LocalCluster(SHARED, model=lambda: Uniform(size=64)) as cluster:
        trainers.occupy()
        with pytest.raises(SyncTimeoutError):
            await cluster.scheme.send(timeout=0.05)
        await within(cluster.scheme.aclose())
        trainers.finish()
