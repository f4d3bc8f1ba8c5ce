"""The pipe between a collector and a worker process: what a worker sends before it closes its end arrives."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import struct
from typing import Any

import pytest
import uvloop

from aiosync.collectors.command_pipe import CommandPipeClosed, ProcessCommandPipe
from tests.kit.clock import within

REPORT = "an error" * 10_000
"""Fits into the socket, and is more than asyncio's streams buffer for their reader."""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("unread", [0, 1], ids=["all read", "one unread"])
@pytest.mark.parametrize("late", [0, 1, 2], ids="{} sent after it".format)
def test_a_last_report_arrives(run: Any, unread: int, late: int) -> None:
    async def main() -> None:
        ours, theirs = multiprocessing.Pipe()
        pipe = await ProcessCommandPipe.open(ours)
        for _ in range(unread):
            pipe.send("a request")
        await asyncio.sleep(0)  # uvloop writes at the end of an iteration
        data = pickle.dumps(REPORT)
        os.write(theirs.fileno(), struct.pack("!Q", len(data)) + data)
        theirs.close()
        for _ in range(late):
            pipe.send("another request")
        assert await within(pipe.receive()) == REPORT
        with pytest.raises(CommandPipeClosed):
            await within(pipe.receive())
        pipe.close()

    run(main())
