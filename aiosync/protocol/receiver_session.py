"""The worker's session with its sender."""

from __future__ import annotations

import enum
import hmac
import os
from collections.abc import Sequence

import msgspec

from aiosync.errors import HandshakeError, ProtocolError, SenderFullError
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.events import (
    Aborted,
    Left,
    Recalled,
    ReceiverEvent,
    UpdateArrived,
    Verified,
    Welcomed,
)
from aiosync.protocol.session import NONCE_SIZE, REASON, Session, proof_of
from aiosync.protocol.text import clean

__all__ = ["ReceiverSession", "ReceiverState"]


class ReceiverState(enum.Enum):
    """Where the session stands, seen from the worker."""

    GREETING = "greeting"
    PROVING = "proving"
    JOINING = "joining"
    IDLE = "idle"
    FETCHING = "fetching"
    HOLDING = "holding"
    CLOSED = "closed"


class ReceiverSession(Session):
    """The worker's side. It asks for the next update when it has answered for the last one and is
    :attr:`wanting`: so what it gets is the newest by then.

    Args:
        token: the secret that both sides hold.
        worker: this worker's index, >= 0; -1: the sender is to choose.
        pid: this process, for the sender to watch; 0 where the sender is on another machine.
        model_id: the model to be kept up to date; the sender refuses another than its own.
        codecs: the encodings that it knows.
        before: the index that the sender chose the last time; -1: none.
        signature: of the layout that it has; "": none.
        ticket: what came with the last welcome; b"": none.

    Attributes:
        have: the version whose bytes it still holds.
        maps: whether it can read the sender's memory.
    """

    inbound = framing.FROM_SENDER

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
        self.have = -1
        self.maps = False
        self.state = ReceiverState.GREETING
        self.version = -1
        self.sender_pid = 0
        self._token = token
        self._ticket = ticket
        self._worker = worker
        self._nonce = os.urandom(NONCE_SIZE)
        self._sender_nonce = b""
        self._round = -1
        self._notified = False
        self._wanting = False
        self._eager = False
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

    def receive(self, frame: f.Frame) -> list[ReceiverEvent]:
        """Take one frame from the sender.

        Raises:
            HandshakeError: the sender refused this worker, or does not know the token.
            ProtocolError: a frame that may not come in this state.
        """
        match self.state, frame:
            case ReceiverState.FETCHING, f.Update():
                self.state = ReceiverState.HOLDING
                self._round = frame.round
                return [UpdateArrived(frame)]
            case ReceiverState.CLOSED, _:
                return []
            case (
                (ReceiverState.GREETING | ReceiverState.PROVING | ReceiverState.JOINING),
                f.Refused(),
            ):
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
                return [Welcomed(frame)]
            case ((ReceiverState.IDLE | ReceiverState.HOLDING), f.Notify()):
                self._notified = True
                self._fetch_if_wanted()
                return []
            case ReceiverState.FETCHING, f.Notify():
                return []  # it crossed the Fetch, which is answered with the newest anyway
            case ReceiverState.FETCHING, f.Cut():
                self.state = ReceiverState.IDLE
                self._wanting = False
                return [Recalled()]
            case _, f.Abort():
                return [Aborted(frame.joint)]
            case _, f.Bye():
                self.state = ReceiverState.CLOSED
                self._dropped = frame.dropped
                return [Left(clean(frame.reason, REASON), frame.dropped, frame.replaced)]
            case _:
                raise ProtocolError(f"no {type(frame).__name__} frame may come in state {self.state.value}")

    @property
    def wanting(self) -> bool:
        """Whether the next update may be asked for; goes back to false when it is."""
        return self._wanting

    @wanting.setter
    def wanting(self, value: bool) -> None:
        self._wanting = value
        self._fetch_if_wanted()

    @property
    def superseded(self) -> bool:
        """Whether there is something newer than the held update."""
        return self._notified and self.state is ReceiverState.HOLDING

    def skip(self) -> None:
        """Give the held update back unused, and ask for the newest in its place, now or when wanting."""
        self._notified = True
        self.state = ReceiverState.IDLE
        self._fetch_if_wanted()

    def staged(self, *, copied: bool) -> None:
        """The held update waits for its moment; ``copied``: the sender's memory is not needed any more."""
        if self.state is ReceiverState.HOLDING:
            self.outgoing.append(f.Staged(round=self._round, copied=copied))

    def applied(self, version: int, seconds: dict[str, float], *, wanting: bool = False) -> None:
        """The held update has been committed (or was no newer than what is in service); ``wanting``: the next
        may be asked for with the answer."""
        self.version = max(self.version, version)
        self._wanting |= wanting
        if self._replies():
            fetch = self._next_fetch()
            ack = f.Ack(round=self._round, version=self.version, seconds=seconds, fetch=fetch)
            self.outgoing.append(ack)

    def refused(self, nack: f.Nack) -> None:
        """The held update could not be applied; ``nack.round`` is filled in here."""
        if self._replies():
            self.outgoing.append(msgspec.structs.replace(nack, round=self._round))
            self._fetch_if_wanted()

    def declined(self, nack: f.Nack) -> None:
        """The layout that came with the welcome does not do."""
        if self.state is ReceiverState.IDLE:
            self.outgoing.append(nack)

    def close(self, reason: str = "", *, dropped: bool = False) -> None:
        """Say goodbye; ``dropped``: though what was given is still being read."""
        if self.state not in (ReceiverState.GREETING, ReceiverState.PROVING, ReceiverState.CLOSED):
            self.outgoing.append(f.Bye(reason=reason, dropped=dropped))
        self.state = ReceiverState.CLOSED

    def let_go(self) -> None:
        """Say, after the sender has let this worker go, that nothing of its is read here any more."""
        if self._dropped:
            self._dropped = False
            self.outgoing.append(f.Bye(reason="the worker has let go"))

    def _answer(self, challenge: f.Challenge) -> list[ReceiverEvent]:
        if len(challenge.nonce) != NONCE_SIZE:
            raise HandshakeError(f"a nonce has {NONCE_SIZE} bytes, not {len(challenge.nonce)}")
        self._sender_nonce = challenge.nonce
        self.state = ReceiverState.PROVING
        proof = proof_of(self._token, b"worker", self._nonce, challenge.nonce)
        claim = proof_of(self._ticket, b"ticket", self._nonce, challenge.nonce) if self._ticket else b""
        self.outgoing.append(f.Proof(proof=proof, claim=claim))
        return []

    def _verify(self, accepted: f.Accepted) -> list[ReceiverEvent]:
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
        return [Verified(accepted.pid)]

    def _replies(self) -> bool:
        """Whether there is anybody to answer: the sender may have gone, or let this worker go, while the
        update was being applied."""
        held = self.state is ReceiverState.HOLDING
        if held:
            self.state = ReceiverState.IDLE
        return held

    def _fetch_if_wanted(self) -> None:
        fetch = self._next_fetch()
        if fetch is not None:
            self.outgoing.append(fetch)

    def _next_fetch(self) -> f.Fetch | None:
        """What asks for the next update, if that is to be done now; to be sent then."""
        due = self._notified or self._eager
        if not (due and self._wanting and self.state is ReceiverState.IDLE):
            return None
        self._notified = self._wanting = False
        self.state = ReceiverState.FETCHING
        return f.Fetch(have=self.have, maps=self.maps)
