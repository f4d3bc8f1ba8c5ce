"""Calls of remote objects."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aiosync import NotConnectedError, SyncTimeoutError
from aiosync._deadline import Deadline
from aiosync.transports.remote_calls import PendingCall
from tests.kit.clock import BRIEF, PATIENCE, within


class _Call(PendingCall):
    phase = "ack"
    hint = "nothing answers"

    def _read(self) -> Any:
        return self._answer.result()


async def _started() -> _Call:
    call = _Call([0], Deadline.after(PATIENCE))
    with pytest.raises(SyncTimeoutError):
        await call.answer(Deadline.after(BRIEF / 10))
    return call


@pytest.mark.parametrize("late", [False, True])
def test_an_answer_reaches_another_event_loop(late: bool) -> None:
    """That of the call may be closed: an updater's pushes may each have an ``asyncio.run()``."""
    call = asyncio.run(_started())
    timer = threading.Timer(BRIEF if late else 0.0, call._resolve, [lambda: 7])
    timer.start()
    if not late:
        timer.join()
    assert asyncio.run(call.answer(Deadline.after(PATIENCE))) == 7
    timer.join()


async def test_an_answer_after_it_was_discarded() -> None:
    call = await _started()
    waiting = asyncio.create_task(call.answer(Deadline.after(PATIENCE)))
    await asyncio.sleep(0)
    call.discard()
    call._resolve(lambda: 7)
    with pytest.raises(NotConnectedError):
        await within(waiting)
    assert not call._waiters
