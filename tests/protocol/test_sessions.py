"""Sessions: the two state machines against each other, in every order that things may happen in."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiosync.errors import HandshakeError, ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol.receiver_session import ReceiverSession, ReceiverState
from aiosync.protocol.sender_session import SenderSession, SenderState
from tests.kit.raw_peer import drain

TOKEN = b"t" * 32


def _update(number: int) -> f.Update:
    return f.Update(round=number, version=number, payload={})


def _nack(version: int) -> f.Nack:
    return f.Nack(round=-1, version=version, kind="apply", error_type="OSError", message="no")


def greet(sender: SenderSession, receiver: ReceiverSession) -> list[f.Frame]:
    """Take both through the handshake, up to the welcome; what the sender's side heard."""
    events: list[f.Frame] = []
    for _ in range(3):
        for frame in drain(receiver):
            events += sender.receive(frame)
        for answer in drain(sender):
            receiver.receive(answer)
    return events


def joined(*, eager: bool = False) -> tuple[SenderSession, ReceiverSession]:
    """A pair that has been through the handshake; version 0 is in service."""
    sender, receiver = SenderSession(TOKEN, 1), ReceiverSession(TOKEN, 0, pid=2)
    greet(sender, receiver)
    welcome = f.Welcome(layout={}, version=0, worker=0, instance="i", eager=eager)
    sender.welcome(welcome)
    sender.publish(0)
    receiver.wanting = True
    first, notify = drain(sender)
    assert receiver.receive(first) == [welcome]
    assert receiver.receive(notify) == []
    for frame in drain(receiver):
        assert sender.receive(frame) == [f.Fetch()]
    sender.offer(_update(0))
    for frame in drain(sender):
        assert receiver.receive(frame) == [_update(0)]
    receiver.applied(0, {})
    for frame in drain(receiver):
        sender.receive(frame)
    return sender, receiver


class Exchange(RuleBasedStateMachine):
    """A sender that publishes and interrupts, and a worker that takes, refuses, skips or dawdles, over slow
    wires."""

    def __init__(self) -> None:
        super().__init__()
        self.to_worker: deque[f.Frame] = deque()
        self.to_sender: deque[f.Frame] = deque()
        self.published = 0
        self.pending: f.Update | None = None
        self.committed = [0]
        self.acked = [0]
        self.interrupted = -1  # the last round that was

    @initialize(eager=st.booleans())
    def join(self, eager: bool) -> None:
        self.sender, self.receiver = joined(eager=eager)

    def _move(self) -> None:
        self.to_worker.extend(drain(self.sender))
        self.to_sender.extend(drain(self.receiver))

    def _offer(self) -> None:
        again = self.interrupted == self.published > self.sender.acked_version
        due = again or self.sender.leased_round < self.published
        if self.sender.state is SenderState.READY and due:
            self.sender.offer(_update(self.published))

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.sender.publish(self.published)
        self._offer()
        self._move()

    @precondition(lambda self: self.to_worker)
    @rule()
    def deliver_to_worker(self) -> None:
        for event in self.receiver.receive(self.to_worker.popleft()):
            if isinstance(event, f.Interrupt):
                assert self.pending is not None and self.pending.round == event.round
                self.pending = None
                self.receiver.skip()
            else:
                assert isinstance(event, f.Update)
                assert self.pending is None
                self.pending = event
        self._move()

    @precondition(lambda self: self.sender.leased_round > self.interrupted)
    @rule()
    def interrupt(self) -> None:
        self.sender.interrupt(self.sender.leased_round)
        if self.sender.outgoing:
            self.interrupted = self.sender.leased_round
        self._move()

    @precondition(lambda self: self.to_sender)
    @rule()
    def deliver_to_sender(self) -> None:
        for event in self.sender.receive(self.to_sender.popleft()):
            match event:
                case f.Ack(version=version):
                    self.acked.append(version)
                case f.Fetch() | f.Nack() | f.Staged():
                    pass
                case _:
                    raise AssertionError(event)
        self._offer()
        self._move()

    @precondition(lambda self: self.pending is None)
    @rule(value=st.booleans())
    def want(self, value: bool) -> None:
        self.receiver.wanting = value
        self._move()

    @precondition(lambda self: self.pending is not None)
    @rule(again=st.booleans())
    def commit(self, again: bool) -> None:
        assert self.pending is not None
        self.committed.append(self.pending.version)
        self.receiver.wanting = again
        self.receiver.applied(self.pending.version, {})
        self.pending = None
        self._move()

    @precondition(lambda self: self.pending is not None)
    @rule()
    def refuse(self) -> None:
        assert self.pending is not None
        self.receiver.refused(_nack(self.pending.version))
        self.pending = None
        self._move()

    @precondition(lambda self: self.pending is not None)
    @rule(copied=st.booleans())
    def wait_for_readers(self, copied: bool) -> None:
        self.receiver.staged(copied=copied)
        self._move()

    @precondition(lambda self: self.pending is not None and self.receiver.superseded)
    @rule()
    def skip(self) -> None:
        self.receiver.skip()
        self.pending = None
        self._move()

    @invariant()
    def only_forward(self) -> None:
        assert self.committed == sorted(set(self.committed))
        assert self.acked == sorted(self.acked)

    @invariant()
    def nothing_queues_up(self) -> None:
        queued = [frame for frame in self.to_worker if not isinstance(frame, f.Interrupt)]
        assert len(queued) <= 3  # the Notify that crossed a Fetch, the Update, one more Notify

    def teardown(self) -> None:
        if not hasattr(self, "sender"):
            return
        # Whatever happened before: a worker that takes what comes ends up with the newest.
        for _ in range(20):
            if self.pending is not None:
                self.commit(True)
            elif self.receiver.state is ReceiverState.IDLE:
                self.want(True)
            while self.to_worker:
                self.deliver_to_worker()
            while self.to_sender:
                self.deliver_to_sender()
        refused_newest = self.committed[-1] < self.published and self.sender.leased_round == self.published
        assert self.committed[-1] == self.published or refused_newest
        assert self.sender.acked_version == self.committed[-1]


