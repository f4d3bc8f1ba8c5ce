"""Connections over queues and pipes that outlive them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import multiprocessing
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from aiosync import InvalidArgumentError, WorkerLostError
from aiosync._deadline import Deadline
from aiosync.protocol import frames as f
from aiosync.transports.base import FramedTransport
from aiosync.transports.mp.base import MessagePipeListener, PipeConnection
from aiosync.transports.mp.pipes import ConnectionPipe, PipeListener, UnexpectedMessage
from aiosync.transports.mp.queues import QueueListener, QueuePair, QueuePipe
from tests.kit.clock import BRIEF, PATIENCE, eventually, within


def _soon() -> Deadline:
    return Deadline.after(PATIENCE)


class Ends:
    """A listener for one worker, and that worker's end."""

    def __init__(self, listener: MessagePipeListener, pipe: Any, other: Sequence[Any] = ()) -> None:
        self.listener = listener
        self.pipe = pipe
        self.accepted: asyncio.Queue[FramedTransport] = asyncio.Queue()
        self.other = other

    async def dial(self) -> PipeConnection:
        transport = PipeConnection(self.pipe)
        await transport.open(_soon())
        return transport

    async def accept(self) -> FramedTransport:
        return await within(self.accepted.get())


def _word(number: int) -> f.Frame:
    """A frame that is allowed before the authentication."""
    return f.Bye(reason=str(number))


@asynccontextmanager
async def _queues() -> AsyncIterator[Ends]:
    listener = QueueListener([0], multiprocessing.get_context("spawn"))
    pair = listener.pairs[0]
    ends = Ends(listener, QueuePipe(pair, pair.to_worker, pair.to_sender))
    await listener.listen(ends.accepted.put_nowait, lambda worker, reason: None)
    yield ends
    ends.pipe.close()
    listener.close()


@asynccontextmanager
async def _pipes() -> AsyncIterator[Ends]:
    ours, theirs = multiprocessing.Pipe()
    other: list[Any] = []
    listener = PipeListener([ours], lambda worker, message: other.append((worker, message)))
    ends = Ends(listener, ConnectionPipe(theirs, lambda message: None), other)
    await listener.listen(ends.accepted.put_nowait, lambda worker, reason: None)
    yield ends
    ends.pipe.close()
    listener.close()
    ours.close()
    theirs.close()


