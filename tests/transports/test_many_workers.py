"""Small updates to many workers: each is one write, and none is lost, whatever the workers do."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aiosync.transports import _offload
from aiosync.transports._offload import LoopThread, Mailbox, TurnOfSends
from aiosync.transports.tcp.socket_writer import SocketWriter
from tests.kit.clock import eventually, within
from tests.kit.models import Uniform, fill, value_of
from tests.kit.tcp import join, make_worker, sender_of

MANY = 3 * _offload._SENT_AT_ONCE
SENDS = 5


async def _workers(stack: AsyncExitStack, scheme: Any) -> list[Any]:
    workers = [make_worker(scheme.address) for _ in range(MANY)]
    for worker in workers:
        stack.push_async_callback(worker.close)
    await within(join(scheme, *workers))
    return workers


async def test_a_small_update_is_one_write_to_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    send = SocketWriter._send

    def counted(self: SocketWriter) -> int:
        sent = send(self)
        if sent:
            writes.append(sent)
        return sent

    model = Uniform(0.0)
    async with sender_of(model) as scheme, AsyncExitStack() as stack:
        workers = await _workers(stack, scheme)
        await within(scheme.send())
        monkeypatch.setattr(SocketWriter, "_send", counted)
        for number in range(1, SENDS + 1):
            fill(model, float(number))
            writes.clear()
            await within(scheme.send())
            large = [
                sent for sent in writes if sent > sum(parameter.nbytes for parameter in model.parameters())
            ]  # the others are answers
            assert len(large) == MANY
            assert [value_of(worker.model) for worker in workers] == [float(number)] * MANY


async def test_a_small_update_keeps_no_slot_until_it_is_answered() -> None:
    model = Uniform(0.0)
    async with sender_of(model) as scheme, AsyncExitStack() as stack:
        await _workers(stack, scheme)
        report = await within(scheme.send(wait=False))
        # No answer can have been handled: this task has not given the loop back since.
        assert {each.status for each in report.workers.values()} == {"published"}
        groups = scheme.get_sender()._groups
        assert [group.pool.readers() for group in groups] == [set()]


async def test_workers_that_leave_in_the_middle_of_sends() -> None:
    model = Uniform(0.0)
    async with sender_of(model, on_failure="drop") as scheme, AsyncExitStack() as stack:
        workers = await _workers(stack, scheme)
        for number, leaving in enumerate(workers[: MANY // 2], 1):
            fill(model, float(number))
            sending = asyncio.create_task(scheme.send())
            await asyncio.sleep(0)
            transports = scheme.sender_transports
            transports[max(transports)].abort()  # type: ignore[attr-defined]
            await within(leaving.close())
            await within(sending)
        left = workers[MANY // 2 :]
        fill(model, 99.0)
        await within(scheme.send())
        await eventually(
            lambda: sum(value_of(worker.model) == 99.0 for worker in left) >= len(scheme.workers),
            "the workers that stayed have the last version",
        )


async def test_a_mailbox_keeps_the_order_and_survives_an_error() -> None:
    thread, seen, reported = LoopThread("test-mailbox"), list[int](), list[Any]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    count = 3 * _offload._CALLS_AT_ONCE
    try:
        mailbox = Mailbox(thread)

        def note(number: int) -> None:
            seen.append(number)
            if number == count // 2:
                raise RuntimeError("one call fails")

        def post(start: int) -> None:
            for number in range(start, start + count):
                mailbox.post(note, number)

        thread.call(post, 0)
        await eventually(lambda: len(seen) == count, "the thread's calls have run")
        await asyncio.to_thread(post, count)
        await eventually(lambda: len(seen) == 2 * count, "another thread's calls have run")
        assert seen == list(range(2 * count))
        assert [str(exc) for exc in reported] == ["one call fails"]
    finally:
        loop.set_exception_handler(None)
        thread.close()


async def test_the_last_calls_of_a_thread_arrive() -> None:
    for _ in range(20):
        thread, seen = LoopThread("test-mailbox"), list[int]()
        mailbox, _ = thread.shared()
        thread.call(mailbox.post, seen.append, 1)
        await asyncio.to_thread(thread.close)
        await eventually(lambda seen=seen: seen == [1], "the thread's last call has run")  # type: ignore[misc]


def test_a_mailbox_whose_loop_is_closed_keeps_nothing() -> None:
    async def make() -> tuple[LoopThread, Mailbox]:
        thread = LoopThread("test-mailbox")
        return thread, Mailbox(thread)

    thread, mailbox = asyncio.run(make())
    try:
        for _ in range(3):
            mailbox.post(print)
        assert not mailbox._calls
    finally:
        thread.close()


async def test_the_first_sends_of_a_turn_are_made_at_once_and_the_others_by_the_thread() -> None:
    thread = LoopThread("test-turn")
    try:
        turn, made = TurnOfSends(thread), list[bool]()
        here = threading.get_ident()
        for _ in range(2):
            made.clear()
            for _ in range(MANY):
                turn.add(lambda: made.append(threading.get_ident() == here))
            assert made == [True] * _offload._SENT_AT_ONCE
            await eventually(lambda: len(made) == MANY, "the thread has made the others")
            assert not any(made[_offload._SENT_AT_ONCE :])
    finally:
        thread.close()
