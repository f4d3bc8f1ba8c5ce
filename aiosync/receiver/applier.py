"""Apply updates to a model: stage each update, then commit it while no reader uses the model."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar

import msgspec
import torch
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync._options import SchemeOptions
from aiosync.errors import LayoutMismatchError, NotConnectedError, ProtocolError
from aiosync.protocol.frames import Update, Welcome
from aiosync.receiver.commit_gate import LOCK, CommitGate, CommitJob, commit_now, submit
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.receiver.joint_commit import JointPart, drop_out, join, leave
from aiosync.receiver.listeners import UpdateListener, in_format
from aiosync.receiver.staging import StagingBuffers
from aiosync.transfer.base import InboundTransfer, MemoryAccess, Transfer
from aiosync.transports._offload import Offloader
from aiosync.transports.base import Transport
from aiosync.weights.binding import Binding, Staged
from aiosync.weights.copying import copy_few
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import WeightTarget, receiver_tensors

__all__ = ["Overtaken", "PendingUpdate", "WeightApplier"]

# Who reads, in this task and those that it has started: a body inside a body is the same reader.
_reader: ContextVar[object] = ContextVar("aiosync_reader")


class PendingUpdate(msgspec.Struct, eq=False):
    """An update that has arrived and is not committed yet.

    Attributes:
        update: the sender's frame.
        staged: its tensors, once they can be committed.
        names: the entries that were sent, aliases included; None: all.
        back_buffers: the buffers that it was staged in.
        seconds: phase (``stage``, ``wait``, ``commit``) -> seconds that it took.
        committed: whether it is in service.
    """

    update: Update
    staged: Staged | None = None
    names: Collection[str] | None = None
    back_buffers: StagingBuffers | None = None
    seconds: dict[str, float] = {}
    committed: bool = False


class Overtaken(Exception):
    """A newer version arrived, or the receiver was closed, while a commit waited for readers."""


class WeightApplier:
    """Applies updates to one model.

    Args:
        spec: the scheme's options.
        strategy: how weights are applied.
        model: the model; None if the caller only reads :attr:`weights`.
        model_id: the model's name.
        follower: notified of each update.
        worker: the worker's index.
        may_view: whether the model may view the sender's memory. False if other code writes into its
            parameters.
        transfer: makes the transfer by which updates arrive.
        bind: takes the sender's layout. Returns the model's binding to it.

    Attributes:
        inbound: the transfer by which updates arrive, once there is a connection.
        version: the version in service, -1 before the first.
        weights: the tensors in service, name -> tensor.
        gate: blocks commits while a reader uses the model.
    """

    def __init__(
        self,
        spec: SchemeOptions,
        strategy: WeightStrategy,
        model: WeightTarget | None,
        model_id: str | None,
        follower: UpdateListener,
        worker: int,
        *,
        may_view: bool,
        transfer: Transfer,
        bind: Callable[[Layout], Binding],
    ) -> None:
        self.model = model
        self.version = -1
        self.weights: Mapping[str, Tensor] = {}
        self.gate = CommitGate()
        self._spec = spec
        self._strategy = strategy
        self._model_id = model_id
        self._follower = follower
        self.worker = worker
        self._may_view = may_view
        self._transfer = transfer
        self._bind = bind
        # Whether the version in service lies in the sender's memory.
        self._viewing = False
        # Whether the model's own memory, which the first commit replaced, is still to be freed.
        self._leftover = False
        self.inbound: InboundTransfer | None = None
        # The device of the sender's weights.
        self._source = torch.device("cpu")
        self._offloader = Offloader("aiosync-receiver")
        self._binding: Binding | None = None
        self._back_buffers: StagingBuffers | None = None
        self._guard: ForwardGuard | None = None
        # Seconds that a guarded forward pass waits for a commit; None: there is no guard.
        self._patience: float | None = None
        # The version that the follower was last notified of by acting().
        self._acted = -1
        # The commit that waits for readers, or for the other parts of its joint update.
        self._waiting: CommitJob | JointPart | None = None
        # Held while an update is staged.
        self._staging = asyncio.Lock()

    @property
    def ready(self) -> bool:
        """Whether updates can be staged."""
        return self._back_buffers is not None

    @property
    def memory(self) -> int:
        """Bytes that staging has allocated in this process."""
        return self._back_buffers.nbytes if self._back_buffers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self._binding.layout.nbytes if self._binding else 0

    def open(self, wire_layout: object, device: str) -> None:
        """Bind the model to the sender's layout.

        Raises:
            LayoutMismatchError: model and layout do not fit.
            ProtocolError: the layout is malformed, or this process does not have the device.
            UnsupportedTensorError: the model has a tensor that cannot be received into.
        """
        try:
            self._source = torch.device(device)
        except RuntimeError as exc:
            raise ProtocolError(f"the sender's weights are on a device that is none here: {exc}") from exc
        self._binding = self._bind(Layout.from_wire(wire_layout))

    @property
    def signature(self) -> str:
        """The signature of the layout that the model is bound to; "" before :meth:`open`."""
        return self._binding.layout.identity if self._binding is not None else ""

    def check_layout(self, welcome: Welcome) -> None:
        """Check that the sender still has the layout that the model is bound to, after a reconnection.

        Raises:
            LayoutMismatchError: the sender has another layout.
            ProtocolError: the layout is malformed.
        """
        assert self._binding is not None
        bound = self._binding.layout
        if welcome.layout is None and welcome.signature == bound.identity:
            return
        found = Layout.from_wire(welcome.layout)
        if found != bound:
            bound.check_receiver(found)
            raise LayoutMismatchError(unexpected=["ties or an order of entries that it did not have before"])

    @property
    def may_fetch(self) -> bool:
        """Whether the next update may be fetched now."""
        return True

    async def make_room(self) -> None:
        """Wait until :attr:`may_fetch` is true."""
        return

    @property
    def borrows(self) -> bool:
        """Whether updates lie in the sender's memory, so that this process keeps no bytes of them."""
        return self.inbound is not None and self.inbound.access.lent

    @property
    def have(self) -> int:
        """The version whose bytes, as they arrived, this process still has; -1 for none."""
        return self.version if self.inbound is not None and not self.inbound.access.lent else -1

    def expect(self, update: Update) -> None:
        """Note an update that has arrived, also if it will not be applied."""
        if self.inbound is not None:
            self.inbound.expect(update)

    @property
    def can_read_sender(self) -> bool:
        """Whether blocks of the next update may be left in the sender's memory."""
        return self.inbound is not None and self.inbound.can_read_sender

    def follow(self, via: Sequence[str]) -> None:
        """Note the ids of the senders that this connection's updates pass. A relay raises if its own is among
        them."""

    def follow_another(self) -> None:
        """Follow another sender. The version in service counts as older than all of its versions."""
        self.version = -1

    async def prepare(self, transport: Transport) -> None:
        """Prepare for updates over this connection."""
        inbound, back_buffers = self.inbound, self._back_buffers
        before: StagingBuffers | None = None
        if inbound is None or back_buffers is None or inbound.access.lent != transport.maps:
            # The first connection, or one of another kind than before.
            before = back_buffers
            inbound, back_buffers = self._new_stager(transport)
        if before is not None:
            await self._offloader.run(lambda _: back_buffers.reserve())
        elif not inbound.access.lent:
            await self._offloader.run(lambda _: inbound.prepare())
        # Set only now: if prepare() is cancelled above, the next call begins anew.
        self.inbound, self._back_buffers = inbound, back_buffers
        if before is not None:
            before.close()
        inbound.attach(transport)

    def _new_stager(self, transport: Transport) -> tuple[InboundTransfer, StagingBuffers]:
        assert self._binding is not None
        inbound = self._transfer.inbound(self._binding.layout, transport, self._source)
        return inbound, self._back_buffers_for(self._binding, inbound)

    def _back_buffers_for(self, binding: Binding, inbound: InboundTransfer) -> StagingBuffers:
        views = inbound.access.viewable and self._may_view
        copies = inbound.access is not MemoryAccess.PRIVATE and not views
        return StagingBuffers(binding, inbound, self._source, copies=copies)

    @property
    def views_sender(self) -> bool:
        """Whether the next commit makes the model view the sender's memory."""
        return self._may_view and self.inbound is not None and self.inbound.access.viewable

    @property
    def needs_sender(self) -> bool:
        """Whether a staged update may be read again in the sender's memory: the model will view it there, or
        it was converted for a model whose dtype may change before the commit."""
        return self.views_sender or (self._back_buffers is not None and self._back_buffers.converts)

    async def detach(self) -> None:
        """Copy the version in service into memory of this process: the sender will write into its own."""
        if self._viewing:
            # Where there is a model, it has the weights.
            await self._offloader.run(lambda _: self._take_over(keep=self.model is None))

    def _take_over(self, *, keep: bool) -> None:
        assert self._binding is not None
        assert self.inbound is not None
        self._binding.detach(self.inbound.is_lent)
        self._binding.forget_replaced()
        self.weights = {name: t.clone() for name, t in self.weights.items()} if keep else {}
        self._viewing = False

    async def reserve(self) -> None:
        """Take all memory that will be needed, so that later updates run into warm pages."""
        back_buffers, binding = self._back_buffers, self._binding
        assert back_buffers is not None and binding is not None

        def warm(_: object) -> None:
            back_buffers.reserve()
            binding.forget_replaced()
            self._leftover = False

        await self._offloader.run(warm)

    def guard_forwards(self, patience: float) -> None:
        """Keep commits out of the model's forward passes, and call the context in threads.

        For a model and a context that other threads than this event loop's use (the blocking twins).

        Args:
            patience: seconds that a forward pass waits for a commit.
        """
        self._patience = patience
        if isinstance(self.model, nn.Module) and self._guard is None:
            self._guard = ForwardGuard(self.gate, self.model, patience, self._acting)

    def _remove_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.remove()

    def _acting(self) -> None:
        if self._acted != self.version >= 0:
            self._acted = self.version
            self._follower.acting(self.version)

    async def rebind(self, model: WeightTarget | None, follower: UpdateListener, *, may_view: bool) -> None:
        """Go on with another model, or with another follower.

        Another model gets a copy of the weights in service, in memory of its own.

        Raises:
            LayoutMismatchError: the sender's weights do not fit the model. Nothing has changed.
        """
        while True:
            async with self._staging:
                waiting = self._waiting
                if waiting is None:
                    await self._rebind(model, follower, may_view)
                    return
            await asyncio.wait([asyncio.wrap_future(waiting.done)])

    async def _rebind(self, model: WeightTarget | None, follower: UpdateListener, may_view: bool) -> None:
        binding, inbound = self._binding, self.inbound
        if self._back_buffers is None or inbound is None or binding is None:
            raise NotConnectedError("this receiver was closed before it had another model")
        if model is not self.model or may_view != self._may_view:
            another = self._bind(binding.layout)
            views = self.weights or (receiver_tensors(self.model) if self.model is not None else {})
            own = await self._offloader.run(lambda _: _own_copies(views, model))
            with LOCK:
                another.commit(Staged(own, frozenset(own), frozenset(own)))
            if model is not self.model:  # from now on the sender may write over what it views
                await self._offloader.run(lambda _: binding.detach(inbound.is_lent))
            self._binding, self.model, self._may_view, self.weights = another, model, may_view, own
            self._viewing, self._leftover = False, True
            self._back_buffers = self._back_buffers_for(another, inbound)
            if self._patience is not None:
                self._remove_guard()
                self.guard_forwards(self._patience)
        if follower is not self._follower:
            self._follower, self._acted = follower, -1

    async def stage(self, pending: PendingUpdate) -> None:
        """Bring the bytes to where a commit can use them; in a thread if that takes long.

        Raises:
            Exception: what mapping, checking or the context raises; ``pending`` is as it was.
        """
        started = time.perf_counter()
        async with self._staging:
            back_buffers = self._back_buffers
            if back_buffers is None or self.inbound is None or self._binding is None:
                raise NotConnectedError("this receiver was closed before it had staged an update")
            if self._leftover:
                await self._offloader.run(lambda _: self._forget_leftover())
            self._binding.refresh()
            if back_buffers.generation != self._binding.generation:
                # The worker has given the model another dtype, another device or other layers.
                back_buffers = self._back_buffers = self._back_buffers_for(self._binding, self.inbound)
            if not self.inbound.is_here(pending.update):
                await self.inbound.arrive(pending.update)
            names = pending.names = self._names_of(pending.update)
            if back_buffers.is_quick(pending.update):
                staged, pairs = back_buffers.stage(pending.update, names)
                copy_few(pairs)
            else:
                staged, pairs = await self._offloader.run(lambda _: back_buffers.stage(pending.update, names))
                await self._offloader.copy(pairs)
            self._binding.check(staged.views)
            if self._follower.cascades:
                await self._cascade(staged.views)
            pending.staged, pending.back_buffers = staged, back_buffers
        pending.seconds["stage"] = time.perf_counter() - started

    def has_staged(self, pending: PendingUpdate) -> bool:
        """Whether an update is staged for the model as it is bound now."""
        return (
            pending.staged is not None
            and pending.back_buffers is self._back_buffers
            and not self._staging.locked()
        )

    async def _cascade(self, views: Mapping[str, Tensor]) -> None:
        follower, model_id = self._follower, self._model_id or "policy"
        weights = in_format(self._strategy, views)
        if self._patience is None:
            result = follower.updating(model_id, weights)
        else:
            result = await self._offloader.run(lambda _: follower.updating(model_id, weights))
        if inspect.isawaitable(result):
            await result

    def _forget_leftover(self) -> None:
        """Free the memory that the model had before its first commit. Done here, since it takes time."""
        assert self._binding is not None
        self._binding.forget_replaced()
        self._leftover = False

    def take_at_once(self, pending: PendingUpdate) -> bool:
        """Stage and commit synchronously if no step needs to await. Return whether that was done.

        Raises:
            Exception: as :meth:`stage` and :meth:`commit`.
        """
        back_buffers = self._back_buffers
        assert back_buffers is not None and self.inbound is not None and self._binding is not None
        quick = self.inbound.is_here(pending.update) and back_buffers.is_quick(pending.update)
        if back_buffers.converts:
            self._binding.refresh()  # else that is found out when the value that was sent is gone
        rebound = back_buffers.generation != self._binding.generation
        held_up = self._leftover or rebound or self._staging.locked()
        if pending.update.joint is not None or self._follower.cascades or held_up or not quick:
            return False
        started = time.perf_counter()
        if pending.update.names is not None:
            pending.names = self._names_of(pending.update)
        staged, pairs = back_buffers.stage(pending.update, pending.names)
        if pairs:
            copy_few(pairs)
        self._binding.check(staged.views)
        pending.staged, pending.back_buffers = staged, back_buffers
        pending.seconds["stage"] = time.perf_counter() - started
        return self._commit_now(pending)

    def _commit_now(self, pending: PendingUpdate) -> bool:
        if not commit_now(self.gate, self._commit_alone, pending):
            return False
        pending.seconds["wait"] = 0.0
        self._committed(pending)
        return True

    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        """Commit a staged update. Call ``on_wait`` if it has to wait for readers.

        Raises:
            Exception: what the model raises; the version before is in service, whole.
            Overtaken: :meth:`overtake` or :meth:`close` was called before.
            CancelledError: the commit was withdrawn, unless ``pending.committed`` says otherwise.
        """
        if self._back_buffers is None:
            raise Overtaken
        started = time.perf_counter()
        joint = pending.update.joint
        if joint is None and self._commit_now(pending):
            return
        job: CommitJob | JointPart
        if joint is None:
            job = submit([self.gate], lambda: self._commit_alone(pending))
        else:
            job = join(joint, self.worker, self.gate, lambda: self._committing(pending))
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
                    leave(joint, self.worker, job)
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

    def forget(self) -> None:
        """Drop the update that arrived last, unused."""
        if self.inbound is not None:
            self.inbound.forget()

    def disconnected(self) -> None:
        """Called when the connection to the sender is lost."""

    def overtake(self) -> None:
        """Cancel a commit that waits for readers or for the other parts of a joint update: a newer version
        is there. The waiting commit would only keep the sender's memory in use."""
        match self._waiting:
            case CommitJob() as job:
                job.withdraw()
            case JointPart() as part:
                drop_out(part)

    def _commit_alone(self, pending: PendingUpdate) -> None:
        """The commit itself. Runs in the thread that freed the gate, while no reader uses the model."""
        assert self._binding is not None and pending.staged is not None
        started = time.perf_counter()
        self._binding.commit(pending.staged, pending.names)
        self._in_service(pending, started)

    @contextmanager
    def _committing(self, pending: PendingUpdate) -> Iterator[None]:
        """The same as one part of a joint commit. It is undone if the body raises."""
        assert self._binding is not None and pending.staged is not None
        started = time.perf_counter()
        before = self.version, self.weights, self._viewing
        try:
            with self._binding.committing(pending.staged, pending.names, reversible=True):
                self._in_service(pending, started)
                yield
        except BaseException:
            self.version, self.weights, self._viewing = before
            pending.committed = False
            raise

    def _names_of(self, update: Update) -> Collection[str] | None:
        """The names that an update changes; None: all."""
        # The update names what changed since its base. A model that has another version needs all entries.
        if update.names is None or update.base != self.version:
            return None
        assert self._binding is not None
        names = set(update.names)
        aliases = self._binding.layout.aliases
        return names.union(alias for alias, name in aliases.items() if name in names)

    def _in_service(self, pending: PendingUpdate, started: float) -> None:
        staged = pending.staged
        assert staged is not None
        if pending.names is None or not self.weights:
            self.weights = staged.views
        else:  # an entry that was not sent stays where it is, unless the sender will write into that memory
            kept = [name for name in self.weights if name in staged.lasting and name not in pending.names]
            before = {name: self.weights[name] for name in kept}
            before |= {name: before[name].clone() for name in kept if name in staged.leaving}
            self.weights = {**staged.views, **before}
        self.version = pending.update.version
        views_sender = self.views_sender
        self._leftover |= views_sender and not self._viewing
        self._viewing = views_sender
        pending.committed = True
        self._follower.committed(self.version)
        pending.seconds["commit"] = time.perf_counter() - started

    @asynccontextmanager
    async def pinned(self, deadline: Deadline) -> AsyncIterator[int]:
        """Block commits for the length of the body. Yield the number of the version in service.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        reader = _reader.get(None) or object()
        ticket = object()
        await self.gate.enter(ticket, reader, deadline)
        reset = _reader.set(reader)
        try:
            yield self.version
        finally:
            self.gate.leave(ticket)
            with suppress(ValueError):  # an abandoned generator is closed in another context than its own
                _reader.reset(reset)

    async def close(self) -> None:
        """Release everything. The model keeps its version, in memory of its own.

        Nothing is committed once this has begun.
        """
        self._remove_guard()
        back_buffers, self._back_buffers = self._back_buffers, None
        self.overtake()
        async with self._staging:  # an update that is being staged is finished first
            try:
                if self._viewing:
                    await self._offloader.run(lambda _: self._take_over(keep=False))
            finally:
                if back_buffers is not None:
                    back_buffers.close()
                self._offloader.close()

    def abandon_loop(self) -> None:
        """Release what can be released after the endpoint's event loop has been closed."""
        self._remove_guard()
        back_buffers, self._back_buffers = self._back_buffers, None
        if self._viewing:
            self._take_over(keep=False)
        if back_buffers is not None:
            back_buffers.close()
        self._offloader.close()


def _own_copies(views: Mapping[str, Tensor], model: WeightTarget | None) -> dict[str, Tensor]:
    """Copies of weights, each on the device and of the dtype of the model's tensor. Blocking."""
    targets = receiver_tensors(model) if model is not None else {}
    like = {name: target for name, target in targets.items() if not target.is_meta}
    return {
        name: view.to(like[name].device, like[name].dtype, copy=True) if name in like else view.clone()
        for name, view in views.items()
    }
