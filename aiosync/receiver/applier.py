"""Apply updates to a model: stage each update, then commit it while no reader uses the model."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync.errors import NotConnectedError, ProtocolError
from aiosync.protocol.frames import Welcome
from aiosync.receiver.commit_gate import LOCK, CommitGate, CommitJob, commit_now, submit
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.receiver.joint_commit import JointPart, drop_out, join, leave
from aiosync.receiver.listeners import UpdateListener, in_format
from aiosync.receiver.served_model import ServedModel, own_copies
from aiosync.receiver.staging import StagingBuffers
from aiosync.receiver.updates import Applier, Overtaken, PendingUpdate, check_same_layout
from aiosync.transfer.base import InboundTransfer, MemoryAccess, Transfer
from aiosync.transports._offload import Offloader
from aiosync.transports.base import Transport
from aiosync.weights.binding import Staged
from aiosync.weights.copying import copy_few
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import WeightTarget, receiver_tensors

__all__ = ["WeightApplier"]

# Who reads, in this task and those that it has started: a body inside a body is the same reader.
_reader: ContextVar[object] = ContextVar("aiosync_reader")


class WeightApplier(Applier):
    """Applies updates to one model.

    Args:
        served: the model.
        strategy: in which form a context gets weights.
        model_id: the model's name.
        worker: this worker's index.
        transfer: makes the transfer by which updates arrive.

    Attributes:
        served: the model and the weights in service.
        gate: blocks commits while a reader uses the model.
    """

    def __init__(
        self,
        served: ServedModel,
        strategy: WeightStrategy,
        model_id: str | None,
        worker: int,
        transfer: Transfer,
    ) -> None:
        self.served = served
        super().__init__(worker)
        self.gate = CommitGate()
        self._strategy = strategy
        self._model_id = model_id
        self._transfer = transfer
        # The device of the sender's weights.
        self._source = torch.device("cpu")
        self._offloader = Offloader("aiosync-receiver")
        self._back_buffers: StagingBuffers | None = None
        self._guard: ForwardGuard | None = None
        # Seconds that a guarded forward pass waits for a commit; None: there is no guard.
        self._patience: float | None = None
        # The commit that waits for readers, or for the other parts of its joint update.
        self._waiting: CommitJob | JointPart | None = None
        # Held while an update is staged.
        self._staging = asyncio.Lock()

    @property
    def version(self) -> int:
        return self.served.version

    @version.setter
    def version(self, version: int) -> None:
        self.served.version = version

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.served.weights

    @property
    def ready(self) -> bool:
        return self._back_buffers is not None

    @property
    def memory(self) -> int:
        return self._back_buffers.nbytes if self._back_buffers else 0

    @property
    def nbytes(self) -> int:
        return 0 if self.served.layout is None else self.served.layout.nbytes

    @property
    def signature(self) -> str:
        return "" if self.served.layout is None else self.served.layout.identity

    # -- the connection --------------------------------------------------------------------------

    def open(self, wire_layout: object, device: str) -> None:
        try:
            self._source = torch.device(device)
        except RuntimeError as exc:
            raise ProtocolError(
                f"this process does not have the device of the sender's weights: {exc}"
            ) from exc
        self.served.bind(Layout.from_wire(wire_layout))

    def check_layout(self, welcome: Welcome) -> None:
        check_same_layout(self.served.binding.layout, welcome)

    async def prepare(self, transport: Transport) -> None:
        inbound, back_buffers = self.inbound, self._back_buffers
        before: StagingBuffers | None = None
        if inbound is None or back_buffers is None or inbound.access.lent != transport.maps:
            # The first connection, or one of another kind than before.
            before = back_buffers
            inbound = self._transfer.inbound(self.served.binding.layout, transport, self._source)
            back_buffers = self._back_buffers_for(inbound)
        if before is not None:
            await self._offloader.run(lambda _: back_buffers.reserve())
        elif not inbound.access.lent:
            await self._offloader.run(lambda _: inbound.prepare())
        # Set only now: if prepare() is cancelled above, the next call begins anew.
        self.inbound, self._back_buffers = inbound, back_buffers
        if before is not None:
            before.close()
        inbound.attach(transport)

    def _back_buffers_for(self, inbound: InboundTransfer) -> StagingBuffers:
        views = inbound.access.viewable and self.served.may_view
        copies = inbound.access is not MemoryAccess.PRIVATE and not views
        return StagingBuffers(self.served.binding, inbound, self._source, copies=copies)

    async def reserve(self) -> None:
        back_buffers = self._back_buffers
        assert back_buffers is not None

        def warm(_: object) -> None:
            back_buffers.reserve()
            self.served.forget_leftover()

        await self._offloader.run(warm)

    @property
    def _views_sender(self) -> bool:
        """Whether the next commit makes the model view the sender's memory."""
        return self.served.may_view and self.inbound is not None and self.inbound.access.viewable

    @property
    def needs_sender(self) -> bool:
        # The model will view it there, or its dtype may change before the commit, which converts anew then.
        return self._views_sender or (self._back_buffers is not None and self._back_buffers.converts)

    async def detach(self) -> None:
        if self.served.viewing:
            # Where there is a model, it has the weights.
            await self._offloader.run(lambda _: self._take_over(keep=self.served.model is None))

    def _take_over(self, *, keep: bool) -> None:
        assert self.inbound is not None
        self.served.take_over(self.inbound.is_lent, keep=keep)

    # -- other threads, other models -------------------------------------------------------------

    def guard_forwards(self, patience: float) -> None:
        """Keep commits out of the model's forward passes, and call the context in threads.

        For a model and a context that other threads than this event loop's use (the blocking twins).

        Args:
            patience: seconds that a forward pass waits for a commit.
        """
        self._patience = patience
        model = self.served.model
        if isinstance(model, nn.Module) and self._guard is None:
            self._guard = ForwardGuard(self.gate, model, patience, self.served.acting)

    def _remove_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.remove()

    async def rebind(self, model: WeightTarget | None, listener: UpdateListener, *, may_view: bool) -> None:
        """Go on with another model, or with another listener.

        Another model gets a copy of the weights in service, in memory of its own.

        Raises:
            LayoutMismatchError: the sender's weights do not fit the model. Nothing has changed.
        """
        while True:
            async with self._staging:
                waiting = self._waiting
                if waiting is None:
                    await self._rebind(model, listener, may_view)
                    return
            await asyncio.wait([asyncio.wrap_future(waiting.done)])

    async def _rebind(self, model: WeightTarget | None, listener: UpdateListener, may_view: bool) -> None:
        served, inbound = self.served, self.inbound
        if self._back_buffers is None or inbound is None:
            raise NotConnectedError("this receiver was closed before it had another model")
        if model is not served.model or may_view != served.may_view:
            former, another = served.model, served.make_binding(served.binding.layout)
            views = served.weights or (receiver_tensors(former) if former is not None else {})
            own = await self._offloader.run(lambda _: own_copies(views, model))
            with LOCK:
                another.commit(Staged(own, frozenset(own), frozenset(own)))
            if model is not former:  # from now on the sender may write over what it views
                await self._offloader.run(lambda _: served.binding.detach(inbound.is_lent))
            # Nothing is awaited from here on: a cancelled call has switched all or nothing.
            served.rebind(another, model, own, may_view=may_view)
            self._back_buffers = self._back_buffers_for(inbound)
            if self._patience is not None:
                self._remove_guard()
                self.guard_forwards(self._patience)
        served.listen(listener)

    # -- one update ------------------------------------------------------------------------------

    async def stage(self, pending: PendingUpdate) -> None:
        started = time.perf_counter()
        async with self._staging:
            back_buffers, served = self._back_buffers, self.served
            if back_buffers is None or self.inbound is None:
                raise NotConnectedError("this receiver was closed before it had staged an update")
            if served.leftover:
                await self._offloader.run(lambda _: served.forget_leftover())
            served.binding.refresh()
            if back_buffers.generation != served.binding.generation:
                # The worker has given the model another dtype, another device or other layers.
                back_buffers = self._back_buffers = self._back_buffers_for(self.inbound)
            if not self.inbound.is_here(pending.update):
                await self.inbound.arrive(pending.update)
            names = pending.names = served.names_of(pending.update)
            if back_buffers.is_quick(pending.update):
                staged, pairs = back_buffers.stage(pending.update, names)
                copy_few(pairs)
            else:
                staged, pairs = await self._offloader.run(lambda _: back_buffers.stage(pending.update, names))
                await self._offloader.copy(pairs)
            served.binding.check(staged.views)
            if served.listener.cascades:
                await self._cascade(staged.views)
            pending.staged, pending.back_buffers = staged, back_buffers
        pending.seconds["stage"] = time.perf_counter() - started

    def has_staged(self, pending: PendingUpdate) -> bool:
        return (
            pending.staged is not None
            and pending.back_buffers is self._back_buffers
            and not self._staging.locked()
        )

    async def _cascade(self, views: Mapping[str, Tensor]) -> None:
        listener, model_id = self.served.listener, self._model_id or "policy"
        weights = in_format(self._strategy, views)
        if self._patience is None:
            result = listener.updating(model_id, weights)
        else:
            result = await self._offloader.run(lambda _: listener.updating(model_id, weights))
        if inspect.isawaitable(result):
            await result

    def take_at_once(self, pending: PendingUpdate) -> bool:
        back_buffers, served, inbound = self._back_buffers, self.served, self.inbound
        assert back_buffers is not None and inbound is not None
        binding = served.binding
        quick = inbound.is_here(pending.update) and back_buffers.is_quick(pending.update)
        if back_buffers.converts:
            binding.refresh()  # otherwise the change of a dtype is found when the value that was sent is gone
        rebound = back_buffers.generation != binding.generation
        held_up = served.leftover or rebound or self._staging.locked()
        if pending.update.joint is not None or served.listener.cascades or held_up or not quick:
            return False
        started = time.perf_counter()
        if pending.update.names is not None:
            pending.names = served.names_of(pending.update)
        staged, pairs = back_buffers.stage(pending.update, pending.names)
        if pairs:
            copy_few(pairs)
        binding.check(staged.views)
        pending.staged, pending.back_buffers = staged, back_buffers
        pending.seconds["stage"] = time.perf_counter() - started
        return self._commit_now(pending)

    def _commit_now(self, pending: PendingUpdate) -> bool:
        if not commit_now(self.gate, self.served.commit, pending, self._views_sender):
            return False
        pending.seconds["wait"] = 0.0
        self._committed(pending)
        return True

    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        if self._back_buffers is None:
            raise Overtaken
        started = time.perf_counter()
        joint = pending.update.joint
        if joint is None and self._commit_now(pending):
            return
        job: CommitJob | JointPart
        if joint is None:
            job = submit([self.gate], lambda: self.served.commit(pending, self._views_sender))
        else:
            part = self.served.committing
            job = join(joint, self.worker, self.gate, lambda: part(pending, self._views_sender))
        if not job.done.done():
            self._waiting = job
            on_wait()
            done = asyncio.wrap_future(job.done)
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                if isinstance(job, CommitJob):
                    job.withdraw()
                elif joint is not None:
                    leave(job)
                if pending.committed:
                    self._committed(pending)
                raise
            finally:
                self._waiting = None
                if done.done() and not done.cancelled():
                    done.exception()  # read here, raised below
        if job.done.cancelled():
            raise Overtaken
        error = job.done.exception()
        if error is not None:
            raise error
        pending.seconds["wait"] = time.perf_counter() - started - pending.seconds.get("commit", 0.0)
        self._committed(pending)

    def _committed(self, pending: PendingUpdate) -> None:
        if pending.back_buffers is not None and pending.back_buffers.hears_commits:
            pending.back_buffers.committed(pending.names)

    def overtake(self) -> None:
        match self._waiting:
            case CommitJob() as job:
                job.withdraw()
            case JointPart() as part:
                drop_out(part)

    @asynccontextmanager
    async def pinned(self, deadline: Deadline) -> AsyncIterator[int]:
        """Block commits for the length of the body. Yield the number of the version in service.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        reader, ticket = _reader.get(None) or object(), object()
        await self.gate.enter(ticket, reader, deadline)
        reset = _reader.set(reader)
        try:
            yield self.version
        finally:
            self.gate.leave(ticket)
            with suppress(ValueError):  # an abandoned generator is closed in another context than its own
                _reader.reset(reset)

    # -- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Release everything. The model keeps its version, in memory of its own."""
        self._remove_guard()
        back_buffers, self._back_buffers = self._back_buffers, None
        self.overtake()
        async with self._staging:  # an update that is being staged is finished first
            try:
                if self.served.viewing:
                    await self._offloader.run(lambda _: self._take_over(keep=False))
            finally:
                if back_buffers is not None:
                    back_buffers.close()
                self._offloader.close()

    def abandon_loop(self) -> None:
        self._remove_guard()
        back_buffers, self._back_buffers = self._back_buffers, None
        if self.served.viewing:
            self._take_over(keep=False)
        if back_buffers is not None:
            back_buffers.close()
        self._offloader.close()
