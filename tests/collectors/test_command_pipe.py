"""The pipe between a collector and a worker: what a worker sends before it closes its end arrives."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import struct
from typing import Any, cast

import numpy as np
import pytest
import torch
import uvloop
from tensordict import TensorDict

from aiosync import WorkerLostError
from aiosync._deadline import Deadline
from aiosync.collectors import CollectorConfig
from aiosync.collectors.command_pipe import (
    Batch,
    Call,
    Collect,
    CommandPipe,
    CommandPipeClosed,
    Continued,
    EndEarly,
    ErrorReport,
    LocalCommandPipe,
    NewBuffer,
    Payload,
)
from aiosync.collectors.host import Host
from aiosync.collectors.process_pipe import ProcessCommandPipe
from aiosync.collectors.proxy import WorkerProxy
from aiosync.collectors.worker_spec import WorkerSpec
from tests.collectors.worlds import Counting, Odd
from tests.kit.clock import within

REPORT = "an error" * 10_000
"""Fits into the socket, and is more than the pipe reads at once."""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("unread", [0, 1], ids=["all read", "one unread"])
@pytest.mark.parametrize("late", [0, 1, 2], ids="{} sent after it".format)
def test_a_last_report_arrives(run: Any, unread: int, late: int) -> None:
    async def main() -> None:
        ours, theirs = multiprocessing.Pipe()
        pipe = await ProcessCommandPipe.open(ours)
        for _ in range(unread):
            pipe.send("a request")
        data = pickle.dumps(REPORT)
        os.write(theirs.fileno(), struct.pack("!BQ", 0, len(data)) + data)
        theirs.close()
        for _ in range(late):
            pipe.send("another request")
        assert await within(pipe.receive()) == REPORT
        with pytest.raises(CommandPipeClosed):
            await within(pipe.receive())
        pipe.close()

    run(main())


async def test_messages_of_every_kind() -> None:
    ours, theirs = multiprocessing.Pipe()
    sender, reader = await ProcessCommandPipe.open(ours), await ProcessCommandPipe.open(theirs)
    data, continued = TensorDict({"a": torch.ones(3)}, [3]), Continued({5: 3, 1 << 40: 2}, [-1])
    for message in (
        Collect(7, 512, True, (3, 4)),
        Collect(8, cast(int, np.int64(512))),
        EndEarly(),
        Batch(1 << 40, 64, 1, [3, 1, 2], None, continued),
    ):
        sender.send(message)
        found = await within(reader.receive())
        assert (type(found), found) == (type(message), message)
        assert type(found) is not Batch or type(found.continued) is Continued
    sender.send(Call(3, "execute", Payload(("path", (1,), {}))))
    assert (await within(reader.receive())).arguments.load("it") == ("path", (1,), {})
    sender.send(Batch(8, 64, 1, None, data))
    assert (await within(reader.receive())).data["a"].tolist() == [1, 1, 1]
    sender.close()
    reader.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_messages_that_are_larger_than_the_socket(run: Any) -> None:
    """They arrive in order. Until they are read, drain() waits, and the reader does not fill up."""

    async def main() -> None:
        ours, theirs = multiprocessing.Pipe()
        sender, reader = await ProcessCommandPipe.open(ours), await ProcessCommandPipe.open(theirs)
        await within(sender.drain())
        for number in range(20):
            sender.send((number, b"x" * 300_000))
        draining = [asyncio.ensure_future(sender.drain()) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in draining)
        draining.pop().cancel()
        assert len(reader._received) < 1_000_000
        for number in range(20):
            assert (await within(reader.receive()))[0] == number
        await within(draining[0])
        late = asyncio.ensure_future(reader.receive())
        await asyncio.sleep(0.01)
        late.cancel()
        sender.send("behind a cancelled call")
        assert await within(reader.receive()) == "behind a cancelled call"
        sender.close()
        with pytest.raises(CommandPipeClosed):
            await within(reader.receive())
        reader.send("lost")
        with pytest.raises(BrokenPipeError):
            await within(reader.drain())
        reader.close()
        reader.close()

    run(main())


@pytest.mark.parametrize("read", [True, False])
async def test_all_is_sent_before_a_flush_ends(read: bool) -> None:
    """Or the other end is closed."""
    ours, theirs = multiprocessing.Pipe()
    sender, reader = await ProcessCommandPipe.open(ours), await ProcessCommandPipe.open(theirs)
    await within(sender.flush())
    for number in range(3):
        sender.send((number, b"x" * 1_000_000))
    flushing = asyncio.ensure_future(sender.flush())
    await asyncio.sleep(0.1)
    assert not flushing.done()
    if read:
        assert [(await within(reader.receive()))[0] for _ in range(3)] == [0, 1, 2]
    else:
        reader.close()
    await within(flushing)
    sender.close()
    reader.close()


class _EndedHost(Host):
    """Runs a worker that has ended, after it has sent messages."""

    def __init__(self, *messages: Any) -> None:
        self._messages = messages

    async def start(self, spec: Any, schemes: Any) -> CommandPipe:
        ours, theirs = LocalCommandPipe.pair()
        for message in self._messages:
            theirs.send(message)
        theirs.close()
        return ours

    def kill(self) -> None:
        raise AssertionError("it has ended")

    def cause(self) -> str:
        return "it has ended"


@pytest.mark.parametrize("reported", [True, False])
async def test_a_report_behind_a_buffer_that_is_gone(reported: bool) -> None:
    handle = {"kind": "memfd", "pid": 1 << 30, "fd": 3, "inode": 1, "nbytes": 64}
    buffer = NewBuffer(0, handle, (("observation", (4,), torch.float32),), 2, ())
    messages = [buffer, ErrorReport.of(Odd("in step", 13))] if reported else [buffer]
    spec = WorkerSpec(1, 2, Counting, None, CollectorConfig(), 0)
    changed = asyncio.Event()
    worker = WorkerProxy(spec, _EndedHost(*messages), lambda _: changed.set(), lambda _: None)
    await worker.start({})
    await within(changed.wait())
    assert isinstance(worker.error, Odd if reported else WorkerLostError), worker.error
    await worker.close(Deadline.after(0))


@pytest.mark.parametrize("data", [b"cno_such_module\nOdd\n.", b"not a pickle"])
def test_an_exception_that_only_the_worker_can_import(data: bytes) -> None:
    error = ErrorReport.of(Odd("in step", 13))._replace(error=data).exception(3)
    assert type(error) is RuntimeError
    assert "Odd: " in str(error)
    assert "in step" in str(error)
    assert "in step" in str(error.__cause__)
    assert error.__notes__ == ["(raised by collector worker 3)"]
