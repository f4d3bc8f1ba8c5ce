"""The connection to the sender: the first one, and the ones that replace it after it was lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from aiosync._deadline import Deadline, pauses
from aiosync.errors import (
    AiosyncError,
    HandshakeError,
    LayoutMismatchError,
    ProtocolError,
    SenderFullError,
    WorkerLostError,
)
from aiosync.events import logger
from aiosync.protocol.frames import Welcome
from aiosync.protocol.nack import nack_of
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.receiver.updates import Applier
from aiosync.transports.base import FramedTransport, Sink
from aiosync.transports.process_watch import ProcessWatch
from aiosync.weights.codec import known_encodings

if TYPE_CHECKING:
    from aiosync.receiver.listeners import ReceiverReporter
    from aiosync.receiver.update_handler import UpdateHandler

_ATTEMPT = 1.0
"""Seconds that each attempt to reconnect has at least."""

_LONGEST_ATTEMPT = 15.0
"""Seconds that each attempt has at most, so that an attempt at a dead address is not the last one."""


@dataclass(eq=False, repr=False)
class SenderConnection:
    """One connection at a time, its session, and the watch over the sender's process."""

    make_transport: Callable[[], FramedTransport]  # not open yet
    token: bytes  # the secret that the sender must know
    model_id: str | None  # the sender's name of the model
    worker: int  # this worker's index; -1: the sender chooses one
    # The id of the sender that this worker follows; "" before the first.
    instance: str = ""
    # Why the connection was lost; "" while it is open.
    down: str = ""
    _watch: ProcessWatch | None = None
    _signature: str = ""
    _ticket: bytes = b""

    def __post_init__(self) -> None:
        # The index that this worker asks for in each Hello.
        self._asked = self.worker
        self.transport = self.make_transport()
        self.session = self._new_session()

    def _new_session(self) -> ReceiverSession:
        return ReceiverSession(
            self.token,
            self._asked,
            pid=os.getpid() if self.transport.same_machine else 0,
            model_id=self.model_id,
            codecs=known_encodings(),
            before=self.worker,
            signature=self._signature,
            ticket=self._ticket,
        )

    async def meet(self, deadline: Deadline) -> Welcome:
        """Connect and authenticate. Call :meth:`adopt` with the Welcome to follow its sender."""
        self.transport = await self.transport.reach(deadline)
        if self.transport.secret is not None:
            self.token = self.transport.secret
            self.session = self._new_session()
        return await self.transport.authenticate_sender(self.session, deadline)

    def adopt(self, welcome: Welcome) -> bool:
        """Follow this sender from now on. Return whether it is another one than before."""
        before = self.instance
        self.worker, self.instance, self._ticket = welcome.worker, welcome.instance, welcome.ticket
        return before not in ("", welcome.instance)

    def start(self, sink: Sink, on_sender_end: Callable[[], None]) -> None:
        """Deliver frames to ``sink`` from now on, and watch the sender's process."""
        self.down = ""
        transport = self.transport
        pid = transport.peer_pid or (self.session.sender_pid if transport.same_machine else 0)
        self._watch = ProcessWatch(pid, on_sender_end)
        transport.start(sink)

    def break_off(self, reason: str) -> None:
        """Say goodbye. This process reads the sender's memory until :meth:`aclose`, which says so."""
        self.session.close(reason, dropped=True)
        self.flush()

    def flush(self) -> None:
        """Send the frames that the session has queued."""
        self.transport.flush(self.session)

    async def renew(self, signature: str) -> None:
        """Close the connection and make another one, not open yet.

        ``signature``: of the layout that this worker has; "": none.
        """
        self.unwatch()
        await self.transport.aclose()
        self._signature = signature
        self.transport = self.make_transport()
        self.session = self._new_session()

    def unwatch(self) -> None:
        """Stop watching the sender's process."""
        if self._watch is not None:
            self._watch.close()

    def confirm_release(self) -> None:
        """Tell a sender that has dropped this worker that its memory is no longer read here."""
        self.session.confirm_release()
        self.flush()

    def abandon_loop(self, *, released: bool) -> None:
        """Do what :meth:`aclose` does, as far as that is possible after the event loop has been closed."""
        with suppress(RuntimeError):  # what the kernel does not take at once would wait for the loop
            self._say_goodbye("the worker has closed", released)
        self.transport.abandon_loop()

    async def aclose(self, reason: str, *, released: bool = True) -> None:
        """Send a Bye and close the connection. ``released``: the sender's memory is no longer read here."""
        self._say_goodbye(reason, released)
        await self.transport.aclose()

    def _say_goodbye(self, reason: str, released: bool) -> None:
        self.unwatch()
        if released:
            self.session.confirm_release()
        self.session.close(reason, dropped=not released)
        self.flush()


