"""The sender's session of one worker::

    GREETING --Hello--> PROVING --Proof--> ACCEPTED --Join--> WELCOMING
                                                                  | welcome()
                                                                  v
                                            LEASED --Ack|Nack--> IDLE
                                               ^                  |
                                            offer()           publish()
                                               |                  v
                                             READY <--Fetch-- NOTIFIED

and from everywhere to CLOSED. An eager worker sends its Fetch in IDLE already, in advance, which saves a
round trip per update (and goes with the Ack then, so that LEASED is followed by READY); a worker that then
stops is left holding an update that it never asked for again, so this is for small models. ``publish`` in
NOTIFIED changes nothing, and in LEASED is sent once: a worker that has not begun with its update then sends
a Fetch in place of an answer and gets the newest. So at most three frames are ever under way to a worker,
whatever the sender publishes (latest wins).
"""

from __future__ import annotations

import enum
import hmac
import os

from aiosync.errors import HandshakeError, ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.events import (
    Applied,
    Fetched,
    Greeted,
    Left,
    Rejected,
    SenderEvent,
    StageDone,
)
from aiosync.protocol.session import NONCE_SIZE, REASON, Session, proof_of
from aiosync.protocol.text import clean

__all__ = ["SenderSession", "SenderState"]


_MESSAGE = 8 * 1024

_TRACEBACK = 32 * 1024
"""Characters of a peer's text that are kept."""


class SenderState(enum.Enum):
    """Where a worker's session stands, seen from the sender."""

    GREETING = "greeting"
    PROVING = "proving"
    ACCEPTED = "accepted"
    WELCOMING = "welcoming"
    IDLE = "idle"
    NOTIFIED = "notified"
    READY = "ready"
    LEASED = "leased"
    CLOSED = "closed"


