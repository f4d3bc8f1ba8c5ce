"""How long a call polls for answers. Each look at the test's clock takes 0.3 of the longest poll."""

from __future__ import annotations

import time
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiosync.reports import WorkerReport
from aiosync.sender import early_answers
from aiosync.sender.early_answers import EarlyAnswers
from aiosync.sender.pending_acks import PendingAcks


class _Transport:
    """Has its worker's answer when it is asked for the ``after``-th time; 0: never."""

    def __init__(self, worker: int) -> None:
        self.worker, self.after, self.asked, self.takes_arrived = worker, 0, 0, True
        self.acks = PendingAcks(1, ())

    def take_arrived(self) -> bool:
        self.asked += 1
        answers = self.asked == self.after
        if answers:
            self.acks.settle(WorkerReport(self.worker, "applied", 1))
        return answers


class _Calls:
    """Calls with ``workers``, on ``processors``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, workers: int, processors: int) -> None:
        clock = count()
        monkeypatch.setattr(time, "perf_counter", lambda: 0.3 * early_answers._POLLING * next(clock))
        self.transports = [_Transport(worker) for worker in range(workers)]
        connections = {each.worker: SimpleNamespace(transport=each) for each in self.transports}
        self.early = EarlyAnswers(cast("Any", SimpleNamespace(connections=connections)))
        self.early._processors = processors

    def call(self, *after: int, may_poll: bool = True) -> tuple[bool, int]:
        """Return whether all answers were taken, and how often the first worker was asked."""
        acks = PendingAcks(1, range(len(self.transports)))
        for transport, number in zip(self.transports, after, strict=True):
            transport.acks, transport.after, transport.asked = acks, number, 0
        self.early.take(acks, may_poll=may_poll)
        return not acks.pending, self.transports[0].asked


def test_an_answer_that_comes_soon_is_polled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    assert [calls.call(n) for n in (1, 2, 4)] == [(True, 1), (True, 2), (True, 4)]
    assert calls.call(0) == (False, 4)


def test_all_answers_are_polled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=3, processors=4)
    assert calls.call(2, 1, 2) == (True, 2)
    assert calls.call(1, 3, 1) == (True, 1)


def test_workers_without_a_processor_of_their_own_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=2, processors=2)
    assert calls.call(1, 1) == (True, 1)
    assert [calls.call(2, 1) for _ in range(3)] == [(False, 1)] * 3


def test_calls_that_poll_in_vain_get_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    polled = [n for n in range(265) if calls.call(0)[1] > 1]
    pauses = [later - earlier - 1 for earlier, later in pairwise(polled)]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("after", [1, 2])
def test_an_answer_that_comes_soon_ends_the_pauses(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    for _ in range(4):
        calls.call(0)
    assert calls.call(0) == (False, 1)  # in a pause of two calls
    assert calls.call(after)[0]
    assert calls.call(0)[1] > 1


def test_a_worker_that_is_gone_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    acks = PendingAcks(1, [7])
    calls.early.take(acks, may_poll=True)
    assert acks.pending == {7}


def test_without_time_nothing_is_polled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    assert [calls.call(n, may_poll=False) for n in (1, 2)] == [(True, 1), (False, 1)]


def test_a_transport_that_leaves_it_to_the_loop_is_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    calls.transports[0].takes_arrived = False
    assert calls.call(2) == (False, 1)


def test_a_call_without_workers_ends_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch, workers=1, processors=2)
    calls.call(0)
    calls.early.take(PendingAcks(1, ()), may_poll=True)
    assert calls.call(0) == (False, 1)
