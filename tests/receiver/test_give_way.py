"""When a thread that has read a model lets another thread run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aiosync.receiver import give_way as giving
from aiosync.receiver.commit_gate import CommitGate, submit
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.receiver.give_way import give_way
from aiosync.transfer import yield_request
from aiosync.transfer.yield_request import NO_REQUEST, HeededRequest
from tests.kit.clock import PATIENCE

HERE = threading.get_ident


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each time that the processor is yielded."""
    found: list[str] = []
    monkeypatch.setattr(giving, "yield_processor", lambda: found.append("committed"))
    monkeypatch.setattr(yield_request, "yield_processor", lambda: found.append("asked"))
    monkeypatch.setattr(giving, "_thread", giving._Thread())
    monkeypatch.setattr(yield_request, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    for name in ("_whole_at", "_not_before"):
        monkeypatch.setattr(HeededRequest, name, 0.0)
    return found


@pytest.fixture
def gates() -> Iterator[list[CommitGate]]:
    """The gates of two receivers of the process that other threads commit to."""
    found = [CommitGate(), CommitGate()]
    CommitGate.blocking.update(found)
    yield found
    CommitGate.blocking.difference_update(found)


def asked() -> HeededRequest:
    """A request of a sender that sends."""
    return HeededRequest(b"\1")


def leave(gate: CommitGate, body: str = "a body") -> None:
    """End a pinned body, as the blocking twins do."""
    give_way(gate.yield_request, committed=gate.leave(body))


@pytest.mark.parametrize("waiting", [True, False])
def test_a_thread_that_has_committed_yields_its_processor(waiting: bool, yields: list[str]) -> None:
    gate = CommitGate()
    gate.try_enter("a body", "a")
    if waiting:
        submit([gate], lambda: yields.append("commits"))
    for _ in range(2):
        leave(gate)
    assert yields == (["commits", "committed"] if waiting else [])


@pytest.mark.parametrize("around", [0, 1], ids=["the same model", "another model"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_body_in_a_body_gives_way_at_the_end_of_the_outer_one(
    around: int, commits: bool, gates: list[CommitGate], yields: list[str]
) -> None:
    gates[0].heed(asked())
    gates[around].enter_blocking("the outer body", HERE(), PATIENCE)
    give_way(gates[0].yield_request, committed=commits)
    assert not yields
    leave(gates[around], "the outer body")
    assert yields == (["committed"] if commits else ["asked"] if around == 0 else [])


def test_a_thread_gives_way_whatever_others_read(gates: list[CommitGate], yields: list[str]) -> None:
    gates[0].heed(asked())
    gates[1].enter_blocking("a body", "another thread", PATIENCE)
    gates[0].enter_blocking("a body", HERE(), PATIENCE)
    leave(gates[0])
    assert yields == ["asked"]


class _Reading(nn.Module):
    """Its forward pass calls ``inner`` if it has one, and then ``then``."""

    def __init__(self, inner: nn.Module | None, then: Callable[[], object]) -> None:
        super().__init__()
        self.inner = inner
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x if self.inner is None else self.inner(x)
        self.then()
        return out


@pytest.mark.parametrize("busy", [True, False])
def test_a_pass_in_a_pass_gives_no_way(busy: bool, gates: list[CommitGate], yields: list[str]) -> None:
    """``busy``: each pass has something to do in the gate when it ends."""
    inner = nn.Linear(2, 2)
    outer = _Reading(inner, lambda: yields.append("inner ended"))
    guards = [
        ForwardGuard(gate, module, PATIENCE, lambda: None)
        for gate, module in zip(gates, (inner, outer), strict=True)
    ]
    for gate, guard in zip(gates, guards, strict=True):
        gate.heed(asked())
        guard._passes.attention += ["a test"] * busy
    for _ in range(2):
        yields.clear()
        outer(torch.ones(2))
        assert yields == ["inner ended", "asked"]
    for guard in guards:
        guard.remove()


def test_a_pass_that_has_committed_gives_way(yields: list[str]) -> None:
    gate = CommitGate()
    module = _Reading(None, lambda: submit([gate], lambda: yields.append("commits")))
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    module(torch.ones(2))
    assert yields == ["commits", "committed"]
    guard.remove()


def test_a_pass_in_a_pinned_body_gives_no_way(gates: list[CommitGate], yields: list[str]) -> None:
    module, gate = nn.Linear(2, 2), gates[0]
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    gate.heed(asked())
    gate.enter_blocking("a body", HERE(), PATIENCE)
    module(torch.ones(2))
    submit([gate], lambda: yields.append("commits"))
    module(torch.ones(2))
    assert not yields
    leave(gate)
    assert yields == ["commits", "committed"]
    guard.remove()


def test_who_asks_for_nothing_is_given_nothing(yields: list[str]) -> None:
    give_way(NO_REQUEST, committed=False)
    assert not yields