Exchange.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestExchange = Exchange.TestCase


def test_neither_side_takes_a_stranger() -> None:
    receiver = ReceiverSession(b"other", 0)
    sender = SenderSession(TOKEN)
    with pytest.raises(HandshakeError, match="token"):
        greet(sender, receiver)
    (refused,) = drain(sender)
    with pytest.raises(HandshakeError, match="token"):
        receiver.receive(refused)
    assert receiver.state is ReceiverState.CLOSED


def test_an_impostor_of_the_sender_is_found_out() -> None:
    receiver = ReceiverSession(TOKEN, 0)
    drain(receiver)
    assert receiver.receive(f.Challenge(nonce=b"n" * 16)) == []
    with pytest.raises(HandshakeError, match="token"):
        receiver.receive(f.Accepted(proof=b"p" * 32, pid=0))
    assert receiver.state is ReceiverState.CLOSED


def test_a_stranger_gets_nothing_that_a_token_can_be_tried_on() -> None:
    """The sender's first word depends on nothing but chance."""
    senders = [SenderSession(token) for token in (TOKEN, TOKEN, b"other")]
    for sender in senders:
        sender._nonce = b"n" * 16
        sender.receive(f.Hello(protocol=f.PROTOCOL_VERSION, worker=0, pid=0, nonce=b"m" * 16))
    said = [drain(sender) for sender in senders]
    assert said == [[f.Challenge(nonce=b"n" * 16)]] * 3


def test_only_who_holds_a_ticket_can_claim_it() -> None:
    for mine, claimed in [(b"t" * 16, True), (b"u" * 16, False), (b"", False)]:
        sender, receiver = SenderSession(TOKEN), ReceiverSession(TOKEN, 0, ticket=mine)
        greet(sender, receiver)
        assert sender.claims(b"t" * 16) is claimed
        assert not sender.claims(b"")


def test_a_worker_that_is_turned_away_hears_why() -> None:
    sender, receiver = SenderSession(TOKEN), ReceiverSession(TOKEN, 7)
    (event,) = greet(sender, receiver)
    assert isinstance(event, f.Hello)
    assert event.worker == 7
    sender.refuse("there is no worker 7")
    (refused,) = drain(sender)
    with pytest.raises(HandshakeError, match="there is no worker 7"):
        receiver.receive(refused)


def test_a_worker_that_gives_up_in_the_handshake_has_left() -> None:
    sender, receiver = SenderSession(TOKEN), ReceiverSession(TOKEN, 0)
    (hello,) = drain(receiver)
    sender.receive(hello)
    assert sender.receive(f.Bye(reason="enough")) == [f.Bye(reason="enough")]
    assert sender.state is SenderState.CLOSED


@pytest.mark.parametrize(
    "frame",
    [f.Fetch(), f.Ack(round=0, version=0, seconds={}), f.Staged(round=0, copied=True), f.Proof(proof=b"")],
)
def test_nothing_counts_before_the_proof(frame: f.Frame) -> None:
    with pytest.raises(ProtocolError, match="greeting"):
        SenderSession(TOKEN).receive(frame)


def _offering(round_: int) -> SenderSession:
    """A session whose worker has fetched an update."""
    sender, receiver = joined()
    sender.publish(1)
    receiver.wanting = True
    (notify,) = drain(sender)
    receiver.receive(notify)
    (fetch,) = drain(receiver)
    sender.receive(fetch)
    sender.offer(_update(round_))
    return sender


@pytest.mark.parametrize("round_", [-1, 1, 99])
def test_an_answer_to_another_round(round_: int) -> None:
    sender = _offering(5)
    for frame in (f.Ack(round=round_, version=5, seconds={}), f.Staged(round=round_, copied=True)):
        with pytest.raises(ProtocolError):
            sender.receive(frame)


