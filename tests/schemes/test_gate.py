"""The gate: commits land between readers, in whatever order readers and commits come."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aiosync import SyncTimeoutError
from aiosync._deadline import Deadline
from aiosync.schemes.gate import CommitGate, ForwardGuard, commit_now, submit
from tests.kit.clock import BRIEF, PATIENCE, steps, within

EVENTS = st.tuples(st.sampled_from(["enter", "leave", "commit", "withdraw"]), st.integers(0, 3))


@given(st.lists(EVENTS, max_size=60))
def test_no_commit_lands_while_anybody_reads(events: list[tuple[str, int]]) -> None:
    gate = CommitGate()
    inside: set[int] = set()
    jobs: list[Any] = []
    landed: list[int] = []

    def commit(number: int) -> None:
        assert not inside
        landed.append(number)

    for what, who in events:
        if what == "enter" and who not in inside:
            waiting = any(not job.done.done() for job in jobs)
            entered = gate.try_enter(who, who)
            assert entered == (not waiting)
            inside |= {who} if entered else set()
        elif what == "leave":
            inside.discard(who)
            gate.leave(who)
        elif what == "commit":
            number = len(jobs)
            jobs.append(submit([gate], partial(commit, number)))
        elif what == "withdraw" and jobs:
            job = jobs[who % len(jobs)]
            was_done = job.done.done()
            assert job.withdraw() is not was_done
    for who in list(inside):
        inside.discard(who)
        gate.leave(who)
    assert all(job.done.done() for job in jobs)
    assert landed == [n for n, job in enumerate(jobs) if not job.done.cancelled()]


def test_a_reader_does_not_wait_for_a_commit_that_it_holds_up() -> None:
    gate = CommitGate()
    assert gate.try_enter("outer", "me")
    job = submit([gate], lambda: None)
    assert not gate.try_enter("stranger", "you")
    assert gate.try_enter("inner", "me")
    gate.leave("inner")
    assert not job.done.done()
    gate.leave("outer")
    assert job.done.done()


def test_a_joint_commit_waits_for_all_gates() -> None:
    one, two = CommitGate(), CommitGate()
    one.try_enter("a", "a")
    two.try_enter("b", "b")
    done: list[str] = []
    submit([one, two], lambda: done.append("both"))
    one.leave("a")
    assert done == []
    assert not one.try_enter("c", "c")
    assert one.try_enter("d", "b")  # who reads two holds it up, and may read one as well
    two.leave("b")
    assert done == []
    one.leave("d")
    assert done == ["both"]


def test_what_a_commit_raises_goes_to_who_submitted_it() -> None:
    gate = CommitGate()

    def fail() -> None:
        raise ZeroDivisionError

    assert isinstance(submit([gate], fail).done.exception(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        commit_now(gate, fail)
    gate.try_enter("a", "a")
    assert not commit_now(gate, fail)
    job = submit([gate], fail)
    gate.leave("a")  # raises nothing here
    assert isinstance(job.done.exception(), ZeroDivisionError)
    assert gate.try_enter("b", "b")


async def test_entering_has_a_deadline() -> None:
    gate = CommitGate()
    gate.try_enter("a", "a")
    submit([gate], lambda: None)
    with pytest.raises(SyncTimeoutError, match="pin"):
        await gate.enter("b", "b", Deadline.after(BRIEF / 3))
    waiting = asyncio.create_task(gate.enter("b", "b", Deadline.after(PATIENCE)))
    await steps(3)
    assert not waiting.done()
    gate.leave("a")
    await within(waiting)


async def test_readers_and_commits_take_turns_without_end() -> None:
    """Back-to-back commits do not starve a reader, nor back-to-back readers a commit."""
    gate = CommitGate()
    commits = 0

    def count() -> None:
        nonlocal commits
        commits += 1

    async def read() -> int:
        for turn in range(200):
            ticket = object()
            await gate.enter(ticket, ticket, Deadline.after(PATIENCE))
            await asyncio.sleep(0)
            gate.leave(ticket)
            assert turn >= 0
        return 200

    async def commit() -> None:
        while True:
            job = submit([gate], count)
            await asyncio.wait([asyncio.wrap_future(job.done)])
            await asyncio.sleep(0)

    committing = asyncio.create_task(commit())
    readers = [asyncio.create_task(read()) for _ in range(3)]
    assert await within(asyncio.gather(*readers)) == [200, 200, 200]
    committing.cancel()
    await asyncio.wait([committing])
    assert commits > 20


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inside = threading.Event()
        self.go_on = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.weight * 1
        self.inside.set()
        assert self.go_on.wait(PATIENCE)
        return x + before - self.weight


def test_a_guarded_forward_pass_keeps_commits_out() -> None:
    gate, module = CommitGate(), _Slow()
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(module(torch.zeros(1)).detach()))
    thread.start()
    assert module.inside.wait(PATIENCE)

    def commit() -> None:
        module.weight.data = torch.ones(1)

    assert not commit_now(gate, commit)
    job = submit([gate], commit)
    module.go_on.set()
    thread.join()
    assert out == [torch.zeros(1)]
    assert job.done.done()
    assert module.weight.item() == 1
    guard.remove()
    guard.remove()
    assert "forward" not in module.__dict__


def test_a_copy_of_a_guarded_module_is_not_guarded() -> None:
    module = nn.Linear(2, 2)
    guard = ForwardGuard(CommitGate(), module, PATIENCE, lambda: None)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not isinstance(copied.forward, ForwardGuard)
        assert torch.equal(copied(torch.ones(2)), module(torch.ones(2)))
        assert getattr(copied.forward, "__self__", None) is copied
    guard.remove()


def test_a_forward_pass_that_raises_leaves_the_gate() -> None:
    gate, module = CommitGate(), nn.Linear(2, 2)
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    with pytest.raises(RuntimeError):
        module(torch.zeros(3))
    assert commit_now(gate, lambda: None)
    guard.remove()