@dataclass(eq=False, repr=False)
class Connector:
    """Connects to the sender: the same one again, or another at its address."""

    applier: Applier
    connection: SenderConnection
    handler: UpdateHandler
    reporter: ReceiverReporter
    # For how long to try after each loss; 0: not at all.
    seconds: float
    # Begins to read frames from the new connection.
    start: Callable[[], None]
    # Called with the reason if the sender was not found again.
    give_up: Callable[[str], None]
    # Reconnects after the connection was lost. A task of its own, so that the timeout of a receive() does not
    # cut an attempt short.
    _search: asyncio.Task[bool] | None = field(default=None, init=False)

    async def join(self, deadline: Deadline) -> None:
        """Connect for the first time. Updates arrive from now on.

        Raises:
            TimeoutError: the sender did not answer, or was full, until the deadline.
            WorkerLostError: there is no sender.
            HandshakeError: it refused this worker.
            LayoutMismatchError: its weights do not fit the model. The sender gets the same error.
        """
        await self._settle_in(await self._welcomed(deadline))

    async def _welcomed(self, deadline: Deadline) -> Welcome:
        """Connect until the sender welcomes this worker. Retry while the sender is full."""
        for pause in pauses(deadline):
            try:
                return await self.connection.meet(deadline)
            except SenderFullError as exc:
                trouble = str(exc)
            except WorkerLostError as exc:
                # The sender accepted and then closed the connection: it may be restarting.
                if self.handler.closed or not (self.seconds and self.connection.transport.reached):
                    raise
                trouble = exc.reason
            await asyncio.sleep(pause)
            await self.connection.renew("")
            self.connection.transport.trouble = trouble
        raise TimeoutError

    @property
    def searching(self) -> bool:
        """Whether an attempt to reconnect goes on."""
        return self._search is not None and not self._search.done()

    async def come_back(self) -> bool:
        """Reconnect after the connection was lost. Return whether there is a connection again.

        A cancelled caller leaves the attempt running; the next call waits for it.
        """
        search = self._search
        if search is None or search.done():
            search = self._search = asyncio.create_task(self._find_sender(), name="aiosync-reconnecting")
        await asyncio.wait([search])
        return not search.cancelled() and search.result()

    async def aclose(self) -> None:
        """Cancel an attempt that goes on."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])

    async def _find_sender(self) -> bool:
        """Reconnect within ``seconds``, else give the sender up. Return whether that succeeded."""
        connection = self.connection
        # The sender does not reuse the slot that this process views until this process has reconnected or
        # ended; or, if the sender dropped this worker, until this side has closed the connection.
        deadline = Deadline.after(self.seconds)
        reason, last = connection.down, ""
        # One more attempt after the deadline: the event loop may have been blocked until then.
        attempts = chain(pauses(deadline), [0.0])
        if await self.applier.detach(deadline):
            connection.confirm_release()
        else:
            attempts, last = chain(), f"; {self.seconds:g} s later the model was still in use"
        for pause in attempts:
            await asyncio.sleep(pause)
            try:
                seconds = max(_ATTEMPT, min(_LONGEST_ATTEMPT, deadline.remaining()))
                await self._connect(Deadline.after(seconds))
            except SenderFullError as exc:
                last = f"; tried to connect again for {self.seconds:g} s: {exc}"
            except (HandshakeError, LayoutMismatchError) as exc:
                reason = str(exc)
                break
            except (AiosyncError, OSError) as exc:
                last = f"; tried to connect again for {self.seconds:g} s: {exc}"
            else:
                logger.info("worker %d is connected again", connection.worker)
                self.reporter.emit("connected", message="again")
                return True
        logger.warning("worker %d gives the sender up: %s%s", connection.worker, reason, last)
        self.give_up(reason + last)
        return False

    async def _connect(self, deadline: Deadline) -> None:
        connection, layout = self.connection, self.applier.layout
        # A sender that gets the signature assumes that this worker acts on some version.
        await connection.renew(layout.identity if layout is not None and self.applier.version >= 0 else "")
        try:
            await self._settle_in(await connection.meet(deadline))
        except BaseException:
            # Without this the sender would wait for a worker that has left.
            await connection.aclose("the worker has given up connecting again")
            raise

    async def _settle_in(self, welcome: Welcome) -> None:
        """Follow the sender that has welcomed this worker. Updates arrive from now on.

        Raises:
            LayoutMismatchError: its weights do not fit the model, or it has another layout than before.
        """
        applier, connection = self.applier, self.connection
        applier.worker = welcome.worker
        applier.follow(welcome.via)
        first = applier.layout is None
        if first:
            connection.adopt(welcome)  # also if the layout is refused: the events have the worker's index
        try:
            applier.open(welcome)
            if first:
                await applier.check_base(applier.model)
        except (LayoutMismatchError, ProtocolError, TypeError) as exc:
            if first or isinstance(exc, LayoutMismatchError):
                connection.session.declined(nack_of(welcome.version, exc))
            if first:
                self.handler.failed(exc)
            raise
        # Versions count per sender. Another sender at the same address begins anew; follow that one.
        if connection.adopt(welcome):
            before = applier.version
            self.handler.served = -1
            # Also if no version is in service here: a relay's workers may have one already.
            applier.follow_another()
            if before >= 0:
                self.reporter.followed(before, welcome.version)
        await applier.prepare(connection.transport)
        self.handler.refresh_fetch()
        self.start()
