"""Joint updates on the sending side: several models, all or none on each worker."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self, TypeAlias

import anyio

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, JointUpdateError
from aiosync.protocol.frames import Joint
from aiosync.reports import SendReport, WorkerReport
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.none import NullEndpoint
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.failures import first_failure, not_dropped
from aiosync.sender.publish_together import publish_together
from aiosync.sender.publisher import Publication
from aiosync.transfer.slots import JointParts

_Senders: TypeAlias = dict[WeightSyncScheme, WeightSender]


class JointUpdate:
    """Updates several models (a policy and its value net, say): each worker commits all of them, or none.

    ::

        async with aiosync.atomic(policy_scheme, value_scheme) as tx:
            tx.send(policy_scheme, policy)
            tx.send(value_scheme, value_net)
        tx.reports[policy_scheme].version

    The updates are sent when the body ends, and not at all if it raises. A scheme without a ``tx.send`` call
    sends what ``scheme.send()`` would. The updates go to the workers that every scheme serves, or to some of
    them; the call waits for them whatever the schemes' ``sync``. The receivers of one worker must be in one
    process. Contexts that pass updates on to further workers get each model as it arrives: those workers
    update one model after the other.

    Args:
        schemes: connected senders, each once.
        timeout: seconds for the whole update; None: the longest of the schemes' timeouts.
        worker_ids: the workers to update: None for all, an index or a list.

    Attributes:
        reports: scheme -> its report, set when the body has ended.

    Raises:
        InvalidArgumentError: no schemes, or the same scheme twice.
        UnknownWorkerError: ``worker_ids`` has a worker that a scheme does not serve.
        LayoutMismatchError, RemoteApplyError, WorkerLostError, SyncTimeoutError: as ``send`` does; the
            workers concerned changed no model, the others have been updated.
    """

    def __init__(
        self,
        schemes: tuple[WeightSyncScheme, ...],
        timeout: float | None,
        worker_ids: int | list[int] | None = None,
    ) -> None:
        if not schemes or len({id(scheme) for scheme in schemes}) < len(schemes):
            raise InvalidArgumentError("atomic() takes one or more different schemes")
        for scheme in schemes:
            if not isinstance(scheme, WeightSyncScheme):
                raise InvalidArgumentError(f"atomic() takes schemes, got {type(scheme).__name__}")
        self.reports: Mapping[WeightSyncScheme, SendReport] = {}
        # Scheme -> the arguments of its send: the weights, and ``strict``.
        self._parts: dict[WeightSyncScheme, tuple[Any, bool]] = dict.fromkeys(schemes, (None, True))
        self._timeout = timeout
        self._worker_ids = worker_ids

    def send(self, scheme: WeightSyncScheme, weights: Any = None, *, strict: bool = True) -> None:
        """Set the weights that this scheme sends when the body ends.

        Raises:
            InvalidArgumentError: ``scheme`` is not part of this update.
        """
        if scheme not in self._parts:
            raise InvalidArgumentError(f"{scheme!r} is not part of this joint update")
        self._parts[scheme] = weights, strict

    async def __aenter__(self) -> Self:
        for scheme in self._parts:
            sender = scheme.get_sender()
            if isinstance(sender, NullEndpoint):
                continue
            sender.check_open()
            if sender.is_matched:
                raise InvalidArgumentError(
                    f"{scheme!r} sends a model that is spread over ranks, which cannot be part of a joint "
                    "update: send a dict of whole tensors (full_tensor() of each DTensor)"
                )
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self._send_all()

    async def _send_all(self) -> None:
        found = {scheme: scheme.get_sender() for scheme in self._parts}
        senders = {scheme: each for scheme, each in found.items() if not isinstance(each, NullEndpoint)}
        seconds = [sender.spec.seconds(self._timeout) for sender in senders.values()]
        deadline = Deadline.after(max(seconds, default=0.0))
        publications = await self._publish(senders, deadline) if senders else {}
        reports = await _finish_all(senders, publications)
        for scheme in found.keys() - senders.keys():
            reports[scheme] = await scheme.send()
        self.reports = reports
        failure = first_failure(_failures(senders, reports), deadline)
        if failure is not None:
            failure.report = next(r for r in reports.values() if not r.ok)
            raise failure

    async def _publish(self, senders: _Senders, deadline: Deadline) -> dict[WeightSyncScheme, Publication]:
        mark = Joint(id=secrets.token_hex(8), size=len(senders))

        def abort(worker: int) -> None:
            for sender in senders.values():
                sender.registry.abort(mark, worker)

        async with AsyncExitStack() as pending:
            # Always in the same order, so that two joint updates of the same schemes cannot deadlock.
            for scheme in sorted(senders, key=id):
                await pending.enter_async_context(senders[scheme].publisher.lock.hold(deadline))
            workers = set.intersection(
                *(each.registry.resolve(self._worker_ids) for each in senders.values())
            )
            publications = await self._prepare_all(senders, JointParts(mark, workers, abort), deadline)
            await publish_together(list(publications.values()), fallback=True)
        return publications

    async def _prepare_all(
        self, senders: _Senders, joint: JointParts, deadline: Deadline
    ) -> dict[WeightSyncScheme, Publication]:
        prepared: dict[WeightSyncScheme, Publication] = {}
        try:
            for scheme, sender in senders.items():
                weights, strict = self._parts[scheme]
                sender.check_open()
                sources = await sender.source.extract(weights, set(joint.workers), deadline)
                publication = await sender.publisher.prepare(
                    sources, set(joint.workers), strict=strict, joint=joint, deadline=deadline
                )
                await sender.publisher.fill(publication, None)
                prepared[scheme] = publication
        except BaseException:
            for scheme, publication in prepared.items():
                senders[scheme].publisher.discard(publication)
            raise
        return prepared


async def _finish_all(
    senders: _Senders, publications: dict[WeightSyncScheme, Publication]
) -> dict[WeightSyncScheme, SendReport]:
    """Wait for the answers to all parts."""
    reports: dict[WeightSyncScheme, SendReport] = {}

    async def finish(scheme: WeightSyncScheme) -> None:
        reports[scheme] = await senders[scheme].finish(publications[scheme], wait=True)

    try:
        async with anyio.create_task_group() as tasks:
            for scheme in publications:
                tasks.start_soon(finish, scheme)
    finally:
        # Either all parts are withdrawn or none: else a worker that joins would get one alone.
        refused = all(each.publisher.may_withdraw(each) for each in publications.values())
        for scheme, publication in publications.items():
            senders[scheme].publisher.settle(publication, may_withdraw=refused)
    return reports


def _failures(senders: _Senders, reports: Mapping[WeightSyncScheme, SendReport]) -> list[WorkerReport]:
    """Return the workers' reports, without those that ``on_failure="drop"`` does not raise: of workers that
    were lost or late for a part; they have not committed the others either."""
    kept: list[WorkerReport] = []
    gone: set[int] = set()
    for scheme, sender in senders.items():
        found = not_dropped(reports[scheme], sender.spec.on_failure)
        kept += found
        gone |= reports[scheme].workers.keys() - {each.worker for each in found}
    return [each for each in kept if each.worker not in gone or not isinstance(each.error, JointUpdateError)]


def atomic(
    *schemes: WeightSyncScheme, timeout: float | None = None, worker_ids: int | list[int] | None = None
) -> JointUpdate:
    """Update several models jointly: ``async with atomic(a, b) as tx``. See :class:`JointUpdate`."""
    return JointUpdate(schemes, timeout, worker_ids)
