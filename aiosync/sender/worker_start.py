"""Wait for workers: until they have connected, and until they run on what was sent before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

from aiosync._deadline import Deadline
from aiosync.reports import SendReport, WorkerReport
from aiosync.sender.pending_acks import PendingAcks
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.send_reports import SendReports

__all__ = ["WorkerStart"]


class WorkerStart:
    """Waits for a sender's workers to start.

    Args:
        registry: the workers.
        reports: makes the error that names those that did not come.
    """

    def __init__(self, registry: WorkerRegistry, reports: SendReports) -> None:
        self._registry = registry
        self._reports = reports

    async def wait_for(
        self,
        workers: Collection[int],
        deadline: Deadline,
        join: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Wait until these workers run on some version; ``join`` has them connect.

        Raises:
            SyncTimeoutError: some workers did not come in time; it names them.
            RemoteApplyError, LayoutMismatchError, WorkerLostError: a worker refused, or will not come.
        """
        registry = self._registry
        acks = PendingAcks(0, workers, phase="connect")
        for worker in list(acks.pending):
            if registry.version_of(worker) >= 0:
                acks.settle(WorkerReport(worker, "applied", registry.version_of(worker)))
        with registry.awaited.tracking(acks):
            if join is not None:
                await join()
            await acks.wait(deadline, registry.timer)
        self._reports.raise_failure(self._reports.conclude(acks, deadline, waited=True), deadline)

    async def add(
        self,
        worker: int | None,
        join: Callable[[int], Awaitable[object]],
        deadline: Deadline,
        *,
        may_be_new: bool,
    ) -> int:
        """Have a further worker connect, or a worker in the place of a lost one. Return its index.

        Raises:
            InvalidArgumentError: that worker is connected, or a new one would have no weights.
        """
        indices = self._registry.indices
        number = indices.expect(worker, self._registry.connections, may_be_new=may_be_new)
        try:
            await self.wait_for({number}, deadline, lambda: join(number))
        finally:
            indices.expect_no_more(number)
        return number

    async def wait_for_acks(self, targets: set[int], deadline: Deadline) -> SendReport:
        """Wait until these workers run on the version that was last published to them."""
        started = time.perf_counter()
        acks = self._registry.acks_for_current(targets)
        with self._registry.awaited.tracking(acks):
            await acks.wait(deadline, self._registry.timer)
        seconds = {"total": time.perf_counter() - started}
        report = self._reports.conclude(acks, deadline, waited=True, seconds=seconds)
        self._reports.raise_failure(report, deadline)
        return report

    async def wait_for_any(self, count: int, deadline: Deadline) -> None:
        """Wait until any ``count`` workers run on some version.

        Raises:
            SyncTimeoutError: there were fewer when the deadline passed.
        """
        joined = self._registry.joined
        try:
            async with asyncio.timeout(deadline.remaining()):
                while self._running() < count:
                    joined.clear()
                    await joined.wait()
        except TimeoutError:
            reasons = self._registry.admission.refused
            refused = f"; connections were refused: {'; '.join(reasons)}" if reasons else ""
            hint = f"{self._running()} of {count} workers have connected{refused}"
            raise deadline.error("connect", version=0, hint=hint) from None

    def _running(self) -> int:
        connections = self._registry.connections.values()
        return sum(connection.session.acked_version >= 0 for connection in connections)
