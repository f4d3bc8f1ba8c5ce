"""Apply updates to a model: stage each update, then commit it while no reader uses the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from aiosync._deadline import Deadline
from aiosync.errors import NotConnectedError, ProtocolError
from aiosync.events import logger
from aiosync.receiver.commit_gate import CommitGate, submit
from aiosync.receiver.commit_job import LOCK
from aiosync.receiver.commit_wait import CommitWait, Job
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.receiver.joint_commit import check_joint, join
from aiosync.receiver.listeners import Notifier, UpdateListener, cascade, in_format
from aiosync.receiver.staging import StagingBuffers, leave, own_copies
from aiosync.receiver.updates import Applier, Overtaken, PendingUpdate
from aiosync.transfer.base import Transfer
from aiosync.transfer.yield_request import NO_REQUEST
from aiosync.transports._offload import Offloader
from aiosync.transports.base import FramedTransport
from aiosync.weights.binding import Binding, Staged, StaleStaging
from aiosync.weights.copying import copy_few
from aiosync.weights.devices import wait_for_devices
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import WeightTarget, receiver_tensors

_LAST_READERS = 2.0
"""Seconds that :meth:`WeightApplier.close` waits for those that may read the sender's memory."""


class WeightApplier(Applier):
    """Applies updates to one model."""

    binding: Binding  # the model's, to the sender's layout; set by bind()

    def __init__(
        self,
        model: WeightTarget | None,
        listener: UpdateListener,
        strategy: WeightStrategy,
        model_id: str | None,
        worker: int,
        transfer: Transfer,
        *,
        may_view: bool,
        make_binding: Callable[[Layout], Binding],
    ) -> None:
        super().__init__(worker)
        self.gate = CommitGate()  # blocks commits while a reader uses the model
        self.model = model  # None: the caller only reads `weights`
        self._notifier = Notifier(listener)
        self.strategy = strategy  # the form in which the listener gets weights
        self._model_id = model_id
        self._transfer = transfer
        # Whether the model may view the sender's memory. False if other code writes into its parameters.
        self._may_view = may_view
        # Takes a layout, and returns the binding to it of the model that the caller has then.
        self._make_binding = make_binding
        self._source = torch.device("cpu")  # the device of the sender's weights
        self._leftover = False  # whether the model's memory before the first commit is still to be freed
        self._offloader = Offloader("aiosync-receiver")
        self._back_buffers: StagingBuffers | None = None
        self._guard: ForwardGuard | None = None
        self._patience: float | None = None  # seconds that a guarded pass waits for a commit; None: no guard
        self._wait = CommitWait(self.gate)  # for readers, and for the other parts of a joint update
        self._staging = asyncio.Lock()  # held while an update is staged

    # -- the connection --------------------------------------------------------------------------

    def bind(self, layout: Layout, device: str) -> None:
        try:
            self._source = torch.device(device)
        except RuntimeError as exc:
            trouble = f"this process does not have the device of the sender's weights: {exc}"
            raise ProtocolError(trouble) from exc
        self.binding = self._make_binding(layout)

    async def prepare(self, transport: FramedTransport) -> None:
        inbound, back_buffers = self.inbound, self._back_buffers
        before: StagingBuffers | None = None
        if inbound is None or back_buffers is None or inbound.access.lent != transport.maps:
            # The first connection, or one of another kind than before.
            before = back_buffers
            inbound = self._transfer.inbound(self.binding.layout, transport, self._source)
            back_buffers = StagingBuffers(self.binding, inbound, self._source, may_view=self._may_view)
        if before is not None:
            await self._offloader.run(lambda _: back_buffers.reserve())
        elif not inbound.access.lent:
            await self._offloader.run(lambda _: inbound.prepare())
        # Set only now: if prepare() is cancelled above, the next call begins anew.
        self.inbound, self._back_buffers = inbound, back_buffers
        if before is not None:
            before.close()
        inbound.attach(transport)

    async def reserve(self) -> None:
        back_buffers = self._back_buffers
        assert back_buffers is not None
        await self._offloader.run(lambda _: back_buffers.reserve())
        await self._offloader.run(lambda _: self._forget_leftover())

    def _forget_leftover(self) -> None:
        """Free the memory that the model had before its first commit. Blocking."""
        self.binding.forget_replaced()
        self._leftover = False

    def disconnected(self) -> None:
        self.gate.heed(NO_REQUEST)  # a sender that was killed during a send would ask for ever

    async def detach(self, deadline: Deadline) -> bool:
        # Where there is a model, it has the weights.
        return not self.views_sender or await self._leave_sender(deadline, keep=self.model is None)

    async def _leave_sender(self, deadline: Deadline, *, keep: bool) -> bool:
        """Copy what lies in the sender's memory, and wait for those that may still read it. Return whether
        there is none."""
        assert self.inbound is not None
        await self._offloader.run(lambda _: self._take_over(keep=keep))
        self.views_sender = self.inbound.access.lent and not await self.gate.drain(deadline)
        return not self.views_sender

    def _take_over(self, *, keep: bool) -> None:
        """Copy the version in service into memory of this process. ``keep``: ``weights`` stay readable."""
        assert self.inbound is not None
        self.weights = own_copies(self.weights, None) if keep else {}
        leave(self.binding, self.inbound)
        self.binding.forget_replaced()

    # -- other threads, other models -------------------------------------------------------------

    def guard_forwards(self, patience: float) -> None:
        """Keep commits out of the model's forward passes, and call the context in threads.

        For a model and a context that other threads than this event loop's use (the blocking twins).
        ``patience``: seconds that a forward pass waits for a commit.
        """
        self._patience = patience
        self._wait.allow_blocking(True)
        if isinstance(self.model, nn.Module) and self._guard is None:
            self._guard = ForwardGuard(
                self.gate, self.model, patience, lambda: self._notifier.acting(self.version)
            )

    def _unguard(self) -> None:
        self._wait.allow_blocking(False)
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    async def rebind(self, model: WeightTarget | None, listener: UpdateListener, *, may_view: bool) -> None:
        """Apply updates to another model from now on, or notify another listener.

        Another model gets a copy of the weights in service, in memory of its own.

        Raises:
            LayoutMismatchError: the sender's weights do not fit the model. Nothing has changed.
        """
        async with self._staging:
            while (waiting := self._wait.job) is not None:  # it is staged for the former model
                self._wait.take_back()
                await waiting.done.wait()
            await self._rebind(model, listener, may_view)

    async def _rebind(self, model: WeightTarget | None, listener: UpdateListener, may_view: bool) -> None:
        inbound, former = self.inbound, self.model
        if self._back_buffers is None or inbound is None:
            raise NotConnectedError("this receiver was closed before it had another model")
        if model is not former or may_view != self._may_view:
            another = self._make_binding(self.binding.layout)
            await self.check_base(model if model is not former else None)
            views = self.weights or (receiver_tensors(former) if former is not None else {})
            own = await self._offloader.run(lambda _: own_copies(views, model))
            with LOCK:
                another.commit(Staged(own, frozenset(own), frozenset(own)))
            if model is not former:  # from now on the sender may write over what it views
                await self._offloader.run(lambda _: leave(self.binding, inbound))
            # Nothing is awaited from here on: a cancelled call has switched all or nothing.
            self.binding, self.model, self._may_view, self.weights = another, model, may_view, own
            # Readers that began before may read it still.
            self.views_sender, self._leftover = self.views_sender and bool(self.gate.readers()), True
            self._back_buffers = StagingBuffers(another, inbound, self._source, may_view=may_view)
            if self._patience is not None and model is not former:
                self._unguard()
                self.guard_forwards(self._patience)
        if listener is not self._notifier.listener:
            self._notifier = Notifier(listener)
            if self._guard is not None:
                self._guard.call_on_next_pass()

    # -- one update ------------------------------------------------------------------------------

    async def stage(self, pending: PendingUpdate) -> None:
        started = time.perf_counter()
        if self._back_buffers is not None and self._back_buffers.waits:
            # Not in the lock, as close() waits for that: the device may never be done.
            await self._offloader.settle(self._back_buffers.devices)
        async with self._staging:
            back_buffers, inbound, update = self._back_buffers, self.inbound, pending.update
            if back_buffers is None or inbound is None:
                raise NotConnectedError("this receiver was closed before it had staged an update")
            if self._leftover:
                await self._offloader.run(lambda _: self._forget_leftover())
            self.binding.refresh()
            if back_buffers.generation != self.binding.generation:
                # The worker has given the model another dtype, another device or other layers.
                back_buffers = StagingBuffers(self.binding, inbound, self._source, may_view=self._may_view)
                self._back_buffers = back_buffers
            if not inbound.is_here(update):
                await inbound.arrive(update)
            names = pending.names = back_buffers.names_of(update, self.version)
            if back_buffers.is_quick(update):
                staged, pairs = back_buffers.stage(update, names)
                copy_few(pairs)
            else:
                staged, pairs = await self._offloader.run(lambda _: back_buffers.stage(update, names))
                await self._offloader.copy(pairs)
            if self.binding.ties:
                self.binding.check(staged.views)
            if self._notifier.cascades:
                check_joint(update.joint, self.worker)  # the workers below would keep this part alone
                weights = in_format(self.strategy, staged.views)
                threads = None if self._patience is None else self._offloader
                await cascade(self._notifier.listener, self._model_id or "policy", weights, threads)
            pending.staged, pending.back_buffers = staged, back_buffers
        pending.seconds["stage"] = time.perf_counter() - started

    def has_staged(self, pending: PendingUpdate) -> bool:
        usable = pending.back_buffers is self._back_buffers and not self._staging.locked()
        return pending.staged is not None and usable

    @property
    def needs_sender(self) -> bool:
        # The model will view it there, or its dtype may change before the commit, which converts anew then.
        buffers = self._back_buffers
        return buffers is not None and (buffers.views_sender or buffers.converts)

    @property
    def may_view_sender(self) -> bool:
        """Whether the model views the sender's memory, or will after the next commit."""
        buffers = self._back_buffers
        return self.views_sender or (buffers is not None and buffers.views_sender)

    def take_at_once(self, pending: PendingUpdate) -> bool:
        inbound, back_buffers, binding = self.inbound, self._back_buffers, self.binding
        assert inbound is not None and back_buffers is not None
        update = pending.update
        awaits = self._leftover or self._staging.locked() or back_buffers.devices  # for those, settle() does
        if awaits or update.joint is not None or self._notifier.cascades:
            return False
        if back_buffers.converts:
            binding.refresh()  # otherwise the change of a dtype is found when the value that was sent is gone
        rebound = back_buffers.generation != binding.generation
        if rebound or not (inbound.is_here(update) and back_buffers.is_quick(update)):
            return False
        started = time.perf_counter()
        if update.names is not None:
            pending.names = back_buffers.names_of(update, self.version)
        staged, pairs = back_buffers.stage(update, pending.names)
        copy_few(pairs)
        if binding.ties:
            binding.check(staged.views)
        pending.staged, pending.back_buffers = staged, back_buffers
        pending.seconds["stage"] = time.perf_counter() - started
        return self._commit_at_once(pending, back_buffers, block=True)

    def _commit_at_once(self, pending: PendingUpdate, back_buffers: StagingBuffers, *, block: bool) -> bool:
        """Commit if the model has no reader, or ``block`` and none for long. Return whether that was done."""
        self.gate.heed(back_buffers.yield_request)
        commit = partial(self._put_in_service, pending)
        if not self.gate.commit_at_once(commit):
            pending.held_up_since = pending.held_up_since or time.perf_counter()
            if block:
                self._wait.block(commit)
            if not pending.committed:
                return False
        if back_buffers.hears_commits:
            back_buffers.committed(pending.names)
        return True

    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        back_buffers, joint = pending.back_buffers, pending.update.joint
        if self._back_buffers is None:
            raise Overtaken
        assert back_buffers is not None
        if joint is not None:
            job: Job = join(joint, self.worker, self.gate, lambda: self._in_service(pending))
        elif self._commit_at_once(pending, back_buffers, block=False):
            return
        else:
            job = submit([self.gate], lambda: self._put_in_service(pending))
        if not job.done.done():
            try:
                await self._wait.wait(job, on_wait)
            except asyncio.CancelledError:
                if pending.committed:
                    back_buffers.committed(pending.names)
                raise
        if not pending.committed:
            if job.done.cancelled():
                raise StaleStaging if job.taken_back else Overtaken
            job.done.result()
        back_buffers.committed(pending.names)

    def _put_in_service(self, pending: PendingUpdate) -> None:
        """Commit a staged update. Runs in any thread, while no reader uses the model."""
        staged, names, back_buffers = pending.staged, pending.names, pending.back_buffers
        assert staged is not None and back_buffers is not None
        started, devices = time.perf_counter(), back_buffers.written_by(names)
        wait_for_devices(devices)  # forward passes that are queued read the version before
        try:
            self.binding.commit(staged, names)
        finally:
            wait_for_devices(devices)
        self._record(pending, staged, started)

    @contextmanager
    def _in_service(self, pending: PendingUpdate) -> Iterator[None]:
        """As :meth:`_put_in_service`, for a part of a joint update. Undo the commit if the body raises."""
        staged, back_buffers = pending.staged, pending.back_buffers
        assert staged is not None and back_buffers is not None
        started, devices = time.perf_counter(), back_buffers.written_by(pending.names)
        before = self.version, self.in_service, self.weights, self.views_sender
        try:
            wait_for_devices(devices)
            with self.binding.committing(staged, pending.names, reversible=True):
                wait_for_devices(devices)
                self._record(pending, staged, started)
                yield
        except BaseException:
            self.version, self.in_service, self.weights, self.views_sender = before
            pending.committed = False
            wait_for_devices(devices)
            raise

    def _record(self, pending: PendingUpdate, staged: Staged, started: float) -> None:
        """Record which version is in service now, and notify the listener."""
        partial = pending.names is not None and self.weights
        self.weights = staged.merged_into(self.weights, pending.names or ()) if partial else staged.views
        views_sender = pending.back_buffers is not None and pending.back_buffers.views_sender
        self.version = self.in_service = pending.update.version
        self._leftover |= views_sender and not self.views_sender
        self.views_sender = views_sender
        pending.seconds["wait"] = started - (pending.held_up_since or started)
        self._wait.committed(pending.seconds["wait"])
        pending.committed = True
        if self._guard is not None and self._notifier.hears_acting:
            self._guard.call_on_next_pass()
        if self._notifier.committed is not None:
            self._notifier.committed(self.version)
        pending.seconds["commit"] = time.perf_counter() - started

    async def settle(self) -> None:
        if self._back_buffers is not None:
            await self._offloader.settle(self._back_buffers.reading_devices)

    def overtake(self) -> None:
        self._wait.overtake()

    # -- the end ---------------------------------------------------------------------------------

    @property
    def memory(self) -> int:
        return self._back_buffers.nbytes if self._back_buffers else 0

    async def close(self) -> None:
        """Release everything. The model keeps its version, in memory of its own."""
        back_buffers, self._back_buffers = self._back_buffers, None
        self._wait.withdraw()
        async with self._staging:  # an update that is being staged is finished first
            try:
                patience = Deadline.after(_LAST_READERS)
                if self.views_sender and not await self._leave_sender(patience, keep=False):
                    # Another process's sender keeps that memory until this process has ended.
                    logger.warning("worker %d is closed although its model is in use", self.worker)
            finally:
                self._unguard()
                self._release(back_buffers)

    def abandon_loop(self) -> None:
        self._unguard()
        back_buffers, self._back_buffers = self._back_buffers, None
        if self.views_sender:
            self._take_over(keep=False)
            self.views_sender = False
        self._release(back_buffers)

    def _release(self, back_buffers: StagingBuffers | None) -> None:
        self.inbound = None
        if back_buffers is not None:
            back_buffers.close()
        self._offloader.close()
