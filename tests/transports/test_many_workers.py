"""Small updates to many workers: each is one write, and none is lost, whatever the workers do."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from aiosync.errors import WorkerLostError
from aiosync.transfer.encoded_version import EncodedVersion
from aiosync.transports import _loop_thread
from aiosync.transports._loop_thread import LoopThread, Mailbox, TurnOfSends
from aiosync.transports.tcp.socket_writer import SocketWriter
from aiosync.weights import codec
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.models import Uniform, fill, value_of
from tests.kit.tcp import join, make_worker, sender_of

MANY = 3 * _loop_thread._SENT_AT_ONCE
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


async def test_updates_leave_while_the_trainer_computes_on_its_loop() -> None:
    model, loop = Uniform(0.0), asyncio.new_event_loop()
    others = threading.Thread(target=loop.run_forever)
    others.start()

    async def there(work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    async def make() -> Any:
        worker = make_worker(scheme.address)
        await worker.connect()
        await worker.serve()
        return worker

    try:
        async with sender_of(model) as scheme:
            connecting = asyncio.gather(*(there(make()) for _ in range(MANY)))
            await within(scheme.connect(min_workers=MANY))
            workers = await within(connecting)
            for _ in range(2):
                await within(scheme.send())
            await asyncio.sleep(0.1)  # each worker has asked for the next version
            fill(model, 5.0)
            version = (await scheme.send(wait=False)).version
            until = time.monotonic() + PATIENCE
            while any(worker.scheme.version < version for worker in workers):
                assert time.monotonic() < until, "some workers wait for the trainer's loop"
                time.sleep(0.001)  # noqa: ASYNC251 - the loop is blocked on purpose
            for worker in workers:
                await there(worker.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(others.join)
        loop.close()


async def test_a_version_that_was_sent_is_not_kept_for_workers_that_do_not_answer() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, EncodedVersion) for each in gc.get_objects())

    model = torch.nn.Linear(1000, 1000)
    async with sender_of(model, codec="zstd") as scheme, AsyncExitStack() as stack:
        workers = [
            make_worker(scheme.address, torch.nn.Linear(1000, 1000), codec="zstd") for _ in range(MANY)
        ]
        for worker in workers:
            stack.push_async_callback(worker.close)
        await within(join(scheme, *workers))
        await within(scheme.send())
        connections = scheme.get_sender().registry.connections
        for worker in workers:
            await stack.enter_async_context(worker.scheme.pinned())
            number = worker.scheme.worker_idx
            assert number is not None
            connection = connections[number]
            await within(scheme.send(worker_ids=[number], wait=False))
            await eventually(lambda connection=connection: connection.staged, "the worker has it")  # type: ignore[misc]
        assert kept() <= 1


async def test_an_error_while_a_version_is_encoded_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, encode, failed = Uniform(0.0), codec.encode, list[bool]()

    def encode_badly(*args: Any) -> Any:
        if not failed:
            failed.append(True)
            raise MemoryError("none left")
        return encode(*args)

    async with sender_of(model, codec="zstd", on_failure="drop") as scheme, AsyncExitStack() as stack:
        workers = [make_worker(scheme.address, codec="zstd", reconnect_for=PATIENCE) for _ in range(MANY)]
        for worker in workers:
            stack.push_async_callback(worker.close)
        await within(join(scheme, *workers))
        await within(scheme.send())
        monkeypatch.setattr(codec, "encode", encode_badly)
        fill(model, 1.0)
        report = await within(scheme.send())
        lost = [each for each in report.workers.values() if isinstance(each.error, WorkerLostError)]
        assert len(lost) == 1 and "MemoryError('none left')" in str(lost[0].error)
        fill(model, 2.0)
        await eventually(lambda: len(scheme.workers) == MANY, "the worker is back")
        await within(scheme.send())
        assert [value_of(worker.model) for worker in workers] == [2.0] * MANY
        assert not scheme.get_sender().registry.awaited.tracked


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
    count = 3 * _loop_thread._CALLS_AT_ONCE
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


@pytest.mark.parametrize("line", range(2, 8))
def test_a_mailbox_is_emptied_after_ctrl_c(line: int) -> None:
    """The loop is run again, as notebooks do. At most the call that is interrupted is lost."""
    loop, thread, seen = asyncio.new_event_loop(), LoopThread("test-mailbox"), list[int]()
    code, lines = Mailbox._run.__code__, list[int]()

    def interrupt(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is code and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return interrupt

    async def make() -> Mailbox:
        return Mailbox(thread)

    async def post() -> None:
        for number in range(3):
            mailbox.post(seen.append, number)
        sys.settrace(interrupt)
        await asyncio.sleep(0.1)

    try:
        mailbox = loop.run_until_complete(make())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(post())
        loop.run_until_complete(eventually(lambda: not mailbox._calls, "the calls have run"))
        assert len(seen) >= 2
    finally:
        sys.settrace(None)
        thread.close()
        loop.close()


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
            assert made == [True] * _loop_thread._SENT_AT_ONCE
            await eventually(lambda: len(made) == MANY, "the thread has made the others")
            assert not any(made[_loop_thread._SENT_AT_ONCE :])
    finally:
        thread.close()
