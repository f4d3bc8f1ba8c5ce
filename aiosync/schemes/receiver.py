"""The receiver: takes updates in and puts them in service. All schemes have this one receiver loop.

Frames are handled as they arrive, on the loop that ``connect`` ran on; they only change what is *held*.
The loop takes a held update through three steps, and a cancellation leaves behind, in each:

1. *await* one: nothing.
2. *stage* it: the thread ends first; the update stays held and is staged again by the next call.
3. *commit* it: the commit is withdrawn, or has happened; the next call goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain

from torch import Tensor

from aiosync._deadline import Deadline, pauses
from aiosync.errors import (
    AiosyncError,
    HandshakeError,
    LayoutMismatchError,
    NotConnectedError,
    ProtocolError,
    SenderFullError,
    WorkerLostError,
)
from aiosync.protocol.events import Aborted, Left, Recalled, UpdateArrived
from aiosync.protocol.frames import Frame, Welcome
from aiosync.schemes._home import HomeLoop
from aiosync.schemes._host import TaskHost
from aiosync.schemes._interrupt import OpenCalls
from aiosync.schemes.intake import Held, Intake, Overtaken
from aiosync.schemes.joint import give_up
from aiosync.schemes.landing import BaseLostError
from aiosync.schemes.refusal import nack_of
from aiosync.schemes.spec import OnSenderClose
from aiosync.schemes.stats import EventKind, EventSource, SchemeStats, logger
from aiosync.schemes.uplink import Uplink
from aiosync.transports._offload import uninterrupted
from aiosync.transports.base import Transport
from aiosync.weights.binding import StaleConversion

__all__ = ["WeightReceiver"]


_ATTEMPT = 1.0
"""Seconds that an attempt to connect again has at least."""

_LONGEST_ATTEMPT = 15.0
"""Seconds that it has at most: one that meets a dead end is not the last."""


class WeightReceiver:
    """The live receiving endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        intake: takes updates in; this endpoint's own from now on.
        model_id: what the sender calls the model.
        worker_idx: which worker this is; -1: the sender says.
        make_transport: makes a way to the sender, not open yet.
        token: the secret that the sender must know.
        reconnect_for: seconds for which to try, when the connection is lost, to make another.
        on_sender_close: ``"wait"``: when the sender closes in order, look for one as when the connection is
            lost. ``"stop"``: end, with a WARNING. None: end.

    Attributes:
        home: the event loop that this lives on.
        ended: why nothing more will come, or None.
        lost: whether the sender ended without a goodbye, or let this worker go.
    """

    def __init__(
        self,
        intake: Intake,
        model_id: str | None,
        worker_idx: int,
        make_transport: Callable[[], Transport],
        token: bytes,
        *,
        reconnect_for: float = 0.0,
        on_sender_close: OnSenderClose | None = None,
        events: EventSource,
    ) -> None:
        self.model_id = model_id
        self._stats = SchemeStats()
        self.intake = intake
        self.ended: str | None = None
        self.lost = False
        self._events = events
        self._reconnect_for = reconnect_for
        self._on_sender_close = on_sender_close
        self._link = Uplink(make_transport, token, model_id, worker_idx)
        self._held: Held | None = None
        self._served = -1  # the version of this sender's that was committed last
        # Looks for a sender after the connection was lost. A task of its own: a receive() whose timeout
        # passes does not cut an attempt short.
        self._search: asyncio.Task[bool] | None = None
        self._returned = 0  # how many updates there were when receive() last returned
        self._changed = asyncio.Event()
        self._committed = asyncio.Event()
        self._looping = False
        self._idle = False
        self._taker = asyncio.Lock()  # whoever takes updates in: the loop, or a receive() without it
        self._body: asyncio.Timeout | None = None
        self._closed = False
        self._calls = OpenCalls()
        self._settled = False
        self.home = HomeLoop("this receiver")

    @property
    def version(self) -> int:
        """The version in service, -1 before ``connect``."""
        return self.intake.version

    @property
    def stats(self) -> SchemeStats:
        """Figures so far."""
        self._stats.memory = self.intake.memory
        return self._stats

    @property
    def worker_idx(self) -> int:
        """Which worker this is; -1: the sender has not said yet."""
        return self._link.worker

    @property
    def transport(self) -> Transport:
        """The connection to the sender."""
        return self._link.transport

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors in service, name -> tensor; read only."""
        return self.intake.weights

    # -- connect ----------------------------------------------------------------------------------

    async def connect(self, deadline: Deadline) -> None:
        """Join the sender and put its newest version in service.

        Raises:
            WorkerLostError: there is no sender.
            NotConnectedError: this receiver was closed meanwhile.
            HandshakeError: it refused this worker.
            LayoutMismatchError: its weights do not fit the model; the sender is told.
            SyncTimeoutError: it did not answer in time.
        """
        self.home.enter()
        try:
            async with self._calls.call(deadline.remaining()):
                welcome = await self._join(deadline)
                self.intake.worker = welcome.worker
                await self._settle_in(welcome)
            self._returned = self._stats.updates
        except TimeoutError as exc:
            await self.aclose()
            hint = self.transport.trouble or "the sender did not answer"
            raise deadline.error("connect", hint=hint) from exc
        except BaseException:
            await self.aclose()
            raise

    async def _join(self, deadline: Deadline) -> Welcome:
        """Be welcomed by the sender, again and again as long as it has no room.

        Raises:
            TimeoutError: it had none until the deadline.
        """
        for pause in pauses(deadline):
            try:
                welcome = await self._link.meet(deadline)
            except SenderFullError as exc:
                trouble = str(exc)
            except WorkerLostError as exc:
                # It was there, and hung up: it may be starting again, as one that is not there yet may start.
                if self._closed or not (self._reconnect_for and self._link.transport.reached):
                    raise
                trouble = exc.reason
            else:
                return welcome
            await asyncio.sleep(pause)
            await self._link.renew("")
            self._link.transport.trouble = trouble
        raise TimeoutError

    async def _settle_in(self, welcome: Welcome) -> None:
        link = self._link
        self.intake.follow(welcome.via)
        link.adopt(welcome)
        try:
            self.intake.open(welcome.layout, welcome.device)
        except (LayoutMismatchError, ProtocolError, TypeError) as exc:
            link.session.declined(nack_of(welcome.version, exc))
            self._tell_failure(exc)
            raise
        await self.intake.prepare(link.transport)
        self._say_what_is_here()
        self._settled = True  # from now on a lost connection is made again
        link.start(self, self._sender_ended)
        while self.version < 0:
            if await self._await_held():
                error = await self._advance()
                if error is not None:
                    raise error
            elif not await self._come_back():
                raise WorkerLostError((), self.ended or "unknown")
        await self.intake.reserve()
        self._emit("connected")

    async def _come_back(self) -> bool:
        """The receiver loop has nothing to wait for any more: if that is because the connection was lost,
        make another; returns whether there is one."""
        search = self._search
        if search is None or search.done():
            if not self._link.down or self._closed or self.ended is not None:
                return False
            search = self._search = asyncio.create_task(self._find_sender(), name="aiosync-reconnecting")
        await asyncio.wait([search])
        return not search.cancelled() and search.result()

    async def _find_sender(self) -> bool:
        """Connect again, within ``reconnect_for`` seconds; returns whether that went well."""
        link = self._link
        # Until this process is back, or has ended, the sender leaves alone what is viewed here; and if it was
        # the sender who let go of this worker, until the connection is closed from here.
        await self.intake.detach()
        link.let_go()
        reason, last = link.down, ""
        deadline = Deadline.after(self._reconnect_for)
        # Once more after the deadline: the event loop may have been blocked until then.
        for pause in chain(pauses(deadline), [0.0]):
            await asyncio.sleep(pause)
            try:
                seconds = max(_ATTEMPT, min(_LONGEST_ATTEMPT, deadline.remaining()))
                await self._meet_again(Deadline.after(seconds))
            except SenderFullError as exc:
                last = f"; tried to connect again for {self._reconnect_for:g} s: {exc}"
            except (HandshakeError, LayoutMismatchError) as exc:
                reason = str(exc)
                break
            except (AiosyncError, OSError) as exc:
                last = f"; tried to connect again for {self._reconnect_for:g} s: {exc}"
            else:
                logger.info("worker %d is connected again", link.worker)
                self._emit("connected", message="again")
                return True
        logger.warning("worker %d gives the sender up: %s%s", link.worker, reason, last)
        self._end(reason + last, lost=True)
        return False

    async def _meet_again(self, deadline: Deadline) -> None:
        link = self._link
        # A sender that knows the signature counts on this worker to act on some version.
        await link.renew(self.intake.signature if self.version >= 0 else "")
        try:
            await self._settle_in_again(deadline)
        except BaseException:
            # Else the sender would wait for somebody who is not there.
            await link.aclose("the worker has given up connecting again")
            raise

    async def _settle_in_again(self, deadline: Deadline) -> None:
        link = self._link
        welcome = await link.meet(deadline)
        self.intake.worker = welcome.worker
        self.intake.follow(welcome.via)
        try:
            self.intake.check_layout(welcome)
        except LayoutMismatchError as exc:
            link.session.declined(nack_of(welcome.version, exc))
            raise
        # Versions are one sender's own: another at the same address begins anew, and is the one to follow.
        if link.adopt(welcome):
            self._follow_another(welcome.version)
        await self.intake.prepare(link.transport)
        self._say_what_is_here()
        link.start(self, self._sender_ended)

    def _follow_another(self, version: int) -> None:
        before = self.version
        self._served = -1
        # Also where no version is in service here: a relay's workers may have one already.
        self.intake.follow_another()
        if before < 0:
            return
        words = f"followed another sender: {before} → {version}"
        logger.warning("worker %d %s", self.worker_idx, words)
        self._events.tell("followed", self.model_id, version, self.worker_idx, message=words, previous=before)

    # -- the transport's sink -----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """A frame from the sender."""
        if self._closed:
            return  # too late: nothing is applied any more, and the goodbye says so
        session = self._link.session
        try:
            events = session.receive(frame)
        except ProtocolError as exc:
            self._link.tell_breach(exc)
            raise
        for event in events:
            match event:
                case UpdateArrived(update=update):
                    self.intake.expect(update)
                    self._held = Held(update)
                case Recalled():
                    self._say_what_is_here()
                case Aborted(joint=joint):
                    give_up(joint, self.worker_idx, "the sender called it off")
                case Left(reason=reason, replaced=True):
                    self._end(reason, lost=True)
                case Left(reason=reason, dropped=True):
                    self._lose(reason)
                case Left(reason=reason):
                    self._sender_closed(reason or "the sender has closed")
                case _:
                    pass
        if session.outgoing:
            self._link.flush()
        if session.superseded:
            self.intake.overtake()
        if not (self._idle and self._take_at_once()):
            self._changed.set()

    def connection_lost(self, reason: str) -> None:
        """The channel broke."""
        self._lose(reason)

    def _sender_ended(self) -> None:
        self._lose("its process has ended")

    def _sender_closed(self, reason: str) -> None:
        if self._on_sender_close == "wait":
            self._lose(reason)
            return
        if self._looping and self.ended is None:
            logger.log(
                logging.WARNING if self._on_sender_close == "stop" else logging.INFO,
                "the sender of worker %d has closed (%s): version %d stays in service",
                self.worker_idx,
                reason,
                self.version,
            )
        self._end(reason, lost=False)

    def _lose(self, reason: str) -> None:
        """The connection is gone; whether the sender is, the receiver loop finds out."""
        if self._reconnect_for <= 0 or not self._settled:
            self._end(reason, lost=True)
        elif self.ended is None and not self._link.down:
            self._link.down = reason
            self._give_up_joint(reason)
            self.intake.disconnected()
            self._changed.set()
            logger.warning(
                "worker %d has lost the sender (%s); it goes on with version %d and tries to connect again",
                self.worker_idx,
                reason,
                self.version,
            )
            self._emit("lost", message=reason)

    def _give_up_joint(self, reason: str) -> None:
        held = self._held
        if held is not None and held.update.joint is not None:
            give_up(held.update.joint.id, self.worker_idx, f"the connection ended: {reason}")

    def _end(self, reason: str, *, lost: bool) -> None:
        if self.ended is None:
            self.ended, self.lost = reason, lost
            self._give_up_joint(reason)
            self._changed.set()
            self._committed.set()
            if lost:
                self._cut_body_short()
                self._emit("lost", message=reason)

    # -- the receiver loop --------------------------------------------------------------------------

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Run the receiver loop beside the body.

        When the sender says goodbye the loop ends, the body goes on and the model keeps its version.

        Raises:
            NotConnectedError: not connected, or the loop runs already.
            WorkerLostError: the sender went without a goodbye, or let this worker go; the body is cancelled
                then.
        """
        self._claim_loop()
        # Not a task group around the body: what the body raises would come out in an exception group.
        host = TaskHost("aiosync-receiving")
        try:
            await host.start()
            host.spawn(self._loop)
            # A timeout that only the sender's loss makes pass: a body that waits for a version that will
            # never come is not to wait for ever.
            async with asyncio.timeout(None) as self._body:
                if self.lost:
                    self._cut_body_short()
                yield
        except TimeoutError:
            if self._body is None or not self._body.expired():
                raise
        finally:
            self._body = None
            await host.aclose()
            self._looping = False
        if self.lost:
            raise WorkerLostError((), self.ended or "unknown")

    def _cut_body_short(self) -> None:
        if self._body is not None:
            self._body.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Run the receiver loop in this task until the sender has gone."""
        self._claim_loop()
        try:
            await self._loop()
        finally:
            self._looping = False

    def check_open(self) -> None:
        """Check that this endpoint can be used here.

        Raises:
            NotConnectedError: it is not connected, or has been closed.
            WrongEventLoopError: it lives on another event loop.
        """
        if self._closed or not self.intake.ready:
            raise NotConnectedError("connect() first: this receiver is not connected")
        self.home.check()

    def _claim_loop(self) -> None:
        self.check_open()
        if self._looping:
            raise NotConnectedError("the receiver loop runs already; one is enough")
        self._looping = True

    async def _loop(self) -> None:
        async with self._taker:
            while True:
                while await self._await_next():
                    await self._advance()
                if not await self._come_back():
                    return

    async def _await_next(self) -> bool:
        self._idle = True
        try:
            return await self._await_held()
        finally:
            self._idle = False

    def _take_at_once(self) -> bool:
        """While the loop waits: take the held update to its end without waking it, if nothing has to be
        awaited for that; returns whether it is done."""
        held = self._held
        if held is None or held.update.version <= self.intake.version:
            return False
        try:
            if not self.intake.take_at_once(held):
                return False
        except BaseLostError:
            self._skip(whole=True)
        except StaleConversion:
            held.staged = None
            return False
        except Exception as exc:  # noqa: BLE001 - travels to the sender as a refusal
            self._refuse(exc)
        else:
            self._answer(held)
        return True

    async def receive(self, deadline: Deadline) -> Mapping[str, Tensor] | None:
        """The weights of an update that no call before has returned, once they are in service, or None if
        none came in time.

        Beside the receiver loop this only waits; without it, this is what takes an update in.

        Raises:
            WorkerLostError: the sender has gone, and nothing more will come.
        """
        self.check_open()
        before = self._returned
        try:
            await asyncio.sleep(0)  # what has arrived already is found even with a timeout of zero
            async with asyncio.timeout(deadline.remaining()):
                while self._stats.updates == before:
                    if self._closed or (self.ended is not None and self._held is None):
                        raise WorkerLostError((), self.ended or "this side has closed the connection")
                    if self._looping:
                        await self._await_commit()
                    else:
                        await self._take_one(before)
        except TimeoutError:
            pass
        self._returned = self._stats.updates
        return self.weights if self._returned != before else None

    async def _await_commit(self) -> None:
        self._committed.clear()
        await self._committed.wait()

    async def _take_one(self, before: int) -> None:
        async with self._taker:
            if self._stats.updates != before or self._looping:
                return
            if await self._await_held():
                await self._advance()
            else:
                await self._come_back()

    async def _await_held(self) -> bool:
        """Wait for an update; false when the sender has gone."""
        try:
            while self._held is None:
                if self.ended is not None or self._link.down or self._closed:
                    return False
                if not self.intake.may_fetch:
                    await self.intake.make_room()
                    self._link.session.have = min(self._link.session.have, self.intake.have)
                    continue
                self._changed.clear()
                self._link.session.wanting = True
                self._link.flush()
                await self._changed.wait()
        finally:
            self._link.session.wanting = False
        return True

    async def _advance(self) -> Exception | None:
        """Take the held update to its end; returns the error if it was refused."""
        held = self._held
        assert held is not None
        if self.lost or self._link.down:
            # Nobody keeps the sender from writing where it lies: it may be anything by now.
            self._held = None
            return None
        if held.update.version <= self.version:
            self.intake.forget()
            self._answer(held)
            return None
        if held.staged is None and held.update.joint is None and self._link.session.superseded:
            self._skip()
            return None
        try:
            if not self.intake.has_staged(held):
                held.staged = None
                await self.intake.stage(held)
                if self.lost or self._link.down:
                    self._held = None
                    return None
            await self.intake.commit(held, self._held_up)
        except (Overtaken, BaseLostError) as exc:
            self._skip(whole=isinstance(exc, BaseLostError))
            return None
        except StaleConversion:
            held.staged = None  # what it was staged from is still here
            return None
        except Exception as exc:  # noqa: BLE001 - travels to the sender as a refusal
            if self._closed or (held.staged is None and (self.lost or self._link.down)):
                self._held = None
                return None
            self._refuse(exc)
            return exc
        self._answer(held)
        return None

    def _skip(self, *, whole: bool = False) -> None:
        """Give the held update back for a newer one; or for the ``whole`` of what it is a part of."""
        held, self._held = self._held, None
        if held is not None and held.staged is None:
            self.intake.forget()
        if not self._closed:
            self._say_what_is_here()
            if whole:
                self._link.session.have = -1
            # Asked for at once: nobody wakes the loop if it was not needed to come here.
            self._link.session.wanting = self._looping and self.intake.may_fetch
            self._link.session.skip()
            self._link.flush()

    def _say_what_is_here(self) -> None:
        """What the next update can build on."""
        session = self._link.session
        session.have, session.maps = self.intake.have, self.intake.peeks

    def _held_up(self) -> None:
        """What is staged waits for readers."""
        self._link.session.staged(copied=not self.intake.needs_sender)
        self._link.flush()
        if self._link.session.superseded:  # since it began to be staged
            self.intake.overtake()

    def _answer(self, held: Held) -> None:
        """The held update, or a newer version, is in service: say so."""
        self._held = None
        intake, link = self.intake, self._link
        if not intake.borrows:
            self._say_what_is_here()
        wanting = self._looping and intake.may_fetch
        link.session.applied(intake.version, held.seconds, wanting=wanting)
        link.transport.flush(link.session)
        # The sender waits for the answer, and nothing below can fail.
        if held.committed:
            self._count(held)
        self._committed.set()
        if held.committed and self._events.hooks:
            self._emit("committed", seconds=held.seconds)

    def _count(self, held: Held) -> None:
        stats = self._stats
        stats.updates += 1
        stats.nbytes += self.intake.nbytes
        if self._served >= 0:
            stats.skipped += max(0, held.update.version - self._served - 1)
        self._served = held.update.version
        stats.add_phases(held.seconds)

    def _refuse(self, error: Exception) -> None:
        """The held update cannot be put in service: say why."""
        held, self._held = self._held, None
        assert held is not None
        if held.update.joint is not None:
            give_up(held.update.joint.id, self.worker_idx, f"the part of {self.model_id!r} failed: {error}")
        self._say_what_is_here()
        self._link.session.refused(nack_of(held.update.version, error))
        self._tell_failure(error)

    def _tell_failure(self, error: Exception) -> None:
        self._stats.failures += 1
        self._link.flush()
        self._committed.set()
        self._emit("failed", message=str(error))

    # -- close --------------------------------------------------------------------------------------

    async def wait_closed(self) -> None:
        """Wait until the sender has gone, however long that takes."""
        self.home.check()
        while self.ended is None and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        """Leave the sender and let go of everything; idempotent. The model keeps its version, in
        memory of its own."""
        if self._closed:
            return
        if self.home.closed:
            self._closed = True
            self._link.abandon_loop()
            self.intake.abandon_loop()
        self.home.check()
        self._closed = True
        await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        await self._calls.stop()
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        held = self._held
        await self.intake.close()
        if held is not None and held.committed and self._held is held:
            self._answer(held)  # cancelled between the commit and the answer: the sender waits for it
        elif held is not None and held.update.joint is not None:
            give_up(held.update.joint.id, self.worker_idx, "the receiver has closed")
        await self._link.aclose("the worker has closed")
        self._changed.set()
        self._committed.set()
        self._emit("closed")

    def _emit(
        self, kind: EventKind, *, seconds: Mapping[str, float] | None = None, message: str = ""
    ) -> None:
        self._events.tell(
            kind, self.model_id, self.version, self.worker_idx, seconds=seconds, message=message
        )
