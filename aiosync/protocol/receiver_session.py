"""The worker's session with its sender."""

from __future__ import annotations

import enum
import hmac
import os
from collections.abc import Sequence

import msgspec

from aiosync.errors import HandshakeError, ProtocolError, SenderFullError
from aiosync.protocol import frames as f
from aiosync.protocol.framing import clean
from aiosync.protocol.session import NONCE_SIZE, REASON, Session, proof_of


class ReceiverState(enum.Enum):
    """The states of the session on the worker."""

    GREETING = "greeting"
    PROVING = "proving"
    JOINING = "joining"
    IDLE = "idle"
    FETCHING = "fetching"
    HOLDING = "holding"
    CLOSED = "closed"


class ReceiverSession(Session):
    """The session on the worker.

    The worker fetches the next update after it has answered the last one and while :attr:`wanting` is set. So
    it gets the version that is the newest then.

    Args:
        token: the secret of both sides.
        ticket: from the last Welcome; empty: none.

    The other arguments are fields of :class:`~aiosync.protocol.frames.Hello`.

    """

    inbound = f.FROM_SENDER

    def __init__(
        self,
        token: bytes,
        worker: int,
        *,
        pid: int = 0,
        model_id: str | None = None,
        codecs: Sequence[str] = (),
        before: int = -1,
        signature: str = "",
        ticket: bytes = b"",
    ) -> None:
        super().__init__()
        # Sent with each Fetch; see there.
        self.have = -1
        self.maps = False
        self.state = ReceiverState.GREETING
        # The newest version that the worker has committed; -1: none.
        self.version = -1
        # The sender's process id; 0: it has no meaning here.
        self.sender_pid = 0
        self._token = token
        self._ticket = ticket
        self._worker = worker
        self._nonce = os.urandom(NONCE_SIZE)
        self._sender_nonce = b""
        # Round of the held update.
        self._round = -1
        # Whether there is a newer update than the last one fetched.
        self._notified = False
        self._wanting = False
        # Whether to fetch without waiting for a Notify.
        self._eager = False
        # Whether the connection has ended, and the sender waits until its memory is no longer read here.
        self._dropped = False
        self.outgoing.append(
            f.Hello(
                protocol=f.PROTOCOL_VERSION,
                worker=worker,
                pid=pid,
                nonce=self._nonce,
                model_id=model_id,
                codecs=list(codecs),
                before=before,
                signature=signature,
            )
        )

    def receive(self, frame: f.Frame) -> list[f.Frame]:
        """Handle one frame from the sender; returns the frames that the caller has to handle.

        These are Accepted (the sender proved that it knows the token), Welcome, Update (to stage and commit),
        Cut (fetch again), Abort, Interrupt (of the held update) and Bye, whose text is safe to print.

        Raises:
            HandshakeError: the sender refused this worker, or does not know the token.
            ProtocolError: the frame is not allowed in this state.
        """
        match self.state, frame:
            case ReceiverState.FETCHING, f.Update():
                self.state = ReceiverState.HOLDING
                self._round = frame.round
                return [frame]
            case ReceiverState.CLOSED, _:
                return []
            case ((ReceiverState.GREETING | ReceiverState.PROVING | ReceiverState.JOINING), f.Refused()):
                self.state = ReceiverState.CLOSED
                kind = SenderFullError if frame.retry else HandshakeError
                reason = clean(frame.reason, REASON)
                raise kind(f"the sender refused worker {self._worker}: {reason}")
            case ReceiverState.GREETING, f.Challenge():
                return self._answer(frame)
            case ReceiverState.PROVING, f.Accepted():
                return self._verify(frame)
            case ReceiverState.JOINING, f.Welcome():
                self.state = ReceiverState.IDLE
                self._eager = frame.eager
                return [frame]
            case ((ReceiverState.IDLE | ReceiverState.HOLDING), f.Notify()):
                self._notified = True
                self._fetch_if_wanted()
                return []
            case ReceiverState.FETCHING, f.Notify():
                return []  # sent before the Fetch arrived, which is answered with the newest update anyway
            case ReceiverState.FETCHING, f.Cut():
                self.state = ReceiverState.IDLE
                self._wanting = False
                return [frame]
            case _, f.Abort():
                return [frame]
            case ReceiverState.HOLDING, f.Interrupt() if frame.round == self._round:
                return [frame]
            case ((ReceiverState.IDLE | ReceiverState.FETCHING | ReceiverState.HOLDING), f.Interrupt()):
                return []  # of an update that was answered before the frame arrived
            case _, f.Bye():
                self.state = ReceiverState.CLOSED
                self._dropped = frame.dropped
                return [msgspec.structs.replace(frame, reason=clean(frame.reason, REASON))]
            case _:
                raise ProtocolError(f"no {type(frame).__name__} frame may come in state {self.state.value}")

    @property
    def wanting(self) -> bool:
        """Whether to fetch the next update. Setting it may send a Fetch; sending a Fetch clears it."""
        return self._wanting

    @wanting.setter
    def wanting(self, value: bool) -> None:
        self._wanting = value
        self._fetch_if_wanted()

    @property
    def due(self) -> bool:
        """Whether the sender has announced an update that can be fetched now."""
        return self._notified and self.state is ReceiverState.IDLE

    @property
    def superseded(self) -> bool:
        """Whether there is a newer update than the held one."""
        return self._notified and self.state is ReceiverState.HOLDING

    def skip(self) -> None:
        """Return the held update unused, and fetch the newest instead, now or once :attr:`wanting` is set."""
        if self.state is not ReceiverState.HOLDING:
            return  # the connection has been closed
        self._notified = True
        self.state = ReceiverState.IDLE
        self._fetch_if_wanted()

    def staged(self, *, copied: bool) -> None:
        """Report that the held update waits to be committed. ``copied``: in the worker's own memory."""
        if self.state is ReceiverState.HOLDING:
            self.outgoing.append(f.Staged(round=self._round, copied=copied))

    def applied(self, version: int, seconds: dict[str, float], *, wanting: bool = False) -> None:
        """Acknowledge the held update, which is committed or was not newer than the current version.

        ``seconds`` has the duration of each phase. ``wanting``: fetch the next update together with the Ack.
        """
        self.version = max(self.version, version)
        self._wanting |= wanting
        if self._replies():
            fetch = self._next_fetch()
            ack = f.Ack(round=self._round, version=self.version, seconds=seconds, fetch=fetch)
            self.outgoing.append(ack)

    def refused(self, nack: f.Nack) -> None:
        """Refuse the held update. This method sets ``nack.round``."""
        if self._replies():
            self.outgoing.append(msgspec.structs.replace(nack, round=self._round))
            self._fetch_if_wanted()

    def declined(self, nack: f.Nack) -> None:
        """Refuse the layout of the Welcome."""
        if self.state is ReceiverState.IDLE:
            self.outgoing.append(nack)

    def close(self, reason: str = "", *, dropped: bool = False) -> None:
        """Send a Bye and close. ``dropped``: this worker still reads the sender's memory."""
        if self.state not in (ReceiverState.GREETING, ReceiverState.PROVING, ReceiverState.CLOSED):
            self.outgoing.append(f.Bye(reason=reason, dropped=dropped))
            self._dropped = dropped
        self.state = ReceiverState.CLOSED

    def confirm_release(self) -> None:
        """Tell a sender that waits for it that its memory is no longer read here."""
        if self._dropped:
            self._dropped = False
            self.outgoing.append(f.Bye(reason="the worker has released the sender's memory"))

    def _answer(self, challenge: f.Challenge) -> list[f.Frame]:
        if len(challenge.nonce) != NONCE_SIZE:
            raise HandshakeError(f"a nonce has {NONCE_SIZE} bytes, not {len(challenge.nonce)}")
        self._sender_nonce = challenge.nonce
        self.state = ReceiverState.PROVING
        proof = proof_of(self._token, b"worker", self._nonce, challenge.nonce)
        claim = proof_of(self._ticket, b"ticket", self._nonce, challenge.nonce) if self._ticket else b""
        self.outgoing.append(f.Proof(proof=proof, claim=claim))
        return []

    def _verify(self, accepted: f.Accepted) -> list[f.Frame]:
        expected = proof_of(self._token, b"sender", self._sender_nonce, self._nonce)
        if not hmac.compare_digest(expected, accepted.proof):
            self.state = ReceiverState.CLOSED
            self.outgoing.append(f.Bye(reason="the tokens of the two sides differ"))
            raise HandshakeError(
                "the process at the sender's address does not know this worker's token: "
                "give both sides the same token=, or none to either"
            )
        self.state = ReceiverState.JOINING
        self.sender_pid = accepted.pid
        self.outgoing.append(f.Join())
        return [accepted]

    def _replies(self) -> bool:
        """End the hold and return whether to answer. The session may have closed while the update was
        applied."""
        held = self.state is ReceiverState.HOLDING
        if held:
            self.state = ReceiverState.IDLE
        return held

    def _fetch_if_wanted(self) -> None:
        fetch = self._next_fetch()
        if fetch is not None:
            self.outgoing.append(fetch)

    def _next_fetch(self) -> f.Fetch | None:
        """Return the Fetch to send now; None: not now. The caller has to send it."""
        due = self._notified or self._eager
        if not (due and self._wanting and self.state is ReceiverState.IDLE):
            return None
        self._notified = self._wanting = False
        self.state = ReceiverState.FETCHING
        return f.Fetch(have=self.have, maps=self.maps)
