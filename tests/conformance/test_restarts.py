"""Trainers that are started again under their workers: the newest version is everywhere, and no version goes
back without a word."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aiosync import InvalidArgumentError, SyncEvent, TCPWeightSyncScheme, WorkerLostError
from tests.kit import scenarios
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.ports import free_port
from tests.kit.processes import Worker

TOKEN = "a token of the tests"
FORGETFUL = 5
"""Each so many-th trainer begins to count at 0 again."""


def _address(kind: str, folder: Path) -> str:
    if kind == "unix":
        return f"unix://{folder}/socket"
    return f"tcp://127.0.0.1:{free_port()}"


class Follower(LocalWorker):
    """A worker that follows one trainer after another, and remembers what its endpoint has said."""

    def __init__(self, address: str, index: int, **options: Any) -> None:
        given = {"on_sender_close": "wait", "reconnect_for": PATIENCE, "timeout": PATIENCE, **options}
        super().__init__(TCPWeightSyncScheme(address, token=TOKEN, **given), index, Uniform(-1.0), {})
        self.address = address
        self.init()
        self.events: list[SyncEvent] = []
        self.scheme.on_event(self.events.append)

    def check(self) -> None:
        """A version goes back only where an event has said so, with both numbers."""
        newest = -1
        for event in self.events:
            if event.kind == "followed":
                assert event.previous == newest
                assert event.message == f"followed another sender: {event.previous} → {event.version}"
                newest = -1
            elif event.kind == "committed":
                assert event.version > newest
                newest = event.version


def _cycles(kind: str) -> int:
    """Fifty each: over TCP with asyncio's loop, over Unix sockets with uvloop's."""
    on_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    return 50 if on_uvloop == (kind == "unix") else 5


@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_one_trainer_after_another(
    kind: str, end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, version = _address(kind, tmp_path), -1
    workers = [Follower(address, index) for index in range(2)]
    for cycle in range(_cycles(kind)):
        first = 0 if cycle % FORGETFUL == FORGETFUL - 1 else version + 1
        scheme = TCPWeightSyncScheme(
            address, token=TOKEN, timeout=PATIENCE, first_version=first, min_workers=2
        )
        trainer = Worker(scheme, 0)
        training = trainer.begin(scenarios.train, values=[10.0 * cycle, 10.0 * cycle + 1, 10.0 * cycle + 2])
        if cycle == 0:
            for worker in workers:
                await worker.connect()
                await worker.serve()
        before, version = version, await within(training)
        assert version == first + 2
        for worker in workers:
            assert worker.scheme.version == version
            assert value_of(worker.model) == 10 * cycle + 2
            assert worker.scheme.ended is None
        if first == 0 and before > 0:
            said = f"followed another sender: {before} → "
            assert any(r.levelno == logging.WARNING and said in r.getMessage() for r in caplog.records)
        caplog.clear()
        if end == "killed":
            trainer.kill()
            await trainer.ended()
        await trainer.close()
    for worker in workers:
        worker.check()
        await worker.close()


@pytest.mark.parametrize("first", [0, 5])
async def test_what_acts_keeps_its_version_until_the_next_trainers_is_applied(
    first: int, tmp_path: Path
) -> None:
    def trainer_of(value: float, first: int) -> TCPWeightSyncScheme:
        scheme = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE, first_version=first)
        scheme.init_on_sender(model_id="policy", model=Uniform(value), num_workers=1)
        return scheme

    address = _address("unix", tmp_path)
    worker, one = Follower(address, 0), trainer_of(1.0, 3)
    connecting = asyncio.create_task(one.connect())
    await worker.connect()
    await worker.serve()
    await within(connecting)
    async with worker.scheme.pinned() as version:
        assert version == 3
        await within(one.aclose())
        other = trainer_of(2.0, first)
        connecting = asyncio.create_task(other.connect())
        await eventually(lambda: any(e.kind == "followed" for e in worker.events), "it follows the other")
        async with worker.scheme.pinned() as again:
            assert again == worker.scheme.version == 3 and value_of(worker.model) == 1.0
    await within(connecting)
    assert worker.scheme.version == first and value_of(worker.model) == 2.0
    worker.check()
    await worker.close()
    await within(other.aclose())


async def test_a_trainer_closes_and_comes_back_at_once(tmp_path: Path) -> None:
    """In one process, without a pause: fifty times."""
    address, version = _address("unix", tmp_path), -1
    workers = [Follower(address, index) for index in range(2)]
    for cycle in range(50):
        model = Uniform(float(cycle))
        scheme = TCPWeightSyncScheme(
            address, token=TOKEN, timeout=PATIENCE, first_version=version + 1, min_workers=2
        )
        scheme.init_on_sender(model_id="policy", model=model)
        connecting = asyncio.create_task(scheme.connect())
        if cycle == 0:
            for worker in workers:
                await worker.connect()
                await worker.serve()
        await within(connecting)
        fill(model, cycle + 0.5)
        version = (await within(scheme.send())).version
        assert [value_of(worker.model) for worker in workers] == [cycle + 0.5] * 2
        assert [worker.scheme.version for worker in workers] == [version] * 2
        await within(scheme.aclose())
    assert version == 99
    for worker in workers:
        worker.check()
        await worker.close()


async def test_by_default_a_worker_stops_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(3.0))
    connecting = asyncio.create_task(scheme.connect())
    worker = Follower(scheme.address, 0, on_sender_close="stop")
    await worker.connect()
    await worker.serve()
    await within(connecting)
    await within(scheme.aclose())
    await within(worker.scheme.wait_closed())
    assert any(
        r.levelno == logging.WARNING and re.search("closed.*version 0 stays in service", r.getMessage())
        for r in caplog.records
    )
    await worker.rest()
    assert worker.lost is None
    assert value_of(worker.model) == 3
    await worker.close()


async def test_no_trainer_comes_back() -> None:
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(3.0))
    connecting = asyncio.create_task(scheme.connect())
    worker = Follower(scheme.address, 0, reconnect_for=BRIEF)
    await worker.connect()
    await worker.serve()
    await within(connecting)
    await within(scheme.aclose())
    await within(worker.scheme.wait_closed())
    await eventually(lambda: worker.lost is not None, "the body of receiving() is cancelled")
    assert isinstance(worker.lost, WorkerLostError)
    assert "tried to connect again" in str(worker.lost)
    assert value_of(worker.model) == 3
    await worker.close()


async def test_a_sender_starts_without_workers() -> None:
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE, min_workers=0, first_version=7)
    model = Uniform()
    scheme.init_on_sender(model_id="policy", model=model)
    async with scheme:
        assert scheme.version == 7
        fill(model, 1)
        assert (await scheme.send()).version == 8
        late = Follower(scheme.address, 0)
        await late.connect()
        assert late.scheme.version == 8
        assert value_of(late.model) == 1
        with pytest.raises(InvalidArgumentError, match="per_worker_weights"):
            await scheme.send({0: model})
        await late.close()


async def test_skipped_versions_are_those_of_one_sender(tmp_path: Path) -> None:
    address = _address("unix", tmp_path)
    worker = Follower(address, 0)
    for first in (1000, 5):
        scheme = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE, first_version=first)
        scheme.init_on_sender(model_id="policy", model=Uniform())
        connecting = asyncio.create_task(scheme.connect(min_workers=1))
        if first == 1000:
            await worker.connect()
            await worker.serve()
        await within(connecting)
        await within(scheme.send())
        assert worker.scheme.version == first + 1
        await within(scheme.aclose())
    assert worker.scheme.stats.skipped == 0
    await worker.close()


@pytest.mark.parametrize("timeout", [0.0, BRIEF / 10])
async def test_receive_finds_the_next_sender_although_each_call_is_short(
    tmp_path: Path, timeout: float
) -> None:
    address = _address("unix", tmp_path)
    async with _sender_with(worker := Follower(address, 0)):
        pass
    connecting, scheme = await _next_sender(address)
    while worker.scheme.version < 5:
        await worker.scheme.receive(timeout=timeout)
    await within(connecting)
    assert value_of(worker.model) == 5
    await worker.close()
    await within(scheme.aclose())


async def test_an_event_loop_that_is_blocked_while_a_sender_is_looked_for(tmp_path: Path) -> None:
    """By a rollout that takes longer than reconnect_for=, while the sender has long been back."""
    address = _address("unix", tmp_path)
    async with _sender_with(worker := Follower(address, 0, reconnect_for=2 * BRIEF)):
        pass
    assert await worker.scheme.receive(timeout=BRIEF / 100) is None
    connecting, scheme = await _next_sender(address)
    time.sleep(3 * BRIEF)  # noqa: ASYNC251
    assert await worker.scheme.receive(timeout=PATIENCE) is not None
    await within(connecting)
    assert value_of(worker.model) == 5
    await worker.close()
    await within(scheme.aclose())


@asynccontextmanager
async def _sender_with(worker: Follower) -> AsyncIterator[None]:
    """A sender that this worker has connected to, without a receiver task."""
    scheme = TCPWeightSyncScheme(worker.address, token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    connecting = asyncio.create_task(scheme.connect())
    await worker.connect()
    await within(connecting)
    yield
    await within(scheme.aclose())


async def _next_sender(address: str) -> tuple[asyncio.Task[None], TCPWeightSyncScheme]:
    scheme = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE, first_version=5, min_workers=1)
    scheme.init_on_sender(model_id="policy", model=Uniform(5.0))
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    return connecting, scheme


async def test_closing_ends_the_search_for_a_sender(tmp_path: Path) -> None:
    address = _address("unix", tmp_path)
    async with _sender_with(worker := Follower(address, 0)):
        pass
    receiving = asyncio.create_task(worker.scheme.receive(timeout=PATIENCE))
    await asyncio.sleep(BRIEF)
    await worker.close()
    with pytest.raises(WorkerLostError):
        await within(receiving, PATIENCE / 3)
    connecting, scheme = await _next_sender(address)
    await asyncio.sleep(BRIEF)
    assert not scheme.workers
    connecting.cancel()
    await within(scheme.aclose())


async def test_receive_without_the_receiver_task_gives_up_too() -> None:
    """Each call is shorter than the search for another sender."""
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    connecting = asyncio.create_task(scheme.connect())
    worker = Follower(scheme.address, 0, reconnect_for=2 * BRIEF)
    await worker.connect()
    await within(connecting)
    await within(scheme.aclose())

    async def poll() -> None:
        while True:
            await worker.scheme.receive(timeout=BRIEF / 10)

    with pytest.raises(WorkerLostError):
        await within(poll())
    await worker.close()


@pytest.mark.parametrize(
    "options",
    [
        {"first_version": -1},
        {"first_version": 1.5},
        {"first_version": True},
        {"min_workers": -1},
        {"min_workers": "2"},
        {"on_sender_close": "go on"},
        {"on_sender_close": "wait", "reconnect_for": 0},
    ],
    ids=str,
)
def test_options_that_are_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)
