"""Joint updates on the sending side: several models, all or none on each worker."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError
from aiosync.protocol.frames import Joint
from aiosync.reports import SendReport
from aiosync.schemes.base import WeightSyncScheme
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.pending_acks import first_failure
from aiosync.sender.publisher import Publication, publish_together
from aiosync.transfer.slots import JointParts

__all__ = ["JointUpdate", "atomic"]


@dataclass(frozen=True, slots=True)
class _Part:
    weights: Any = None
    strict: bool = True


@dataclass(slots=True)
class _UnderWay:
    scheme: WeightSyncScheme
    sender: WeightSender
    publication: Publication


class JointUpdate:
    """Updates several models (a policy and its value net, say): each worker commits all of them, or none.

    ::

        async with aiosync.atomic(policy_scheme, value_scheme) as tx:
            tx.send(policy_scheme, policy)
            tx.send(value_scheme, value_net)
        tx.reports[policy_scheme].version

    The updates are sent when the body ends, and not at all if it raises. A scheme without a ``tx.send`` call
    sends what ``scheme.send()`` would. The updates go to the workers that every scheme serves; the call waits
    for them whatever the schemes' ``sync``. The receivers of one worker must be in one process.

    Args:
        schemes: connected senders, each once.
        timeout: seconds for the whole update; None: the longest of the schemes' timeouts.

    Attributes:
        reports: scheme -> its report, set when the body has ended.

    Raises:
        InvalidArgumentError: no schemes, or the same scheme twice.
        LayoutMismatchError, RemoteApplyError, WorkerLostError, SyncTimeoutError: as ``send`` does; the
            workers concerned changed no model, the others have been updated.
    """

    def __init__(self, schemes: tuple[WeightSyncScheme, ...], timeout: float | None) -> None:
        if not schemes or len({id(scheme) for scheme in schemes}) < len(schemes):
            raise InvalidArgumentError("atomic() takes one or more different schemes")
        for scheme in schemes:
            if not isinstance(scheme, WeightSyncScheme):
                raise InvalidArgumentError(f"atomic() takes schemes, got {type(scheme).__name__}")
        self.reports: Mapping[WeightSyncScheme, SendReport] = {}
        self._parts = {scheme: _Part() for scheme in schemes}
        self._timeout = timeout

    def send(self, scheme: WeightSyncScheme, weights: Any = None, *, strict: bool = True) -> None:
        """Set the weights that this scheme sends when the body ends.

        Raises:
            InvalidArgumentError: ``scheme`` is not part of this update.
        """
        if scheme not in self._parts:
            raise InvalidArgumentError(f"{scheme!r} is not part of this joint update")
        self._parts[scheme] = _Part(weights, strict)

    async def __aenter__(self) -> Self:
        for scheme in self._parts:
            sender = scheme.get_sender()
            sender.check_open()
            if sender.sharded:
                raise InvalidArgumentError(
                    f"{scheme!r} sends a model that is spread over ranks, which cannot be part of a joint "
                    "update: send a dict of whole tensors (full_tensor() of each DTensor)"
                )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self._send_all()

    async def _send_all(self) -> None:
        timeouts = [scheme.get_sender().spec.seconds(self._timeout) for scheme in self._parts]
        deadline = Deadline.after(max(timeouts))
        senders = [scheme.get_sender() for scheme in self._parts]
        mark = Joint(id=secrets.token_hex(8), size=len(senders))

        def abort(worker: int) -> None:
            for sender in senders:
                sender.registry.abort(mark, worker)

        async with AsyncExitStack() as pending:
            # Always in the same order, so that two joint updates of the same schemes cannot deadlock.
            for scheme in sorted(self._parts, key=id):
                await pending.enter_async_context(scheme.get_sender().publisher.lock.hold(deadline))
            under_way = await self._prepare_all(JointParts(mark, abort), deadline)
            await publish_together([item.publication for item in under_way], fallback=True)
        await self._finish_all(under_way)
        reports = [(worker, report) for r in self.reports.values() for worker, report in r.workers.items()]
        failure = first_failure((report for _, report in reports), deadline)
        if failure is not None:
            failure.report = next(r for r in self.reports.values() if not r.ok)
            raise failure

    async def _prepare_all(self, joint: JointParts, deadline: Deadline) -> list[_UnderWay]:
        senders = [scheme.get_sender() for scheme in self._parts]
        targets = set.intersection(*(sender.registry.workers for sender in senders))
        under_way: list[_UnderWay] = []
        try:
            for scheme, part in self._parts.items():
                sender = scheme.get_sender()
                sender.check_open()
                sources = await sender.source.extract(part.weights, targets)
                publication = await sender.publisher.prepare(
                    sources, set(targets), strict=part.strict, joint=joint, deadline=deadline
                )
                await sender.publisher.fill(publication, None)
                under_way.append(_UnderWay(scheme, sender, publication))
        except BaseException:
            for item in under_way:
                item.sender.publisher.discard(item.publication)
            raise
        return under_way

    async def _finish_all(self, under_way: list[_UnderWay]) -> None:
        reports: dict[WeightSyncScheme, SendReport] = {}

        async def finish(item: _UnderWay) -> None:
            reports[item.scheme] = await item.sender.finish(item.publication, wait=True)

        try:
            async with anyio.create_task_group() as tasks:
                for item in under_way:
                    tasks.start_soon(finish, item)
        finally:
            for item in under_way:  # if the group was cancelled at once, a task may not have started
                item.sender.publisher.settle(item.publication)
        self.reports = reports


def atomic(*schemes: WeightSyncScheme, timeout: float | None = None) -> JointUpdate:
    """Update several models jointly: ``async with atomic(a, b) as tx``. See :class:`JointUpdate`."""
    return JointUpdate(schemes, timeout)
