"""The sender's session of one worker.

States::

    GREETING --Hello--> PROVING --Proof--> ACCEPTED --Join--> WELCOMING
                                                                  | welcome()
                                                                  v
                                            LEASED --Ack|Nack--> IDLE
                                               ^                  |
                                            offer()           publish()
                                               |                  v
                                             READY <--Fetch-- NOTIFIED

Every state may go to CLOSED.

An eager worker sends its Fetch in IDLE already, together with its Ack, so that READY follows LEASED. That
saves a round trip per update. But an eager worker that is suspended then keeps an update in use which it did
not apply. So only small models use it.

``publish`` in NOTIFIED sends nothing. ``publish`` in LEASED sends one Notify: a worker that has not begun to
apply its update then sends a Fetch instead of an answer, and gets the newest. So at most three frames are in
flight to a worker, however often the sender publishes: the latest version wins.
"""

from __future__ import annotations

import enum
import hmac
import os

import msgspec

from aiosync.errors import HandshakeError, ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol.framing import clean
from aiosync.protocol.nack import printable
from aiosync.protocol.session import NONCE_SIZE, REASON, Session, proof_of


class SenderState(enum.Enum):
    """The states of a worker's session on the sender. The module's docstring shows the transitions."""

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

    ``pid`` is this process's id, which the worker watches; 0: the worker is on another machine.
    """

    inbound = f.FROM_WORKER

    def __init__(self, token: bytes, pid: int = 0) -> None:
        super().__init__()
        self.state = SenderState.GREETING
        # The newest version that the worker has acknowledged; -1: none.
        self.acked_version = -1
        # Round of the update that was offered last; -1: none.
        self.leased_round = -1
        self._leased_version = -1
        self._token = token
        self._pid = pid
        self._hello: f.Hello | None = None
        self._nonce = os.urandom(NONCE_SIZE)
        self._claim = b""
        # The newest published round.
        self._newest = -1
        # Whether a Notify was sent in LEASED.
        self._notified = False

    @property
    def authenticated(self) -> bool:
        """Whether the worker has proved that it knows the token."""
        strangers = SenderState.GREETING, SenderState.PROVING, SenderState.CLOSED
        return self.state not in strangers

    def receive(self, frame: f.Frame) -> list[f.Frame]:
        """Handle one frame from the worker; returns the frames that the caller has to handle.

        These are the Hello of a worker that has proved that it knows the token (answer it with
        :meth:`welcome` or :meth:`refuse`), Fetch (answer it with :meth:`offer`), Staged, Ack, Nack and Bye.
        An Ack's own Fetch follows it. Texts are safe to print.

        Raises:
            HandshakeError: the worker has another protocol version or does not know the token.
            ProtocolError: the frame is not allowed in this state.
        """
        match self.state, frame:
            case SenderState.LEASED, f.Ack() if frame.round == self.leased_round:
                self._check_offered(frame)
                self.acked_version = frame.version
                if frame.fetch is None:
                    self._end_lease()
                    return [frame]
                self.state = SenderState.READY
                return [frame, frame.fetch]
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
                return [msgspec.structs.replace(frame, reason=clean(frame.reason, REASON))]
            case ((SenderState.NOTIFIED | SenderState.IDLE | SenderState.LEASED), f.Fetch()):
                self.state = SenderState.READY
                return [frame]
            case SenderState.LEASED, f.Staged() if frame.round == self.leased_round:
                return [frame]
            case SenderState.LEASED, f.Nack() if frame.round == self.leased_round:
                self._check_offered(frame)
                if frame.kind == "below":
                    self.acked_version = frame.version
                self._end_lease()
                return [printable(frame)]
            case ((SenderState.IDLE | SenderState.NOTIFIED), f.Nack()) if self.leased_round < 0:
                return [printable(frame)]  # of the layout
            case _:
                raise ProtocolError(f"no {type(frame).__name__} frame may come in state {self.state.value}")

    @property
    def hello(self) -> f.Hello | None:
        """The worker's Hello; None before it has arrived."""
        return self._hello

    def claims(self, ticket: bytes) -> bool:
        """Return whether the worker has proved that it has ``ticket``."""
        hello = self._hello
        if hello is None or not ticket:
            return False
        return hmac.compare_digest(proof_of(ticket, b"ticket", hello.nonce, self._nonce), self._claim)

    def welcome(self, welcome: f.Welcome) -> None:
        """Send the Welcome. Call :meth:`publish` next if there is a version to fetch."""
        self._expect(SenderState.WELCOMING)
        self.state = SenderState.IDLE
        self.outgoing.append(welcome)

    def refuse(self, reason: str, *, retry: bool = False) -> None:
        """Refuse the worker and close. ``retry``: the worker may try again."""
        self.outgoing.append(f.Refused(reason=reason, retry=retry))
        self.state = SenderState.CLOSED

    def publish(self, round_: int) -> None:
        """Announce a newer update to the worker, now or after its answer to the last one."""
        self._newest = max(self._newest, round_)
        if self.state is SenderState.IDLE:
            self._notify()
        elif self.state is SenderState.LEASED and not self._notified:
            self._notified = True
            self.outgoing.append(f.Notify(round=self._newest))

    def offer(self, update: f.Update) -> None:
        """Send an update in answer to the worker's Fetch."""
        if self.state is not SenderState.READY:
            self._expect(SenderState.READY)
        self.state = SenderState.LEASED
        self.leased_round = update.round
        self._leased_version = update.version
        self._notified = False
        self._newest = max(self._newest, update.round)
        self.outgoing.append(update)

    def recall(self, *, again: bool) -> None:
        """Cancel the offered update before all of it was sent. ``again``: the worker may fetch now."""
        self._expect(SenderState.LEASED)
        self.state = SenderState.IDLE
        self._notified = False
        if again:
            self._notify()

    def abort(self, joint: str) -> None:
        """Tell the worker that a joint update is cancelled."""
        if self.authenticated:
            self.outgoing.append(f.Abort(joint=joint))

    def interrupt(self, round_: int) -> None:
        """Tell the worker that the bytes of this update will not arrive, if the worker has not answered."""
        if self.state is SenderState.LEASED and self.leased_round == round_:
            self.outgoing.append(f.Interrupt(round=round_))

    def close(self, reason: str = "", *, dropped: bool = False, replaced: bool = False) -> None:
        """Send a Bye and close. The arguments are those of :class:`~aiosync.protocol.frames.Bye`."""
        if self.authenticated:
            self.outgoing.append(f.Bye(reason=reason, dropped=dropped, replaced=replaced))
        self.state = SenderState.CLOSED

    def _challenge(self, hello: f.Hello) -> list[f.Frame]:
        if hello.protocol != f.PROTOCOL_VERSION:
            raise HandshakeError(
                f"worker {hello.worker} speaks protocol {hello.protocol}, this side {f.PROTOCOL_VERSION}"
            )
        if len(hello.nonce) != NONCE_SIZE:
            raise HandshakeError(f"a nonce has {NONCE_SIZE} bytes, not {len(hello.nonce)}")
        self._hello = hello
        self.state = SenderState.PROVING
        # No proof yet: a stranger could use it to guess the token offline.
        self.outgoing.append(f.Challenge(nonce=self._nonce))
        return []

    def _verify(self, answer: f.Proof) -> list[f.Frame]:
        hello = self._hello
        assert hello is not None
        expected = proof_of(self._token, b"worker", hello.nonce, self._nonce)
        if not hmac.compare_digest(expected, answer.proof):
            self.refuse(
                "it does not know the sender's token: give both sides the same token=, or none to either"
            )
            raise HandshakeError(
                f"worker {hello.worker} does not know this scheme's token: give both sides the same token="
            )
        self.state = SenderState.ACCEPTED
        self._claim = answer.claim
        proof = proof_of(self._token, b"sender", self._nonce, hello.nonce)
        self.outgoing.append(f.Accepted(proof=proof, pid=self._pid))
        return []

    def _greeted(self) -> list[f.Frame]:
        assert self._hello is not None
        self.state = SenderState.WELCOMING
        return [self._hello]

    def _check_offered(self, answer: f.Ack | f.Nack) -> None:
        if answer.version != self._leased_version:
            raise ProtocolError(
                f"expected an answer for version {self._leased_version}, got one for version {answer.version}"
            )

    def _end_lease(self) -> None:
        """Continue after an answer: notify the worker if there is a newer round."""
        self.state = SenderState.IDLE
        if self._notified:
            self.state = SenderState.NOTIFIED
        elif self._newest > self.leased_round:
            self._notify()

    def _notify(self) -> None:
        self.state = SenderState.NOTIFIED
        self.outgoing.append(f.Notify(round=self._newest))

    def _expect(self, state: SenderState) -> None:
        if self.state is not state:
            raise ProtocolError(f"expected state {state.value}, got {self.state.value}")
