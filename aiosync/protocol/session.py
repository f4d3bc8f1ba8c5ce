"""Sessions: what may be said when, on each side of one connection.

Both are sans I/O. Feed them the frames that arrived (:meth:`receive` returns events) or tell them what
happened here (the other methods); take what has to be sent from :meth:`frames_to_send`.

The sender's session of one worker::

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
NOTIFIED changes nothing, and in LEASED is told once: a worker that has not begun with its update then sends
a Fetch in place of an answer and gets the newest. So at most three frames are ever under way to a worker,
whatever the sender publishes (latest wins).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from aiosync.errors import HandshakeError, ProtocolError, SenderFullError
from aiosync.protocol import frames as f
from aiosync.protocol.events import (
    Aborted,
    Applied,
    Fetched,
    Greeted,
    Left,
    Recalled,
    ReceiverEvent,
    Rejected,
    SenderEvent,
    StageDone,
    UpdateArrived,
    Verified,
    Welcomed,
)
from aiosync.protocol.text import clean

__all__ = ["ReceiverSession", "ReceiverState", "SenderSession", "SenderState"]

_NONCE_SIZE = 16

_REASON = 512
_MESSAGE = 8 * 1024
_TRACEBACK = 32 * 1024
"""Characters of a peer's text that are kept."""


def _proof(key: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    return hmac.new(key, b"aiosync/3 " + role + mine + theirs, hashlib.sha256).digest()


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


class _Session:
    """What both sides have.

    Attributes:
        outgoing: the frames to send now, in order.
        inbound: what the peer may send once it has authenticated.
    """

    inbound: ClassVar[f.Inbound]

    def __init__(self) -> None:
        self.outgoing: list[f.Frame] = []

    def frames_to_send(self) -> list[f.Frame]:
        """The frames to send now, in order; each is handed out once."""
        out, self.outgoing = self.outgoing, []
        return out


class SenderSession(_Session):
    """One worker's session, on the sender.

    Args:
        token: the secret that both sides hold.
        pid: this process, for the worker to watch; 0 where the worker is on another machine.

    Attributes:
        state: see :mod:`aiosync.protocol.session`.
        acked_version: the newest that the worker runs on; -1: none.
        leased_round: of the update that was offered last; -1: none.
    """

    inbound = f.FROM_WORKER

    def __init__(self, token: bytes, pid: int = 0) -> None:
        super().__init__()
        self.state = SenderState.GREETING
        self.acked_version = -1
        self.leased_round = -1
        self._leased_version = -1
        self._token = token
        self._pid = pid
        self._hello: f.Hello | None = None
        self._nonce = os.urandom(_NONCE_SIZE)
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
                return [Left(clean(frame.reason, _REASON), frame.dropped)]
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
        return hmac.compare_digest(_proof(ticket, b"ticket", hello.nonce, self._nonce), self._claim)

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
        if len(hello.nonce) != _NONCE_SIZE:
            raise HandshakeError(f"a nonce has {_NONCE_SIZE} bytes, not {len(hello.nonce)}")
        self._hello = hello
        self.state = SenderState.PROVING
        # No proof yet: a stranger could try passwords on it, one after another, at home.
        self.outgoing.append(f.Challenge(nonce=self._nonce))
        return []

    def _verify(self, answer: f.Proof) -> list[SenderEvent]:
        hello = self._hello
        assert hello is not None
        expected = _proof(self._token, b"worker", hello.nonce, self._nonce)
        if not hmac.compare_digest(expected, answer.proof):
            self.refuse(
                "it does not know the sender's token: give both sides the same token=, or none to either"
            )
            raise HandshakeError(
                f"worker {hello.worker} does not know this scheme's token: is its token= another?"
            )
        self.state = SenderState.ACCEPTED
        self._claim = answer.claim
        proof = _proof(self._token, b"sender", self._nonce, hello.nonce)
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


class ReceiverState(enum.Enum):
    """Where the session stands, seen from the worker."""

    GREETING = "greeting"
    PROVING = "proving"
    JOINING = "joining"
    IDLE = "idle"
    FETCHING = "fetching"
    HOLDING = "holding"
    CLOSED = "closed"


class ReceiverSession(_Session):
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
        self.have = -1
        self.maps = False
        self.state = ReceiverState.GREETING
        self.version = -1
        self.sender_pid = 0
        self._token = token
        self._ticket = ticket
        self._worker = worker
        self._nonce = os.urandom(_NONCE_SIZE)
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
                reason = clean(frame.reason, _REASON)
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
                return [Left(clean(frame.reason, _REASON), frame.dropped, frame.replaced)]
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
        if len(challenge.nonce) != _NONCE_SIZE:
            raise HandshakeError(f"a nonce has {_NONCE_SIZE} bytes, not {len(challenge.nonce)}")
        self._sender_nonce = challenge.nonce
        self.state = ReceiverState.PROVING
        proof = _proof(self._token, b"worker", self._nonce, challenge.nonce)
        claim = _proof(self._ticket, b"ticket", self._nonce, challenge.nonce) if self._ticket else b""
        self.outgoing.append(f.Proof(proof=proof, claim=claim))
        return []

    def _verify(self, accepted: f.Accepted) -> list[ReceiverEvent]:
        expected = _proof(self._token, b"sender", self._sender_nonce, self._nonce)
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