class SenderSession(Session):
    """One worker's session, on the sender.

    Args:
        token: the secret that both sides hold.
        pid: this process, for the worker to watch; 0 where the worker is on another machine.

    Attributes:
        state: see :mod:`aiosync.protocol.session`.
        acked_version: the newest that the worker runs on; -1: none.
        leased_round: of the update that was offered last; -1: none.
    """

    inbound = framing.FROM_WORKER

    def __init__(self, token: bytes, pid: int = 0) -> None:
        super().__init__()
        self.state = SenderState.GREETING
        self.acked_version = -1
        self.leased_round = -1
        self._leased_version = -1
        self._token = token
        self._pid = pid
        self._hello: f.Hello | None = None
        self._nonce = os.urandom(NONCE_SIZE)
        self._claim = b""
        self._newest = -1
        self._told = False

    @property
    def authenticated(self) -> bool:
        """Whether the worker has proved that it knows the token."""
        strangers = SenderState.GREETING, SenderState.PROVING, SenderState.CLOSED
        return self.state not in strangers

    def receive(self, frame: f.Frame) -> list[SenderEvent]:
        """Take one frame from the worker.

        Raises:
            HandshakeError: the worker speaks another protocol or does not know the token.
            ProtocolError: a frame that may not come in this state.
        """
        match self.state, frame:
            case SenderState.LEASED, f.Ack() if frame.round == self.leased_round:
                self._check_offered(frame)
                applied = Applied(frame.round, frame.version, frame.seconds)
                self.acked_version = frame.version
                if frame.fetch is None:
                    self._settle()
                    return [applied]
                self.state = SenderState.READY
                return [applied, Fetched(frame.fetch.have, frame.fetch.maps)]
            case SenderState.CLOSED, _:
                return []
            case SenderState.GREETING, f.Hello():
                return self._challenge(frame)
            case SenderState.PROVING, f.Proof():
                return self._verify(frame)
            case SenderState.ACCEPTED, f.Join():
                return self._greeted()
            case _, f.Bye():
                self.state = SenderState.CLOSED
                return [Left(clean(frame.reason, REASON), frame.dropped)]
            case ((SenderState.NOTIFIED | SenderState.IDLE | SenderState.LEASED), f.Fetch()):
                self.state = SenderState.READY
                return [Fetched(frame.have, frame.maps)]
            case SenderState.LEASED, f.Staged() if frame.round == self.leased_round:
                return [StageDone(frame.round, frame.copied)]
            case SenderState.LEASED, f.Nack() if frame.round == self.leased_round:
                self._check_offered(frame)
                if frame.kind == "below":
                    self.acked_version = frame.version
                self._settle()
                return [Rejected(_cleaned(frame))]
            case ((SenderState.IDLE | SenderState.NOTIFIED), f.Nack()) if self.leased_round < 0:
                return [Rejected(_cleaned(frame))]  # of the layout
            case _:
                raise ProtocolError(f"no {type(frame).__name__} frame may come in state {self.state.value}")

    @property
    def hello(self) -> f.Hello | None:
        """How the worker introduced itself; None before it has."""
        return self._hello

    def claims(self, ticket: bytes) -> bool:
        """Whether the worker has proved that it holds ``ticket``."""
        hello = self._hello
        if hello is None or not ticket:
            return False
        return hmac.compare_digest(proof_of(ticket, b"ticket", hello.nonce, self._nonce), self._claim)

    def welcome(self, welcome: f.Welcome) -> None:
        """Take the worker in; tell it next what there is to fetch, with :meth:`publish`."""
        self._expect(SenderState.WELCOMING)
        self.state = SenderState.IDLE
        self.outgoing.append(welcome)

    def refuse(self, reason: str, *, retry: bool = False) -> None:
        """Turn the worker away; ``retry``: it may try again a little later."""
        self.outgoing.append(f.Refused(reason=reason, retry=retry))
        self.state = SenderState.CLOSED

    def publish(self, round_: int) -> None:
        """There is a newer update: tell the worker, now or when it has answered for the last one."""
        self._newest = max(self._newest, round_)
        if self.state is SenderState.IDLE:
            self._notify()
        elif self.state is SenderState.LEASED and not self._told:
            self._told = True
            self.outgoing.append(f.Notify(round=self._newest))

    def offer(self, update: f.Update) -> None:
        """Answer the worker's fetch."""
        if self.state is not SenderState.READY:
            self._expect(SenderState.READY)
        self.state = SenderState.LEASED
        self.leased_round = update.round
        self._leased_version = update.version
        self._told = False
        self._newest = max(self._newest, update.round)
        self.outgoing.append(update)

    def recall(self, *, again: bool) -> None:
        """The offered update is taken back, before all of it was sent; ``again``: it, or a newer one, can be
        fetched."""
        self._expect(SenderState.LEASED)
        self.state = SenderState.IDLE
        self._told = False
        if again:
            self._notify()

    def abort(self, joint: str) -> None:
        """Call a joint update off."""
        if self.authenticated:
            self.outgoing.append(f.Abort(joint=joint))

    def close(self, reason: str = "", *, dropped: bool = False, replaced: bool = False) -> None:
        """Say goodbye."""
        if self.authenticated:
            self.outgoing.append(f.Bye(reason=reason, dropped=dropped, replaced=replaced))
        self.state = SenderState.CLOSED

    def _challenge(self, hello: f.Hello) -> list[SenderEvent]:
        if hello.protocol != f.PROTOCOL_VERSION:
            raise HandshakeError(
                f"worker {hello.worker} speaks protocol {hello.protocol}, this side {f.PROTOCOL_VERSION}"
            )
        if len(hello.nonce) != NONCE_SIZE:
            raise HandshakeError(f"a nonce has {NONCE_SIZE} bytes, not {len(hello.nonce)}")
        self._hello = hello
        self.state = SenderState.PROVING
        # No proof yet: a stranger could try passwords on it, one after another, at home.
        self.outgoing.append(f.Challenge(nonce=self._nonce))
        return []

    def _verify(self, answer: f.Proof) -> list[SenderEvent]:
        hello = self._hello
        assert hello is not None
        expected = proof_of(self._token, b"worker", hello.nonce, self._nonce)
        if not hmac.compare_digest(expected, answer.proof):
            self.refuse(
                "it does not know the sender's token: give both sides the same token=, or none to either"
            )
            raise HandshakeError(
                f"worker {hello.worker} does not know this scheme's token: is its token= another?"
            )
        self.state = SenderState.ACCEPTED
        self._claim = answer.claim
        proof = proof_of(self._token, b"sender", self._nonce, hello.nonce)
        self.outgoing.append(f.Accepted(proof=proof, pid=self._pid))
        return []

    def _greeted(self) -> list[SenderEvent]:
        assert self._hello is not None
        self.state = SenderState.WELCOMING
        return [Greeted(self._hello)]

    def _check_offered(self, answer: f.Ack | f.Nack) -> None:
        if answer.version != self._leased_version:
            raise ProtocolError(
                f"expected an answer for version {self._leased_version}, got one for version {answer.version}"
            )

    def _settle(self) -> None:
        self.state = SenderState.IDLE
        if self._told:
            self.state = SenderState.NOTIFIED
        elif self._newest > self.leased_round:
            self._notify()

    def _notify(self) -> None:
        self.state = SenderState.NOTIFIED
        self.outgoing.append(f.Notify(round=self._newest))

    def _expect(self, state: SenderState) -> None:
        if self.state is not state:
            raise ProtocolError(f"not possible in state {self.state.value}, only in {state.value}")


def _cleaned(nack: f.Nack) -> f.Nack:
    """The refusal as it can be printed."""

    def short(text: str) -> str:
        return clean(text, f.MAX_TEXT)

    return f.Nack(
        round=nack.round,
        version=nack.version,
        kind=nack.kind,
        error_type=short(nack.error_type),
        message=clean(nack.message, _MESSAGE, lines=True),
        traceback=clean(nack.traceback, _TRACEBACK, lines=True, keep_end=True),
        missing=[short(name) for name in nack.missing],
        unexpected=[short(name) for name in nack.unexpected],
        differing={short(n): (short(a), short(b)) for n, (a, b) in nack.differing.items()},
        omitted=nack.omitted,
    )
