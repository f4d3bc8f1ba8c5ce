"""Taking an update into the model: stage it, then commit it when nobody reads."""

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
from aiosync.errors import LayoutMismatchError, NotConnectedError, ProtocolError
from aiosync.protocol.frames import Update, Welcome
from aiosync.schemes.arrival import Arrival
from aiosync.schemes.cascade import Follower, in_format
from aiosync.schemes.forward_guard import ForwardGuard
from aiosync.schemes.gate import LOCK, CommitGate, CommitJob, commit_now, submit
from aiosync.schemes.joint import JointPart, drop_out, join, leave
from aiosync.schemes.spec import SchemeSpec
from aiosync.schemes.stager import Stager
from aiosync.transports._offload import Offloader
from aiosync.transports.base import Transport
from aiosync.weights.binding import Binding, Staged
from aiosync.weights.copying import copy_few
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import WeightTarget, receiver_tensors

__all__ = ["Held", "Intake", "Overtaken"]

# Who reads, in this task and those that it has started: a body inside a body is the same reader.
_reader: ContextVar[object] = ContextVar("aiosync_reader")


class Held(msgspec.Struct, eq=False):
    """An update in hand, and how far it has come.

    Attributes:
        staged: its tensors, once they can be committed.
        names: the entries that it is about, aliases included; None: all.
        stager: what staged it.
    """

    update: Update
    staged: Staged | None = None
    names: Collection[str] | None = None
    stager: Stager | None = None
    seconds: dict[str, float] = {}
    committed: bool = False


class Overtaken(Exception):
    """A newer version came, or the end, while a commit waited."""


