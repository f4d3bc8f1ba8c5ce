"""A receiver's way to its sender: the connection that stands, and those that are made when it was lost."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiosync._deadline import Deadline
from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Welcome
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.transports.base import Sink, Transport
from aiosync.transports.process_watch import ProcessWatch
from aiosync.weights.codec import known_encodings

__all__ = ["SenderConnection"]


class SenderConnection:
    """One connection at a time, its session, and the watch over the sender's process.

    Args:
        make_transport: makes a way to the sender, not open yet.
        token: the secret that the sender must know.
        model_id: what the sender calls the model.
        worker: which worker this is; -1: the sender says.

    Attributes:
        transport, session: the newest.
        worker: which worker this is.
        instance: which sender was met last.
        down: why the connection is no more; "" as long as it stands.
    """

    def __init__(
        self, make_transport: Callable[[], Transport], token: bytes, model_id: str | None, worker: int
    ) -> None:
        self.worker = worker
        self.instance = ""
        self.down = ""
        self._make_transport = make_transport
        self._token = token
        self._model_id = model_id
        self._encodings = known_encodings()
        self._watch: ProcessWatch | None = None
        self._asked = worker
        self._signature = ""
        self._ticket = b""
        self.transport = make_transport()
        self.session = self._new_session()

    def _new_session(self) -> ReceiverSession:
        return ReceiverSession(
            self._token,
            self._asked,
            pid=os.getpid() if self.transport.same_machine else 0,
            model_id=self._model_id,
            codecs=self._encodings,
            before=self.worker,
            signature=self._signature,
            ticket=self._ticket,
        )

    async def meet(self, deadline: Deadline) -> Welcome:
        """Connect, and hear what there is. :meth:`adopt` it when it is followed."""
        self.transport = await self.transport.reach(deadline)
        if self.transport.secret is not None:
            self._token = self.transport.secret
            self.session = self._new_session()
        return await self.transport.setup_connection_and_weights_on_receiver(self.session, deadline)

    def adopt(self, welcome: Welcome) -> bool:
        """This sender is the one to follow from now on; returns whether it is another than before."""
        before = self.instance
        self.worker, self.instance, self._ticket = welcome.worker, welcome.instance, welcome.ticket
        return before not in ("", welcome.instance)

    def start(self, sink: Sink, on_sender_end: Callable[[], None]) -> None:
        """Let updates in."""
        self.down = ""
        transport = self.transport
        pid = transport.peer_pid or (self.session.sender_pid if transport.same_machine else 0)
        self._watch = ProcessWatch(pid, on_sender_end)
        transport.start(sink)

    def tell_breach(self, breach: ProtocolError) -> None:
        """Tell the sender that what it said may not come now."""
        self.session.close(str(breach), dropped=True)
        self.flush()

    def flush(self) -> None:
        """Send what the session has to say."""
        self.transport.flush(self.session)

    async def renew(self, signature: str) -> None:
        """Drop the connection, and have another ready to be opened.

        ``signature``: of the layout that is known here.
        """
        self.unwatch()
        await self.transport.aclose()
        self._signature = signature
        self.transport = self._make_transport()
        self.session = self._new_session()

    def unwatch(self) -> None:
        """The sender's process is nothing to us any more."""
        if self._watch is not None:
            self._watch.close()

    def let_go(self) -> None:
        """Nothing of the sender's is read here any more: one that has let this worker go waits to hear it."""
        self.session.confirm_release()
        self.flush()

    def abandon_loop(self) -> None:
        """Release what can be released without the loop that this connection lived on."""
        self.unwatch()
        self.transport.abandon_loop()

    async def aclose(self, reason: str) -> None:
        """Say goodbye and close the connection; nothing of the sender's is read here any more."""
        self.unwatch()
        self.session.confirm_release()
        self.session.close(reason)
        self.flush()
        await self.transport.aclose()