@pytest.fixture(name="ends", params=[_queues, _pipes], ids=["queues", "pipes"])
def _ends(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_a_connection_begins_with_its_first_message(ends: Any) -> None:
    async with ends() as end:
        worker = await end.dial()
        assert end.accepted.empty()
        worker.write(_word(1))
        sender = await end.accept()
        assert await sender.receive(_soon()) == _word(1)
        sender.write(f.Join(), _word(2))
        assert await worker.receive(_soon()) == f.Join()
        assert await worker.receive(_soon()) == _word(2)


async def test_a_new_connection_ends_the_one_before(ends: Any) -> None:
    async with ends() as end:
        first = await end.dial()
        first.write(_word(1))
        old = await end.accept()
        old.write(_word(11))  # is not read: it precedes the frames of the next connection
        await first.aclose()
        second = await end.dial()
        second.write(_word(2))
        new = await end.accept()
        assert await old.receive(_soon()) == _word(1)
        with pytest.raises(WorkerLostError, match="new connection"):
            await old.receive(_soon())
        assert await new.receive(_soon()) == _word(2)
        new.write(_word(22))
        assert await second.receive(_soon()) == _word(22)
        old.write(_word(33))  # says nothing: it is over
        new.write(_word(44))
        assert await second.receive(_soon()) == _word(44)
        await second.aclose()


async def test_what_is_late_from_a_closed_connection_opens_none(ends: Any) -> None:
    async with ends() as end:
        worker = await end.dial()
        worker.write(_word(1))
        sender = await end.accept()
        await sender.aclose()
        worker.write(_word(2))
        await worker.aclose()
        again = await end.dial()
        again.write(_word(3))
        newer = await end.accept()
        assert newer is not sender
        assert await newer.receive(_soon()) == _word(3)
        assert end.accepted.empty()
        await again.aclose()


async def test_nobody_is_let_in_after_stop(ends: Any) -> None:
    async with ends() as end:
        worker = await end.dial()
        worker.write(_word(1))
        sender = await end.accept()
        end.listener.stop()
        worker.write(_word(2))
        assert await sender.receive(_soon()) == _word(1)
        assert await sender.receive(_soon()) == _word(2)
        await worker.aclose()
        again = await end.dial()
        again.write(_word(3))
        with pytest.raises(TimeoutError):
            await within(end.accepted.get(), BRIEF)
        await again.aclose()


async def test_a_peer_that_does_not_read_is_not_waited_for(ends: Any) -> None:
    async with ends() as end:
        worker = await end.dial()
        worker.write(_word(1))
        sender = await end.accept()
        await worker.aclose()  # reads no more
        frame = f.Refused(reason="x" * 10_000)
        for _ in range(500):
            sender.write(frame)
            if not sender.check_connection():
                break
        with pytest.raises(WorkerLostError, match="does not fit"):
            for _ in range(2):
                await sender.receive(_soon())


async def test_other_messages_on_a_pipe_are_handed_over_in_order() -> None:
    async with _pipes() as end:
        theirs: Connection[Any, Any] = end.pipe._connection
        worker = await end.dial()
        for number in range(5):
            theirs.send({"number": number, "padding": "x" * 8_000})
            worker.write(_word(number))
        sender = await end.accept()
        for number in range(5):
            assert await sender.receive(_soon()) == _word(number)
        await eventually(lambda: len(end.other) == 5, "all are handed over")
        assert [message["number"] for _, message in end.other] == list(range(5))
        await worker.aclose()


async def test_a_handler_that_raises_loses_no_other_message() -> None:
    ours, theirs = multiprocessing.Pipe()
    seen: list[Any] = []
    errors: list[dict[str, Any]] = []

    def take(message: Any) -> None:
        seen.append(message)
        if message == "bad":
            raise ZeroDivisionError

    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    pipe = ConnectionPipe(ours, take)
    pipe.open(lambda message: None, lambda reason: None)
    for message in ("bad", "good", 3):
        theirs.send(message)
    await eventually(lambda: len(seen) == 3, "all are handed over")
    assert seen == ["bad", "good", 3]
    assert isinstance(errors[0]["exception"], ZeroDivisionError)
    pipe.close()
    ours.close()
    theirs.close()


async def test_a_message_that_nobody_takes_breaks_the_pipe() -> None:
    ours, theirs = multiprocessing.Pipe()

    def take(message: Any) -> None:
        raise UnexpectedMessage("there is no on_other_message")

    lost: list[str] = []
    pipe = ConnectionPipe(ours, take)
    pipe.open(lambda message: None, lost.append)
    theirs.send("hello")
    await eventually(lambda: bool(lost), "it is reported")
    assert lost == ["there is no on_other_message"]
    pipe.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("unread", [False, True])
async def test_the_end_of_a_peer_is_noticed_though_it_left_something_unread(unread: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    seen: list[Any] = []
    lost: list[str] = []
    pipe = ConnectionPipe(ours, seen.append)
    pipe.open(lambda message: None, lost.append)
    if unread:
        pipe.put(b"unread")
    theirs.send("last")
    theirs.close()
    await eventually(lambda: bool(lost), "it is reported")
    await asyncio.sleep(0)
    assert seen == ["last"]
    pipe.close()
    ours.close()


@pytest.fixture
def one_way() -> Iterator[Connection[Any, Any]]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    yield writer
    reader.close()
    writer.close()


async def test_a_one_way_pipe_is_refused(one_way: Connection[Any, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="duplex"):
        ConnectionPipe(one_way, print).open(print, print)


async def test_a_pipe_whose_other_end_closes() -> None:
    async with _pipes() as end:
        worker = await end.dial()
        worker.write(_word(1))
        sender = await end.accept()
        await worker.aclose()
        end.pipe._connection.close()
        assert await sender.receive(_soon()) == _word(1)
        with pytest.raises(WorkerLostError, match="closed"):
            await sender.receive(_soon())


async def test_queues_are_replaced_only_if_a_lock_was_left_taken() -> None:
    async with _queues() as end:
        listener = end.listener
        assert isinstance(listener, QueueListener)
        worker = await end.dial()
        worker.write(_word(1))
        sender = await end.accept()
        await worker.aclose()
        before = listener.pairs[0]
        await listener.replace(sender)
        assert listener.pairs[0] is before
        before.to_worker._rlock.acquire()  # type: ignore[attr-defined]
        await listener.replace(sender)
        after = listener.pairs[0]
        assert after is not before
        again = PipeConnection(QueuePipe(after, after.to_worker, after.to_sender))
        await again.open(_soon())
        again.write(_word(2))
        assert await (await end.accept()).receive(_soon()) == _word(2)
        await again.aclose()


def test_a_pair_closes_when_all_its_users_are_done() -> None:
    pair = QueuePair(multiprocessing.get_context("spawn"))
    pair.acquire()
    pair.close()
    pair.to_worker.put(b"still open")
    assert pair.to_worker.get() == b"still open"
    pair.release()
    with pytest.raises((OSError, ValueError)):
        pair.to_worker.put(b"closed")
    pair.close()


@pytest.mark.parametrize("broken", [0, 1])
async def test_listen_may_be_called_again_after_it_failed(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``connect`` of a process that had no descriptor left for a moment."""
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    listener = PipeListener([ours for ours, _ in pairs], lambda worker, message: None)
    opened: list[ConnectionPipe] = []
    open_pipe = ConnectionPipe.open

    def fail_once(self: ConnectionPipe, *args: Any) -> Any:
        if len(opened) == broken:
            monkeypatch.undo()
            raise OSError(errno.EMFILE, "too many open files")
        opened.append(self)
        return open_pipe(self, *args)

    monkeypatch.setattr(ConnectionPipe, "open", fail_once)
    come: list[FramedTransport] = []
    with pytest.raises(OSError, match="too many"):
        await listener.listen(come.append, lambda worker, reason: None)
    await listener.listen(come.append, lambda worker, reason: None)
    for _, theirs in pairs:
        worker = PipeConnection(ConnectionPipe(theirs, lambda message: None))
        await worker.open(_soon())
        worker.write(_word(1))
        come.append(worker)
    await eventually(lambda: len(come) == 4, "a connection over each pipe")
    for transport in come:
        await transport.aclose()
    listener.close()
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pipe has one size")
async def test_small_messages_to_a_pipe_of_two_pages() -> None:
    """The size of a pipe of a user who has many."""
    async with _queues() as ends:
        pair = ends.listener.pairs[0]  # type: ignore[attr-defined]
        for queue in (pair.to_worker, pair.to_sender):
            fcntl.fcntl(queue._writer.fileno(), fcntl.F_SETPIPE_SZ, 2 * mmap.PAGESIZE)
        pipe = QueuePipe(pair, pair.to_sender, pair.to_worker)
        for _ in range(20):
            pipe.put(bytes(100))
