"""Authenticates the connections to a sender, and refuses those that are not a worker's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from aiosync._deadline import Deadline
from aiosync.errors import AiosyncError, SyncTimeoutError, WorkerLostError
from aiosync.events import logger
from aiosync.protocol.frames import Hello
from aiosync.protocol.sender_session import SenderSession
from aiosync.protocol.text import clean
from aiosync.transports.base import Listener, Transport
from aiosync.transports.log_limit import LogLimit

__all__ = ["Admission", "Refusal"]

_LONGEST = 1000
"""Characters of a reason."""

_REMEMBERED = 5
"""Reasons that are kept for an error's text."""


class Refusal(NamedTuple):
    """Why a worker is not taken in.

    Attributes:
        reason: the text that it gets.
        retry: whether it may be taken in a little later.
    """

    reason: str
    retry: bool = False


class Admission:
    """Authenticates each new connection and hands it to the registry.

    Args:
        token: the secret that workers must know.
        listener: knows how much time one has for that.
        admit: takes a worker in, or returns why it does not.

    Attributes:
        refused: why the last ones were turned away.
    """

    def __init__(
        self,
        token: bytes,
        listener: Listener,
        admit: Callable[[Hello, Transport, SenderSession], Refusal | None],
    ) -> None:
        self.refused: list[str] = []
        self._token = token
        self._listener = listener
        self._admit = admit
        self._log = LogLimit(logger)

    async def greet(self, transport: Transport) -> None:
        """Take a connection to the point where it is a worker's, or is closed."""
        session = SenderSession(self._token, os.getpid() if transport.same_machine else 0)
        admitted = False
        try:
            deadline = transport.greeting or Deadline.after(self._listener.patience)
            hello = await transport.setup_connection_and_weights_on_sender(session, deadline)
            refusal = self._admit(hello, transport, session)
            admitted = refusal is None
            if refusal is not None:
                session.refuse(refusal.reason, retry=refusal.retry)
                transport.flush(session)
                self.note(transport, refusal.reason)
        except WorkerLostError as exc:
            # A connection that ends before its first frame is a port scan or a health check.
            if session.hello is not None:
                self.note(transport, f"it left when it was to prove that it knows the token: {exc.reason}")
        except SyncTimeoutError as exc:
            # It may be this side's event loop that was busy.
            session.refuse("the handshake was not finished in time", retry=True)
            transport.flush(session)
            self.note(transport, str(exc))
        except (AiosyncError, OSError) as exc:
            self.note(transport, str(exc))
        except Exception as exc:  # noqa: BLE001 - the end of this connection, and of no other
            logger.error("a connection is given up", exc_info=exc)
        finally:
            if not admitted:
                await transport.aclose()

    def note(self, transport: Transport, reason: str) -> None:
        """Say that a connection came to nothing."""
        reason = clean(reason, _LONGEST)
        self._log.warning("a connection was refused (%s): %s", transport.peer_name, reason)
        self.refused = [*self.refused, reason][-_REMEMBERED:]

    def close(self) -> None:
        """Write what has been left out of the log."""
        self._log.flush()
