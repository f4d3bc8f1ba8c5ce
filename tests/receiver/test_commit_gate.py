"""The gate: commits land between readers, in whatever order readers and commits come."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync import SyncTimeoutError
from aiosync._deadline import Deadline
from aiosync.receiver import commit_gate, commit_job
from aiosync.receiver.commit_gate import CommitGate, ForwardPasses, submit
from aiosync.receiver.commit_job import CommitJob
from aiosync.receiver.commit_wait import CommitWait
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
    gate.try_enter("a", "a")
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
            await job.done.wait()
            await asyncio.sleep(0)

    committing = asyncio.create_task(commit())
    readers = [asyncio.create_task(read()) for _ in range(3)]
    assert await within(asyncio.gather(*readers)) == [200, 200, 200]
    committing.cancel()
    await asyncio.wait([committing])
    assert commits > 20


MODEL: Any = SimpleNamespace(in_service=0)
"""What pinned() asks its applier for."""


async def test_tasks_that_outlive_the_body_they_were_started_in_do_not_starve_a_commit() -> None:
    """They take turns without a gap between them, as the requests of a busy server do."""
    gate, deadline, stop = CommitGate(), Deadline.after(PATIENCE), asyncio.Event()

    async def read(turn: asyncio.Semaphore) -> None:
        while not stop.is_set():
            async with gate.pinned(deadline, MODEL):
                turn.release()  # the next task enters while this one is inside
                await steps(2)
            await turn.acquire()

    turn = asyncio.Semaphore(0)
    async with gate.pinned(deadline, MODEL):
        tasks = [asyncio.create_task(read(turn)) for _ in range(4)]
        await steps(5)
    job = submit([gate], lambda: None)
    await within(job.done.wait())
    stop.set()
    turn.release()
    for _ in tasks:
        turn.release()
    await within(asyncio.gather(*tasks))


async def test_a_task_started_in_a_body_does_not_wait_for_what_that_body_holds_up() -> None:
    gate, deadline = CommitGate(), Deadline.after(PATIENCE)

    async def read() -> None:
        async with gate.pinned(deadline, MODEL), gate.pinned(deadline, MODEL):
            await steps(1)

    async with gate.pinned(deadline, MODEL):
        job = submit([gate], lambda: None)
        await within(asyncio.create_task(read()))
        assert not job.done.done()
    assert job.done.done()


async def test_a_body_in_a_body_of_a_task_whose_starter_has_left() -> None:
    gate, deadline, left = CommitGate(), Deadline.after(PATIENCE), asyncio.Event()

    async def read() -> None:
        async with gate.pinned(deadline, MODEL):
            await left.wait()
            async with gate.pinned(deadline, MODEL):
                await steps(1)

    async with gate.pinned(deadline, MODEL):
        task = asyncio.create_task(read())
        await steps(2)
        job = submit([gate], lambda: None)
    assert not job.done.done()
    left.set()
    await within(task)
    assert job.done.done()


async def test_a_chain_of_tasks_keeps_no_bodies_that_have_ended() -> None:
    gate, deadline, ended = CommitGate(), Deadline.after(PATIENCE), asyncio.Event()
    lengths: list[int] = []
    bodies: list[weakref.ref[object]] = []
    newest: asyncio.Task[None]

    async def read(left: int) -> None:
        nonlocal newest
        async with gate.pinned(deadline, MODEL):
            body = commit_gate._body.get()
            assert body is not None
            lengths.append(len(list(body)))
            bodies.append(weakref.ref(body))
            del body
            if left:
                newest = asyncio.create_task(read(left - 1))
                await steps(2)
            else:
                gc.collect()
                assert sum(body() is not None for body in bodies) < 5
                ended.set()

    newest = asyncio.create_task(read(50))
    await within(ended.wait())
    await within(newest)
    assert len(lengths) == 51
    assert max(lengths) < 5


def test_a_commit_that_raises_an_exit_each_time_fails() -> None:
    """Once it could be an interrupt, which is for the thread and not for the commit."""
    gate = CommitGate()

    def leave() -> None:
        raise SystemExit

    gate.try_enter("a", "a")
    job = submit([gate], leave)
    with pytest.raises(SystemExit):
        gate.leave("a")
    with pytest.raises(RuntimeError, match="SystemExit"):  # an event loop that waits for it goes on
        job.done.result()
    assert gate.waiting == []
    assert gate.commit_at_once(lambda: None)


def test_a_body_is_not_kept_out_by_a_commit_that_an_interrupt_left_waiting() -> None:
    gate = CommitGate()
    gate.try_enter("a", "a")
    job = submit([gate], lambda: None)
    del gate.inside["a"]  # the interrupt came before the commit
    assert gate.enter_blocking("b", "b", PATIENCE)
    assert job.done.done()


async def test_a_commit_is_overtaken_also_if_its_gate_is_another_receivers() -> None:
    gate = CommitGate()
    wait = CommitWait(CommitGate())  # Ray's actors give a second receiver of a model the gate of the first
    gate.try_enter("a", "a")
    for _ in range(3):
        job = submit([gate], lambda: None)
        task = asyncio.create_task(wait.wait(job, lambda: None))
        await steps(1)
        wait.overtake()
        assert job.done.cancelled()
        await within(task)


async def test_a_commit_is_overtaken_only_while_a_reader_of_the_first_time_is_there() -> None:
    gate = CommitGate()
    wait = CommitWait(gate)

    async def commit() -> tuple[CommitJob, asyncio.Task[None]]:
        job = submit([gate], lambda: None)
        task = asyncio.create_task(wait.wait(job, lambda: None))
        await steps(1)
        return job, task

    gate.try_enter("a", "a")
    for newcomer in "bcd":
        job, task = await commit()
        wait.overtake()
        assert job.done.cancelled()
        await within(task)
        assert gate.try_enter(newcomer, newcomer)
        gate.leave({"c": "b", "d": "c"}.get(newcomer, ""))
    job, task = await commit()
    gate.leave("a")  # and "d", which came later, holds the commit up
    wait.overtake()
    assert not job.done.done()
    wait.withdraw()  # as at the end
    assert job.done.cancelled()
    await within(task)


def test_a_commit_that_waits_for_passes_runs_in_the_thread_of_the_last_one() -> None:
    gate, passes = CommitGate(), ForwardPasses(commit_gate.submit.__code__)
    gate.watch(passes)
    passes.inside.append("a pass")
    threads: list[int] = []

    def end() -> None:
        while not passes.attention:  # until the commit has been announced
            time.sleep(0)
        passes.inside.remove("a pass")
        passes.run_ready()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end)
        assert gate.commit_soon(lambda: threads.append(threading.get_ident()), PATIENCE)
        ended.result()
        assert threads == [pool.submit(threading.get_ident).result()]


def test_a_commit_for_which_a_pass_takes_too_long_is_withdrawn() -> None:
    gate, passes = CommitGate(), ForwardPasses(commit_gate.submit.__code__)
    gate.watch(passes)
    passes.inside.append("a pass")
    committed: list[int] = []
    assert not gate.commit_soon(lambda: committed.append(1), BRIEF / 100)
    assert not gate.waiting
    passes.inside.remove("a pass")
    passes.run_ready()
    assert not committed


def test_a_commit_does_not_block_for_a_pinned_body(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = CommitGate()
    gate.try_enter("a", "a")
    monkeypatch.delattr(commit_gate, "submit")
    assert not gate.commit_soon(lambda: None, PATIENCE)


def test_a_commit_that_fails_in_another_thread_raises_in_the_one_that_waits() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CommitGate().commit_soon(fail, PATIENCE)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Gets an entry for each time that the event loop is blocked, in vain."""
    found: list[float] = []

    def commit_soon(gate: CommitGate, commit: object, seconds: float) -> bool:
        found.append(seconds)
        return False

    monkeypatch.setattr(CommitGate, "commit_soon", commit_soon)
    return found


