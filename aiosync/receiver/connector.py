"""Connect to the sender, the first time and again after the connection was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain

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
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.reporter import ReceiverReporter
from aiosync.receiver.update_handler import UpdateHandler
from aiosync.receiver.updates import Applier

__all__ = ["Connector"]

_ATTEMPT = 1.0
"""Seconds that each attempt to reconnect has at least."""

_LONGEST_ATTEMPT = 15.0
"""Seconds that each attempt has at most, so that an attempt at a dead address is not the last one."""


class Connector:
    """Connects to the sender: the same one again, or another at its address.

    Args:
        applier: applies updates.
        connection: the way to the sender.
        handler: answers updates.
        reporter: emits events.
        seconds: for how long to try after each loss; 0: not at all.
        start: begins to read frames from the new connection.
        give_up: called with the reason when the sender was not found again.

    Attributes:
        seconds: for how long to try after each loss.
    """

    def __init__(
        self,
        applier: Applier,
        connection: SenderConnection,
        handler: UpdateHandler,
        reporter: ReceiverReporter,
        seconds: float,
        start: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self.seconds = seconds
        self._applier = applier
        self._connection = connection
        self._handler = handler
        self._reporter = reporter
        self._start = start
        self._give_up = give_up
        # Reconnects after the connection was lost. A task of its own, so that the timeout of a receive()
        # does not cut an attempt short.
        self._search: asyncio.Task[bool] | None = None

    async def join(self, deadline: Deadline) -> None:
        """Connect for the first time. Updates arrive from now on.

        Raises:
            TimeoutError: the sender did not answer, or was full, until the deadline.
            WorkerLostError: there is no sender.
            HandshakeError: it refused this worker.
            LayoutMismatchError: its weights do not fit the model. The sender gets the same error.
        """
        applier, connection = self._applier, self._connection
        welcome = await self._welcomed(deadline)
        applier.worker = welcome.worker
        applier.follow(welcome.via)
        connection.adopt(welcome)
        try:
            applier.open(welcome.layout, welcome.device)
        except (LayoutMismatchError, ProtocolError, TypeError) as exc:
            connection.session.declined(nack_of(welcome.version, exc))
            self._handler.failed(exc)
            raise
        await applier.prepare(connection.transport)
        self._handler.tell_state()
        self._start()

    async def _welcomed(self, deadline: Deadline) -> Welcome:
        """Connect until the sender welcomes this worker. Retry while the sender is full."""
        for pause in pauses(deadline):
            try:
                return await self._connection.meet(deadline)
            except SenderFullError as exc:
                trouble = str(exc)
            except WorkerLostError as exc:
                # The sender accepted and then closed the connection: it may be restarting.
                if self._handler.closed or not (self.seconds and self._connection.transport.reached):
                    raise
                trouble = exc.reason
            await asyncio.sleep(pause)
            await self._connection.renew("")
            self._connection.transport.trouble = trouble
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
            search = self._search = asyncio.create_task(self._find_or_give_up(), name="aiosync-reconnecting")
        await asyncio.wait([search])
        return not search.cancelled() and search.result()

    async def aclose(self) -> None:
        """Cancel an attempt that goes on."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])

    async def _find_or_give_up(self) -> bool:
        failure = await self._find_sender()
        if failure:
            self._give_up(failure)
        return not failure

    async def _find_sender(self) -> str:
        """Reconnect within ``seconds``. Return "" if that succeeded, else why the sender was given up."""
        connection = self._connection
        # The sender does not reuse the slot that this process views until this process has reconnected or
        # ended; or, if the sender dropped this worker, until this side has closed the connection.
        await self._applier.detach()
        connection.let_go()
        reason, last = connection.down, ""
        deadline = Deadline.after(self.seconds)
        # One more attempt after the deadline: the event loop may have been blocked until then.
        for pause in chain(pauses(deadline), [0.0]):
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
                self._reporter.emit("connected", message="again")
                return ""
        logger.warning("worker %d gives the sender up: %s%s", connection.worker, reason, last)
        return reason + last

    async def _connect(self, deadline: Deadline) -> None:
        connection = self._connection
        # A sender that gets the signature assumes that this worker acts on some version.
        await connection.renew(self._applier.signature if self._applier.version >= 0 else "")
        try:
            await self._settle_in(deadline)
        except BaseException:
            # Without this the sender would wait for a worker that has left.
            await connection.aclose("the worker has given up connecting again")
            raise

    async def _settle_in(self, deadline: Deadline) -> None:
        applier, connection = self._applier, self._connection
        welcome = await connection.meet(deadline)
        applier.worker = welcome.worker
        applier.follow(welcome.via)
        try:
            applier.check_layout(welcome)
        except LayoutMismatchError as exc:
            connection.session.declined(nack_of(welcome.version, exc))
            raise
        # Versions count per sender. Another sender at the same address begins anew; follow that one.
        if connection.adopt(welcome):
            before = applier.version
            self._handler.served = -1
            # Also if no version is in service here: a relay's workers may have one already.
            applier.follow_another()
            if before >= 0:
                self._reporter.followed(before, welcome.version)
        await applier.prepare(connection.transport)
        self._handler.tell_state()
        self._start()
