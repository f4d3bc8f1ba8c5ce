"""Who is let in by a sender, and what is said to the others."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiosync._deadline import Deadline
from aiosync.errors import AiosyncError, WorkerLostError
from aiosync.protocol.frames import Hello
from aiosync.protocol.session import SenderSession
from aiosync.schemes.stats import logger
from aiosync.transports.base import Listener, Transport

__all__ = ["Reception"]

_REMEMBERED = 5


class Reception:
    """Has whoever connects prove itself, and hands it over.

    Args:
        token: the secret that workers must know.
        listener: knows how much time one has for that.
        admit: takes a worker in, or returns why not.

    Attributes:
        refused: why the last ones were turned away.
    """

    def __init__(
        self, token: bytes, listener: Listener, admit: Callable[[Hello, Transport, SenderSession], str]
    ) -> None:
        self.refused: list[str] = []
        self._token = token
        self._listener = listener
        self._admit = admit

    async def greet(self, transport: Transport) -> None:
        """Take a connection to the point where it is a worker's, or is closed."""
        session = SenderSession(self._token, os.getpid() if transport.same_machine else 0)
        admitted = False
        try:
            greeted = await transport.setup_connection_and_weights_on_sender(
                session, Deadline.after(self._listener.patience)
            )
            reason = self._admit(greeted.hello, transport, session)
            admitted = not reason
            if reason:
                session.refuse(reason)
                transport.flush(session)
                self.note(transport, reason)
        except WorkerLostError as exc:
            # Whoever hangs up before he has said a word is nobody.
            if session.hello is not None:
                self.note(transport, f"it left when it was to prove that it knows the token: {exc.reason}")
        except (AiosyncError, OSError) as exc:
            self.note(transport, str(exc))
        finally:
            if not admitted:
                await transport.aclose()

    def note(self, transport: Transport, reason: str) -> None:
        """Say that a connection came to nothing."""
        logger.warning("a connection was refused (%s): %s", transport.peer_name, reason)
        self.refused = [*self.refused, reason][-_REMEMBERED:]
