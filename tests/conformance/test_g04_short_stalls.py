"""G4: bytes are staged off the loop; neither side's loop stalls for weight-sized work.

The bounds are wide, because speed belongs to ``benchmarks/``: these tests tell a loop that copies tens
of megabytes by itself, again and again, from one that does not.
"""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any

import pytest

from aiosync.transports.unix_socket import UnixConnection
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import PATIENCE, SCALE, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster

MEGABYTES_32: dict[str, Any] = {"tensors": 8, "size": 1 << 20}


class Ticker:
    """Counts the turns of the running loop from its creation on, until it is stopped."""

    def __init__(self) -> None:
        self.turns = 0
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turns += 1

    def stop(self) -> None:
        self._task.cancel()


async def test_the_loop_turns_while_a_send_copies(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, model=lambda: Uniform(**MEGABYTES_32)) as cluster:
        ticker = Ticker()
        for version in range(1, 4):
            fill(cluster.model, version)
            ticker.turns = 0
            report = await cluster.scheme.send()
            # Copied on the loop, the copy would be one single turn of it.
            assert ticker.turns > 4, f"only {ticker.turns} turns in {report.seconds['total']:.3f} s"
        ticker.stop()
        assert value_of(cluster.workers[0].model) == 3


async def test_small_sends_leave_the_loop_its_turns(
    process_case: SchemeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_arrived = UnixConnection.take_arrived
    taken: list[UnixConnection] = []

    def with_an_answer(self: UnixConnection) -> bool:
        """Find the worker's answer always there, as on a machine where the worker runs at once."""
        taken.append(self)
        if self._sock is not None:
            select.select([self._sock], [], [], PATIENCE)
        return take_arrived(self)

    monkeypatch.setattr(UnixConnection, "take_arrived", with_an_answer)
    async with ProcessCluster(process_case, workers=1) as cluster:
        ticker = Ticker()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            await cluster.scheme.send()
        assert ticker.turns > 10
        begun = time.monotonic()
        while time.monotonic() < begun + 0.002:
            pass  # as a step of training: a send that need not wait leaves the loop to others then
        ticker.turns = 0
        await cluster.scheme.send()
        assert ticker.turns > 2 or not taken
        ticker.stop()


async def test_a_workers_loop_does_not_stall(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=1, **MEGABYTES_32) as cluster:
        worker = cluster.workers[0]
        ticking = worker.begin(scenarios.stall, seconds=0.001)
        await worker.says("ticking")
        worst, last = 0.0, time.perf_counter()
        for _ in range(5):
            await cluster.scheme.send()
            worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
        worker.tell("enough")
        assert await within(ticking) < 0.5 * max(1.0, SCALE)


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_the_report_says_where_the_time_went(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, commit=commit) as cluster:
        report = await cluster.scheme.send()
        assert set(report.seconds) >= {"stage", "ack", "total"}
        for part in report.workers.values():
            assert set(part.seconds) == {"stage", "wait", "commit"}
            assert all(0 <= s < 60 for s in part.seconds.values())
        assert report.seconds["total"] >= report.seconds["stage"]