class Intake:
    """One receiving model.

    Args:
        spec: the scheme's options.
        strategy: how weights are applied.
        model: where they go; None if they are only to be looked at.
        model_id: its name.
        follower: told of each update.
        worker: the worker's index.
        may_view: whether the model may view the sender's memory: nobody else writes into its parameters.
        make_arrival: makes the place where updates of a layout come in that a connection brings, given where
            the sender's weights lie.
        bind: says how commits reach the model, given the sender's layout.

    Attributes:
        arrival: that place, once there is a connection.
        version: the version in service, -1 before the first.
        weights: the tensors in service, name -> tensor.
        gate: keeps commits out while somebody reads.
    """

    def __init__(
        self,
        spec: SchemeSpec,
        strategy: WeightStrategy,
        model: WeightTarget | None,
        model_id: str | None,
        follower: Follower,
        worker: int,
        *,
        may_view: bool,
        make_arrival: Callable[[Layout, Transport, torch.device], Arrival],
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
        self._make_arrival = make_arrival
        self._bind = bind
        self._viewing = False
        self._leftover = False
        self.arrival: Arrival | None = None
        self._source = torch.device("cpu")
        self._offloader = Offloader("aiosync-receiver")
        self._binding: Binding | None = None
        self._stager: Stager | None = None
        self._guard: ForwardGuard | None = None
        self._patience: float | None = None
        self._acted = -1
        self._waiting: CommitJob | JointPart | None = None
        self._staging = asyncio.Lock()

    @property
    def ready(self) -> bool:
        """Whether updates can be taken in."""
        return self._stager is not None

    @property
    def memory(self) -> int:
        """Bytes taken for staging in this process."""
        return self._stager.nbytes if self._stager else 0

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self._binding.layout.nbytes if self._binding else 0

    def open(self, wire_layout: object, device: str) -> None:
        """Bind the model to the sender's layout.

        Raises:
            LayoutMismatchError: they do not fit.
            ProtocolError: the layout is malformed, or the device is none.
            UnsupportedTensorError: the model has a tensor that cannot be received into.
        """
        try:
            self._source = torch.device(device)
        except RuntimeError as exc:
            raise ProtocolError(f"the sender's weights are on a device that is none here: {exc}") from exc
        self._binding = self._bind(Layout.from_wire(wire_layout))

    @property
    def signature(self) -> str:
        """Of the layout that the model is bound to; "" if it is not bound yet."""
        return self._binding.layout.identity if self._binding is not None else ""

    def check_layout(self, welcome: Welcome) -> None:
        """Check that a sender found again has the layout that the model is bound to.

        Raises:
            LayoutMismatchError: it has another.
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
        """Whether there is a place for the next update."""
        return True

    async def make_room(self) -> None:
        """Wait until there is one."""
        return

    @property
    def borrows(self) -> bool:
        """Whether updates come to lie in the sender's memory, so that nothing of them stays here."""
        return self.arrival is not None and self.arrival.borrowed

    @property
    def have(self) -> int:
        """The version whose bytes, as they came, are still here; -1 for none."""
        return self.version if self.arrival is not None and not self.arrival.borrowed else -1

    def expect(self, update: Update) -> None:
        """An update has come, whether it will be used or not."""
        if self.arrival is not None:
            self.arrival.expect(update)

    @property
    def peeks(self) -> bool:
        """Whether blocks of the next update may be left in the sender's memory."""
        return self.arrival is not None and self.arrival.peeks

    def follow(self, via: Sequence[str]) -> None:
        """The updates of this connection pass these senders, by their ids. May raise."""

    def follow_another(self) -> None:
        """Another sender's versions say nothing about the one in service, so it counts as older than all."""
        self.version = -1

    async def prepare(self, transport: Transport) -> None:
        """Be ready for updates over this connection."""
        arrival, stager = self.arrival, self._stager
        before: Stager | None = None
        if arrival is None or stager is None or arrival.borrowed != transport.maps:
            # The first connection, or the sender is reached another way than before.
            before = stager
            arrival, stager = self._new_stager(transport)
        if before is not None:
            await self._offloader.run(lambda _: stager.reserve())
        elif not arrival.borrowed:
            await self._offloader.run(lambda _: arrival.prepare())
        # Only now: if this is cut short it is done again.
        self.arrival, self._stager = arrival, stager
        if before is not None:
            before.close()
        arrival.attach(transport)

    def _new_stager(self, transport: Transport) -> tuple[Arrival, Stager]:
        assert self._binding is not None
        arrival = self._make_arrival(self._binding.layout, transport, self._source)
        return arrival, self._stager_for(self._binding, arrival)

    def _stager_for(self, binding: Binding, arrival: Arrival) -> Stager:
        elsewhere = arrival.borrowed or arrival.holds  # it does not lie in memory of this process's own
        copies = elsewhere and not (arrival.holds and self._may_view)
        return Stager(binding, arrival, self._source, copies=copies)

    @property
    def views_sender(self) -> bool:
        """Whether what comes now is put in service where it lies, in the sender's memory."""
        return self._may_view and self.arrival is not None and self.arrival.holds

    @property
    def needs_sender(self) -> bool:
        """Whether a staged update may be read again where the sender wrote it: it is viewed there, or is
        converted for a model whose dtype may change before the commit."""
        return self.views_sender or (self._stager is not None and self._stager.converts)

    async def detach(self) -> None:
        """Have what is in service lie in memory of this process's own: the sender will write into its."""
        if self._viewing:
            # Where there is a model, it has the weights.
            await self._offloader.run(lambda _: self._take_over(keep=self.model is None))

    def _take_over(self, *, keep: bool) -> None:
        assert self._binding is not None
        assert self.arrival is not None
        self._binding.detach(self.arrival.is_lent)
        self._binding.forget_replaced()
        self.weights = {name: t.clone() for name, t in self.weights.items()} if keep else {}
        self._viewing = False

    async def reserve(self) -> None:
        """Take all memory that will be needed, so that later updates run into warm pages."""
        stager, binding = self._stager, self._binding
        assert stager is not None and binding is not None

        def warm(_: object) -> None:
            stager.reserve()
            binding.forget_replaced()
            self._leftover = False

        await self._offloader.run(warm)

    def guard_forwards(self, patience: float) -> None:
        """The model and its context belong to other threads than this loop's: keep commits out of forward
        passes, and what the context does out of the loop."""
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

    async def rebind(self, model: WeightTarget | None, follower: Follower, *, may_view: bool) -> None:
        """Go on with another model, which gets what is in service in memory of its own, or another follower.

        Raises:
            LayoutMismatchError: the sender's weights do not fit it; all stays as it was.
        """
        while True:
            async with self._staging:
                waiting = self._waiting
                if waiting is None:
                    await self._rebind(model, follower, may_view)
                    return
            await asyncio.wait([asyncio.wrap_future(waiting.done)])

    async def _rebind(self, model: WeightTarget | None, follower: Follower, may_view: bool) -> None:
        binding, arrival = self._binding, self.arrival
        if self._stager is None or arrival is None or binding is None:
            raise NotConnectedError("this receiver was closed before it had another model")
        if model is not self.model or may_view != self._may_view:
            another = self._bind(binding.layout)
            views = self.weights or (receiver_tensors(self.model) if self.model is not None else {})
            own = await self._offloader.run(lambda _: _own_copies(views, model))
            with LOCK:
                another.commit(Staged(own, frozenset(own), frozenset(own)))
            if model is not self.model:  # nobody keeps what it views from being written to any more
                await self._offloader.run(lambda _: binding.detach(arrival.is_lent))
            self._binding, self.model, self._may_view, self.weights = another, model, may_view, own
            self._viewing, self._leftover = False, True
            self._stager = self._stager_for(another, arrival)
            if self._patience is not None:
                self._remove_guard()
                self.guard_forwards(self._patience)
        if follower is not self._follower:
            self._follower, self._acted = follower, -1

    async def stage(self, held: Held) -> None:
        """Bring the bytes to where a commit can use them, off the loop where that takes long.

        Raises:
            Exception: what mapping, checking or the context raises; ``held`` is as it was.
        """
        started = time.perf_counter()
        async with self._staging:
            stager = self._stager
            if stager is None or self.arrival is None or self._binding is None:
                raise NotConnectedError("this receiver was closed before it had staged an update")
            if self._leftover:
                await self._offloader.run(lambda _: self._forget_leftover())
            self._binding.refresh()
            if stager.generation != self._binding.generation:
                # The worker has given the model another dtype, another device or other layers.
                stager = self._stager = self._stager_for(self._binding, self.arrival)
            if not self.arrival.is_here(held.update):
                await self.arrival.arrive(held.update)
            names = held.names = self._names_of(held.update)
            if stager.is_quick(held.update):
                staged, pairs = stager.stage(held.update, names)
                copy_few(pairs)
            else:
                staged, pairs = await self._offloader.run(lambda _: stager.stage(held.update, names))
                await self._offloader.copy(pairs)
            self._binding.check(staged.views)
            if self._follower.cascades:
                await self._cascade(staged.views)
            held.staged, held.stager = staged, stager
        held.seconds["stage"] = time.perf_counter() - started

    def has_staged(self, held: Held) -> bool:
        """Whether an update is ready to be committed into the model that is bound, and goes on to be."""
        return held.staged is not None and held.stager is self._stager and not self._staging.locked()

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
        """Free the memory of this process's own that the model had, here and not in the next commit."""
        assert self._binding is not None
        self._binding.forget_replaced()
        self._leftover = False

    def take_at_once(self, held: Held) -> bool:
        """Stage and commit with nothing awaited, where that is possible; returns whether it has been done.

        Raises:
            Exception: as :meth:`stage` and :meth:`commit`.
        """
        stager = self._stager
        assert stager is not None and self.arrival is not None and self._binding is not None
        quick = self.arrival.is_here(held.update) and stager.is_quick(held.update)
        if stager.converts:
            self._binding.refresh()  # else that is found out when the value that was sent is gone
        rebound = stager.generation != self._binding.generation
        held_up = self._leftover or rebound or self._staging.locked()
        if held.update.joint is not None or self._follower.cascades or held_up or not quick:
            return False
        started = time.perf_counter()
        if held.update.names is not None:
            held.names = self._names_of(held.update)
        staged, pairs = stager.stage(held.update, held.names)
        if pairs:
            copy_few(pairs)
        self._binding.check(staged.views)
        held.staged, held.stager = staged, stager
        held.seconds["stage"] = time.perf_counter() - started
        return self._commit_now(held)

    def _commit_now(self, held: Held) -> bool:
        if not commit_now(self.gate, self._commit_alone, held):
            return False
        held.seconds["wait"] = 0.0
        self._committed(held)
        return True

    async def commit(self, held: Held, on_wait: Callable[[], None]) -> None:
        """Put a staged update in service; ``on_wait`` is called if readers hold that up.

        Raises:
            Exception: what the model raises; the version before is in service, whole.
            Overtaken: :meth:`overtake` or :meth:`close` was called before.
            CancelledError: the commit was withdrawn, unless ``held.committed`` says otherwise.
        """
        if self._stager is None:
            raise Overtaken
        started = time.perf_counter()
        joint = held.update.joint
        if joint is None and self._commit_now(held):
            return
        job: CommitJob | JointPart
        if joint is None:
            job = submit([self.gate], lambda: self._commit_alone(held))
        else:
            job = join(joint, self.worker, self.gate, lambda: self._committing(held))
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
                if held.committed:
                    self._committed(held)
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
        held.seconds["wait"] = time.perf_counter() - started - held.seconds.get("commit", 0.0)
        self._committed(held)

    def _committed(self, held: Held) -> None:
        if held.stager is not None and held.stager.hears_commits:
            held.stager.committed(held.names)

    def forget(self) -> None:
        """The update in hand is given back unused."""
        if self.arrival is not None:
            self.arrival.forget()

    def disconnected(self) -> None:
        """The connection to the sender broke."""

    def overtake(self) -> None:
        """There is something newer: what waits for readers, or for its part in a joint update, is not to be
        committed any more. It would only keep the sender's memory from being used again."""
        match self._waiting:
            case CommitJob() as job:
                job.withdraw()
            case JointPart() as part:
                drop_out(part)

    def _commit_alone(self, held: Held) -> None:
        """The commit itself. Runs in whatever thread freed the gate, nobody reading meanwhile."""
        assert self._binding is not None and held.staged is not None
        started = time.perf_counter()
        self._binding.commit(held.staged, held.names)
        self._in_service(held, started)

    @contextmanager
    def _committing(self, held: Held) -> Iterator[None]:
        """The same as one part of a joint commit: taken back if the body raises."""
        assert self._binding is not None and held.staged is not None
        started = time.perf_counter()
        before = self.version, self.weights, self._viewing
        try:
            with self._binding.committing(held.staged, held.names, reversible=True):
                self._in_service(held, started)
                yield
        except BaseException:
            self.version, self.weights, self._viewing = before
            held.committed = False
            raise

    def _names_of(self, update: Update) -> Collection[str] | None:
        """The names that an update is about; None: all."""
        # What changed against a version that this model never had is not all that changed for it.
        if update.names is None or update.base != self.version:
            return None
        assert self._binding is not None
        names = set(update.names)
        aliases = self._binding.layout.aliases
        return names.union(alias for alias, name in aliases.items() if name in names)

    def _in_service(self, held: Held, started: float) -> None:
        staged = held.staged
        assert staged is not None
        if held.names is None or not self.weights:
            self.weights = staged.views
        else:  # what was not sent is where it was, unless that is memory which the sender will write again
            kept = [name for name in self.weights if name in staged.lasting and name not in held.names]
            before = {name: self.weights[name] for name in kept}
            before |= {name: before[name].clone() for name in kept if name in staged.leaving}
            self.weights = {**staged.views, **before}
        self.version = held.update.version
        views_sender = self.views_sender
        self._leftover |= views_sender and not self._viewing
        self._viewing = views_sender
        held.committed = True
        self._follower.committed(self.version)
        held.seconds["commit"] = time.perf_counter() - started

    @asynccontextmanager
    async def pinned(self, deadline: Deadline) -> AsyncIterator[int]:
        """Keep the version that is in service for the length of the body; gives its number.

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
        """Let go of everything; the model keeps its version, in memory of its own. Nothing is committed
        after this has begun."""
        self._remove_guard()
        stager, self._stager = self._stager, None
        self.overtake()
        async with self._staging:  # what is being staged is brought to its end first
            try:
                if self._viewing:
                    await self._offloader.run(lambda _: self._take_over(keep=False))
            finally:
                if stager is not None:
                    stager.close()
                self._offloader.close()

    def abandon_loop(self) -> None:
        """Release what can be released without the loop that this endpoint lived on."""
        self._remove_guard()
        stager, self._stager = self._stager, None
        if self._viewing:
            self._take_over(keep=False)
        if stager is not None:
            stager.close()
        self._offloader.close()


def _own_copies(views: Mapping[str, Tensor], model: WeightTarget | None) -> dict[str, Tensor]:
    """Copies of weights, each where and as the model's own tensor of that name is. Blocking."""
    targets = receiver_tensors(model) if model is not None else {}
    like = {name: target for name, target in targets.items() if not target.is_meta}
    return {
        name: view.to(like[name].device, like[name].dtype, copy=True) if name in like else view.clone()
        for name, view in views.items()
    }
