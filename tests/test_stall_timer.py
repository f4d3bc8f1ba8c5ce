"""One timer finds every operation that makes no progress, and no other one."""

from __future__ import annotations

import asyncio

import pytest

from aiosync import _deadline
from aiosync._deadline import ProgressWatch, StallTimer
from tests.kit.clock import BRIEF, eventually


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deadline, "LATE_AFTER", BRIEF)
    monkeypatch.setattr(_deadline, "_SAMPLE", BRIEF / 4)


async def test_who_moves_is_not_late() -> None:
    timer, late, moved = StallTimer(), list[str](), [0]
    watches = {
        "stands": ProgressWatch(timer, lambda: 0, lambda: late.append("stands")),
        "cannot tell": ProgressWatch(timer, None, lambda: late.append("cannot tell")),
        "moves": ProgressWatch(timer, lambda: moved[0], lambda: late.append("moves")),
        "has ended": ProgressWatch(timer, lambda: 0, lambda: late.append("has ended")),
    }
    for watch in watches.values():
        watch.start()
    watches["has ended"].stop()

    async def move() -> None:
        while True:
            moved[0] += 1
            await asyncio.sleep(BRIEF / 8)

    moving = asyncio.create_task(move())
    await eventually(lambda: len(late) >= 2, "two are late")
    await asyncio.sleep(BRIEF)
    assert sorted(late) == ["cannot tell", "stands"]  # each once
    moving.cancel()
    await eventually(lambda: "moves" in late, "it is late when it has stopped moving")
    watches["stands"].start()
    await eventually(lambda: late.count("stands") == 2, "its next operation is watched too")
    timer.close()


async def test_a_late_one_ends_others() -> None:
    timer, late = StallTimer(), list[str]()

    def end_the_other() -> None:
        late.append("first")
        second.stop()

    first = ProgressWatch(timer, None, end_the_other)
    second = ProgressWatch(timer, None, lambda: late.append("second"))
    first.start()
    second.start()
    await eventually(lambda: bool(late), "one is late")
    await asyncio.sleep(BRIEF)
    assert late == ["first"]
    timer.close()


async def test_a_closed_timer_checks_nothing() -> None:
    timer, late = StallTimer(), list[int]()
    ProgressWatch(timer, None, lambda: late.append(1)).start()
    timer.close()
    await asyncio.sleep(2 * BRIEF)
    assert not late