@pytest.mark.parametrize(
    "answer",
    [
        f.Ack(round=5, version=6, seconds={}),
        f.Ack(round=5, version=2**61, seconds={}),
        f.Ack(round=5, version=-1, seconds={}),
        f.Nack(round=5, version=6, kind="apply", error_type="E", message=""),
        f.Nack(round=5, version=4, kind="below", error_type="E", message=""),
    ],
    ids=repr,
)
def test_what_no_worker_can_answer_is_not_believed(answer: f.Frame) -> None:
    sender = _offering(5)
    with pytest.raises(ProtocolError):
        sender.receive(answer)
    assert sender.acked_version == 0


def test_text_from_a_peer_can_be_printed() -> None:
    sender, receiver = joined()
    (left,) = sender.receive(f.Bye(reason="gone\n2026 CRITICAL root: \x1b[31mowned" + "y" * 9000))
    assert isinstance(left, f.Bye)
    assert left.reason.isprintable() and len(left.reason) < 1100
    (left,) = receiver.receive(f.Bye(reason="\r\x00\u202e"))
    assert isinstance(left, f.Bye)
    assert left.reason == r"\r\x00\u202e"


@pytest.mark.parametrize("eager", [False, True])
def test_an_update_is_due_from_its_notification_until_it_is_fetched(eager: bool) -> None:
    sender, receiver = joined(eager=eager)
    assert not receiver.due
    sender.publish(1)
    (notify,) = drain(sender)
    receiver.receive(notify)
    assert receiver.due
    receiver.wanting = True
    assert not receiver.due
    (fetch,) = drain(receiver)
    sender.receive(fetch)
    sender.offer(_update(1))
    sender.publish(2)
    for frame in drain(sender):
        receiver.receive(frame)
    assert not receiver.due  # before the answer to the last one
    receiver.applied(1, {})
    assert receiver.due


def test_an_eager_worker_asks_in_advance() -> None:
    sender, receiver = joined(eager=True)
    receiver.wanting = True
    (fetch,) = drain(receiver)
    assert sender.receive(fetch) == [f.Fetch()]
    sender.publish(1)
    assert drain(sender) == []  # the update says it all
    sender.offer(_update(1))
    (update,) = drain(sender)
    assert receiver.receive(update) == [_update(1)]


@pytest.mark.parametrize("newer", [False, True])
def test_an_answer_brings_the_next_fetch_along(newer: bool) -> None:
    sender, receiver = joined(eager=True)
    receiver.wanting = True
    (fetch,) = drain(receiver)
    sender.receive(fetch)
    sender.publish(1)
    sender.offer(_update(1))
    for frame in drain(sender):
        receiver.receive(frame)
    if newer:
        sender.publish(2)
        (notify,) = drain(sender)
        receiver.receive(notify)
    receiver.have = 1
    receiver.applied(1, {}, wanting=True)
    (ack,) = drain(receiver)
    assert sender.receive(ack) == [ack, f.Fetch(have=1)]
    assert drain(sender) == []  # it is asked for already
    sender.publish(2)
    sender.offer(_update(2))
    (update,) = drain(sender)
    assert receiver.receive(update) == [_update(2)]


def test_who_does_not_want_the_next_only_answers() -> None:
    sender, receiver = joined(eager=True)
    receiver.wanting = True
    for frame in drain(receiver):
        sender.receive(frame)
    sender.publish(1)
    sender.offer(_update(1))
    for frame in drain(sender):
        receiver.receive(frame)
    receiver.applied(1, {})
    (ack,) = drain(receiver)
    assert sender.receive(ack) == [ack]
    sender.publish(2)
    (notify,) = drain(sender)
    assert receiver.receive(notify) == []
    receiver.wanting = True
    (fetch,) = drain(receiver)
    assert sender.receive(fetch) == [f.Fetch()]


def test_a_layout_that_does_not_do_is_declined() -> None:
    sender, receiver = SenderSession(TOKEN), ReceiverSession(TOKEN, 0)
    greet(sender, receiver)
    sender.welcome(f.Welcome(layout={}, version=0, worker=0, instance="i"))
    sender.publish(0)
    for frame in drain(sender):
        receiver.receive(frame)
    receiver.declined(_nack(0))
    (nack,) = drain(receiver)
    assert sender.receive(nack) == [_nack(0)]


def test_abort_and_bye_are_heard_in_every_state() -> None:
    sender, receiver = joined()
    sender.abort("j")
    sender.close("done", dropped=True)
    abort, bye = drain(sender)
    assert receiver.receive(abort) == [f.Abort(joint="j")]
    assert receiver.receive(bye) == [f.Bye(reason="done", dropped=True)]
    assert receiver.receive(f.Notify(round=3)) == []
    receiver.applied(4, {})
    assert drain(receiver) == []  # the session is closed
