"""The receiver: takes updates in and puts them in service. All schemes have this one receiver loop.

Frames are handled as they arrive, on the loop that ``connect`` ran on; they only change what is *held*.
The loop takes a held update through three steps, and a cancellation leaves behind, in each:

1. *await* one: nothing.
2. *stage* it: the thread ends first; the update stays held and is staged again by the next call.
3. *commit* it: the commit is withdrawn, or has happened; the next call goes on from there.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import anyio
import torch
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync.errors import (
    JointUpdateError,
    LayoutMismatchError,
    NotConnectedError,
    ProtocolError,
    WorkerLostError,
)
from aiosync.protocol.frames import Frame, Nack, Update
from aiosync.protocol.session import Aborted, Left, ReceiverSession, UpdateArrived
from aiosync.schemes.cascade import cascade
from aiosync.schemes.gate import CommitGate, CommitJob, ForwardGuard, submit
from aiosync.schemes.joint import JointPart, give_up, join
from aiosync.schemes.spec import SchemeSpec
from aiosync.schemes.stager import Stager
from aiosync.schemes.stats import EventKind, EventSource, SchemeStats, SyncEvent
from aiosync.transports._offload import Offloader, uninterrupted
from aiosync.transports.base import Transport
from aiosync.transports.liveness import ProcessWatch
from aiosync.weights.binding import Binding, bind
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import WeightTarget

__all__ = ["WeightReceiver"]

_pins: ContextVar[tuple[object, ...]] = ContextVar("aiosync_pins", default=())


@dataclass(slots=True)
class _Held:
    """The update in hand, and how far it has come."""

    update: Update
    views: Mapping[str, Tensor] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    committed: bool = False


class WeightReceiver:
    """The live receiving endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        spec: the scheme's options.
        strategy: how weights are applied.
        model: where they go; None if only :meth:`receive` is to deliver them.
        model_id: what the sender calls it.
        worker_idx: which worker this is.
        transport: the way to the sender, not open yet.
        token: the secret that the sender must know.
        holds: whether the sender's memory may be viewed while it is in service.
        context: told of each update if it has ``update_policy_weights_`` (sync or async).

    Attributes:
        version: the version in service, -1 before ``connect``.
        weights: the tensors in service, name -> tensor; read only.
    """

    def __init__(
        self,
        spec: SchemeSpec,
        strategy: WeightStrategy,
        model: WeightTarget | None,
        model_id: str | None,
        worker_idx: int,
        transport: Transport,
        token: bytes,
        *,
        holds: bool,
        context: Any = None,
        events: EventSource,
    ) -> None:
        self.spec = spec
        self.strategy = strategy
        self.model = model
        self.model_id = model_id
        self.worker_idx = worker_idx
        self.version = -1
        self.weights: Mapping[str, Tensor] = {}
        self.stats = SchemeStats()
        self.transport = transport
        self.gate = CommitGate()
        self.ended: str | None = None
        self.lost = False
        self._holds = holds
        self._context = context
        self._events = events
        self._session = ReceiverSession(token, worker_idx, pid=os.getpid(), model_id=model_id)
        self._offloader = Offloader("aiosync-receiver")
        self._binding: Binding | None = None
        self._stager: Stager | None = None
        self._guard: ForwardGuard | None = None
        self._watch: ProcessWatch | None = None
        self._held: _Held | None = None
        self._changed = asyncio.Event()
        self._committed = asyncio.Event()
        self._looping = False
        self._closed = False

    # -- connect ----------------------------------------------------------------------------------

    async def connect(self, deadline: Deadline) -> None:
        """Join the sender and put its newest version in service.

        Raises:
            WorkerLostError: there is no sender.
            HandshakeError: it refused this worker.
            LayoutMismatchError: its weights do not fit the model; the sender is told.
            SyncTimeoutError: it did not answer in time.
        """
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.transport.open(deadline)
                arrived = await self.transport.setup_connection_and_weights_on_receiver(
                    self._session, deadline
                )
                await self._settle_in(arrived)
        except TimeoutError as exc:
            await self.aclose()
            raise deadline.error("connect", hint="the sender did not answer") from exc
        except BaseException:
            await self.aclose()
            raise

    async def _settle_in(self, arrived: UpdateArrived) -> None:
        assert arrived.welcome is not None
        self._held = _Held(arrived.update)
        self.transport.start(self)
        self._watch = ProcessWatch(self._sender_pid(), self._sender_ended)
        try:
            layout = Layout.from_wire(arrived.welcome.layout)
            self._binding = bind(self.model, layout, self.strategy, self.spec.commit)
            device = torch.device(str(arrived.update.payload.get("device", "cpu")))
            self._stager = Stager(self._binding, device, copies=not self._holds)
        except (LayoutMismatchError, ProtocolError, TypeError) as exc:
            self._refuse(exc)
            raise
        error = await self._advance()
        if error is not None:
            raise error
        stager = self._stager
        await self._offloader.run(lambda _: stager.reserve())
        self._emit("connected")

    def _sender_pid(self) -> int:
        return self.transport.peer_pid or self._session.sender_pid

    def guard_forwards(self, patience: float) -> None:
        """Keep commits out of forward passes that run in other threads."""
        if isinstance(self.model, nn.Module) and self._guard is None:
            self._guard = ForwardGuard(self.gate, self.model, patience)

    # -- the transport's sink -----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """A frame from the sender."""
        for event in self._session.receive(frame):
            match event:
                case UpdateArrived(update=update):
                    self._held = _Held(update)
                case Aborted(joint=joint):
                    give_up(joint, "the sender called it off")
                case Left(reason=reason, dropped=dropped):
                    self._end(reason or "the sender has closed", lost=dropped)
                case _:
                    pass
        self.transport.flush(self._session)
        self._changed.set()

    def connection_lost(self, reason: str) -> None:
        """The channel broke."""
        self._end(reason, lost=True)

    def _sender_ended(self) -> None:
        self._end("its process has ended", lost=True)

    def _end(self, reason: str, *, lost: bool) -> None:
        if self.ended is None:
            self.ended, self.lost = reason, lost
            held = self._held
            if held is not None and held.update.joint is not None:
                give_up(held.update.joint.id, f"the connection ended: {reason}")
            self._changed.set()
            self._committed.set()
            if lost:
                self._emit("lost", message=reason)

    # -- the receiver loop --------------------------------------------------------------------------

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Run the receiver loop beside the body.

        When the sender ends, the loop ends and the model keeps its version.

        Raises:
            NotConnectedError: not connected, or the loop runs already.
            WorkerLostError: at the end of the body, if the sender went without a goodbye.
        """
        self._claim_loop()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._loop)
                yield
                tasks.cancel_scope.cancel()
        finally:
            self._looping = False
        if self.lost:
            raise WorkerLostError((), self.ended or "unknown")

    async def run(self) -> None:
        """Run the receiver loop in this task until the sender has gone."""
        self._claim_loop()
        try:
            await self._loop()
        finally:
            self._looping = False

    def _claim_loop(self) -> None:
        if self._closed or self._stager is None:
            raise NotConnectedError("connect() first: this receiver is not connected")
        if self._looping:
            raise NotConnectedError("the receiver loop runs already; one is enough")
        self._looping = True

    async def _loop(self) -> None:
        while await self._await_held():
            await self._advance()

    async def receive(self, deadline: Deadline) -> Mapping[str, Tensor] | None:
        """The next update's weights once they are in service, or None if none came in time.

        Beside the receiver loop this only waits; without it, this is what takes an update in.

        Raises:
            WorkerLostError: the sender has gone, and nothing more will come.
        """
        if self._closed or self._stager is None:
            raise NotConnectedError("connect() first: this receiver is not connected")
        before = self.version
        try:
            await asyncio.sleep(0)  # what has arrived already is found even with a timeout of zero
            async with asyncio.timeout(deadline.remaining()):
                while self.version == before:
                    if self.ended is not None and self._held is None:
                        raise WorkerLostError((), self.ended)
                    if self._looping:
                        await self._await_commit()
                    elif await self._await_held():
                        await self._advance()
        except TimeoutError:
            pass
        return self.weights if self.version != before else None

    async def _await_commit(self) -> None:
        self._committed.clear()
        await self._committed.wait()

    async def _await_held(self) -> bool:
        """Wait for an update; false when the sender has gone."""
        while self._held is None:
            if self.ended is not None:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _advance(self) -> Exception | None:
        """Take the held update to its end; returns the error if it was refused."""
        held = self._held
        assert held is not None
        if held.update.version <= self.version:
            self._answer(held)
            return None
        try:
            if held.views is None:
                await self._stage(held)
            await self._commit(held)
        except Exception as exc:  # noqa: BLE001 - travels to the sender as a refusal
            self._refuse(exc)
            return exc
        self._answer(held)
        return None

    async def _stage(self, held: _Held) -> None:
        stager, binding = self._stager, self._binding
        assert stager is not None and binding is not None
        started = time.perf_counter()
        if stager.is_quick(held.update):
            views = stager.stage(held.update)
        else:
            views = await self._offloader.run(lambda _: stager.stage(held.update))
        binding.check(views)
        await cascade(self._context, self.model_id, self.strategy, views)
        held.views = views
        held.seconds["stage"] = time.perf_counter() - started

    async def _commit(self, held: _Held) -> None:
        if held.committed:
            return
        started = time.perf_counter()
        joint = held.update.joint
        job: CommitJob | JointPart
        if joint is None:
            job = submit([self.gate], lambda: self._commit_alone(held))
        else:
            job = join(joint, self.gate, lambda: self._committing(held))
        if not job.done.done():
            self._session.staged(copied=not self._holds)
            self.transport.flush(self._session)
            try:
                await asyncio.shield(asyncio.wrap_future(job.done))
            except asyncio.CancelledError:
                if isinstance(job, CommitJob):
                    job.withdraw()
                elif joint is not None:
                    give_up(joint.id, "the receiver was cancelled")
                if held.committed:
                    self._answer(held)
                raise
        error = job.done.exception()
        if error is not None:
            raise error
        held.seconds["wait"] = time.perf_counter() - started - held.seconds.get("commit", 0.0)

    def _commit_alone(self, held: _Held) -> None:
        with self._committing(held):
            pass

    @contextmanager
    def _committing(self, held: _Held) -> Iterator[None]:
        """The commit itself. Runs in whatever thread freed the gate, nobody reading meanwhile."""
        binding, views = self._binding, held.views
        assert binding is not None and views is not None
        started = time.perf_counter()
        update = held.update
        names = update.names if update.base == self.version else None
        before = self.version, self.weights
        try:
            with binding.committing(views, names, reversible=update.joint is not None):
                self.version, self.weights = update.version, views
                yield
        except BaseException:
            self.version, self.weights = before
            raise
        held.committed = True
        held.seconds["commit"] = time.perf_counter() - started

    def _answer(self, held: _Held) -> None:
        """The held update is in service: say so."""
        self._held = None
        if held.committed:
            assert self._stager is not None
            self._stager.committed()
            stats = self.stats
            stats.updates += 1
            stats.nbytes += self._binding.layout.nbytes if self._binding else 0
            stats.skipped += max(0, held.update.version - max(held.update.base, 0) - 1)
            stats.memory = self._stager.nbytes
            stats.add_phases(held.seconds)
        self._session.applied(self.version, held.seconds)
        self.transport.flush(self._session)
        self._committed.set()
        self._emit("committed", seconds=held.seconds)

    def _refuse(self, error: Exception) -> None:
        """The held update cannot be put in service: say why."""
        held, self._held = self._held, None
        assert held is not None
        self.stats.failures += 1
        if held.update.joint is not None:
            give_up(held.update.joint.id, f"the part of {self.model_id!r} failed: {error}")
        self._session.refused(_nack(held.update.version, error))
        self.transport.flush(self._session)
        self._committed.set()
        self._emit("failed", message=str(error))

    # -- readers --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pinned(self, deadline: Deadline) -> AsyncIterator[int]:
        """Keep the version that is in service for the length of the body; gives its number.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        chain = _pins.get()
        # A body inside a body of the same task is the same reader: it would wait for itself.
        reader = next((pin for pin in chain if self.gate.reads(pin)), None) or object()
        await self.gate.enter(reader, deadline)
        reset = _pins.set((*chain, reader))
        try:
            yield self.version
        finally:
            _pins.reset(reset)
            self.gate.leave(reader)

    # -- close --------------------------------------------------------------------------------------

    async def wait_closed(self) -> None:
        """Wait until the sender has gone, however long that takes."""
        while self.ended is None and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        """Leave the sender and let go of everything; idempotent. The model keeps its version, in
        memory of its own."""
        if not self._closed:
            self._closed = True
            await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        if self._held is not None and self._held.update.joint is not None:
            give_up(self._held.update.joint.id, "the receiver has closed")
        if self._guard is not None:
            self._guard.remove()
        if self._watch is not None:
            self._watch.close()
        binding = self._binding
        if binding is not None and self._holds and (self.ended is None or self.lost):
            # The sender goes on and will write into what the parameters view.
            await self._offloader.run(lambda _: binding.detach())
        self._session.close("the worker has closed")
        self.transport.flush(self._session)
        await self.transport.aclose()
        if self._stager is not None:
            self._stager.close()
        self._offloader.close()
        self._changed.set()
        self._committed.set()
        self._emit("closed")

    def _emit(
        self, kind: EventKind, *, seconds: Mapping[str, float] | None = None, message: str = ""
    ) -> None:
        if self._events.heard:
            self._events.emit(
                SyncEvent(
                    kind, self.model_id, self.version, self.worker_idx, seconds=seconds or {}, message=message
                )
            )


def _nack(version: int, error: Exception) -> Nack:
    kind = type(error)
    nack = Nack(
        round=-1,
        version=version,
        kind="joint" if isinstance(error, JointUpdateError) else "apply",
        error_type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
    if not isinstance(error, LayoutMismatchError):
        return nack
    return Nack(
        round=-1,
        version=version,
        kind="layout",
        error_type=nack.error_type,
        message=nack.message,
        missing=list(error.missing),
        unexpected=list(error.unexpected),
        differing=error.differing,
    )
