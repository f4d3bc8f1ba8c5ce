"""Memory of another process, mapped copy-on-write."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiosync.weights.segment import CAN_ATTACH_PRIVATELY, Segment, _own_pages

pytestmark = pytest.mark.skipif(not CAN_ATTACH_PRIVATELY, reason="needs Linux's copy-on-write")

PAGE = os.sysconf("SC_PAGESIZE") if sys.platform == "linux" else 4096
NBYTES = 700 * PAGE + 100


@pytest.fixture(name="shared")
def _shared() -> Iterator[Segment]:
    segment = Segment.shared(NBYTES)
    segment.buffer.fill_(1)
    yield segment
    segment.close()


def _attach(shared: Segment) -> Segment:
    assert shared.handle is not None
    return Segment.attach(shared.handle, private=True)


def test_what_is_written_stays_here(shared: Segment) -> None:
    mine, others = _attach(shared), _attach(shared)
    mine.buffer[5] = 9
    assert shared.buffer[5] == 1
    assert others.buffer[5] == 1


def test_the_owners_bytes_are_seen_at_once_where_nothing_was_written(shared: Segment) -> None:
    mine = _attach(shared)
    mine.buffer[0] = 9
    shared.buffer.fill_(2)
    assert (mine.buffer[PAGE:] == 2).all()
    assert mine.buffer[0] == 9
    assert mine.buffer[1] == 1  # of a page that was copied when its first byte was written


@pytest.mark.parametrize(
    "written",
    [
        [],
        [0],
        [NBYTES - 1],
        [3 * PAGE, 3 * PAGE + 1, 4 * PAGE, 9 * PAGE - 1],
        list(range(0, NBYTES, PAGE)),
        list(range(0, NBYTES, 2 * PAGE)),  # more runs than are given back one by one
    ],
    ids=["nothing", "first", "last", "some", "all", "many"],
)
@pytest.mark.parametrize("kernel_tells", [True, False])
def test_renewed_it_shows_the_owners_bytes(
    shared: Segment, written: list[int], kernel_tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = _attach(shared)
    mine.buffer[torch.tensor(written, dtype=torch.int64)] = 9
    assert int((mine.buffer == 9).sum()) == len(written)
    shared.buffer.copy_(torch.arange(NBYTES, dtype=torch.int64).remainder(251).to(torch.uint8))
    if not kernel_tells:
        opened = builtins.open

        def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
            if path == "/proc/self/pagemap":
                raise PermissionError(path)
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", refuse)
    mine.renew()
    assert mine.buffer.equal(shared.buffer)
    mine.buffer[7] = 250
    assert shared.buffer[7] == 7


def test_only_pages_that_were_written_are_given_back(shared: Segment) -> None:
    mine = _attach(shared)
    mine.buffer[3 * PAGE] = 9
    mine.buffer[700 * PAGE] = 9
    own = _own_pages(mine.buffer)
    if own is None:
        pytest.skip("this kernel does not tell which pages were written")
    assert own.nonzero().view(-1).tolist() == [3, 700]
    mine.renew()
    own = _own_pages(mine.buffer)
    assert own is not None and not own.any()