def test_the_event_loop_is_blocked_only_for_passes_that_are_short(blocked: list[float]) -> None:
    gate = CommitGate()
    wait = CommitWait(gate)
    wait.block(lambda: None)
    assert not blocked  # it was not allowed
    CommitGate.blocking.add(gate)
    overtaken, quick, slow, none = None, 0.0001, 0.1, 0.0
    for waited, blocks in [
        (quick, 1),
        (slow, 2),
        (slow, 2),
        (quick, 2),
        (overtaken, 3),
        (quick, 3),
        (slow, 4),
    ]:
        wait.block(lambda: None)
        if waited is not None:
            wait.committed(waited)
        assert len(blocked) == blocks
    wait.committed(none)
    wait.block(lambda: None)
    assert len(blocked) == 5
    CommitGate.blocking.discard(gate)


def test_the_event_loop_is_not_blocked_where_several_receivers_share_it(
    blocked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CommitGate, "forks", CommitGate.forks)
    gates = [CommitGate() for _ in range(2)]
    CommitGate.blocking.update(gates)
    for gate in gates:
        CommitWait(gate).block(lambda: None)
    assert not blocked
    CommitGate.blocking.discard(gates[0])
    CommitWait(gates[1]).block(lambda: None)
    assert len(blocked) == 1
    commit_job.LOCK.acquire()  # as before a fork
    commit_gate._forked()
    assert not CommitGate.blocking  # the receivers of the parent have no loop in the child
