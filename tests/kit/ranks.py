"""Faults while a process group of torch.distributed moves weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiosync.transports.torch_distributed.process_group import ProcessGroupMember
from tests.kit import scenarios
from tests.kit.clock import PATIENCE, eventually
from tests.kit.models import fill
from tests.kit.processes import ProcessCluster
from tests.kit.seams import threads_of_ranks

__all__ = ["before_message", "check", "close_in_the_middle", "send_and_hold"]


def before_message(
    monkeypatch: pytest.MonkeyPatch, number: int, call: Callable[[], object], *, size: int = 2
) -> None:
    """Call ``call()`` before the sender starts a message, in the process group's thread.

    Messages of groups with fewer members than ``size`` do not count.
    """
    begin, begun = ProcessGroupMember._start, 0

    def count(self: ProcessGroupMember, group: Any, bucket: Any, tag: int) -> Any:
        nonlocal begun
        begun += self.size >= size
        if self.size >= size and begun == number:
            call()
        return begin(self, group, bucket, tag)

    monkeypatch.setattr(ProcessGroupMember, "_start", count)


async def check(cluster: ProcessCluster, version: int, workers: list[int]) -> None:
    """These workers have the version."""
    for worker in workers:
        found = await cluster.workers[worker].run(scenarios.report)
        assert found == {"version": version, "value": version}


async def send_and_hold(
    monkeypatch: pytest.MonkeyPatch, cluster: ProcessCluster, version: int, number: int, *, size: int = 2
) -> threading.Event:
    """Send; returns when a message is about to be started, which waits for the event that is returned."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(PATIENCE)

    before_message(monkeypatch, number, hold, size=size)
    fill(cluster.model, version)
    await cluster.scheme.send(wait=False)
    await eventually(held.is_set, "the version is being sent")
    return release


async def close_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, cluster: ProcessCluster, version: int, number: int, *, size: int = 2
) -> None:
    """Send a version to all workers and close the sender before this message; they get the version."""
    release = await send_and_hold(monkeypatch, cluster, version, number, size=size)
    await cluster.scheme.aclose()
    release.set()
    for worker in cluster.workers.values():
        for _ in range(round(PATIENCE / 0.05)):  # nothing tells of it: the connection is closed
            if await worker.run(scenarios.report) == {"version": version, "value": version}:
                break
            await asyncio.sleep(0.05)
    await check(cluster, version, list(cluster.workers))
    await eventually(lambda: threads_of_ranks() == 0, "the groups are dropped")
