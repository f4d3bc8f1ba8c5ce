"""Members of a process group that wait for others, which do not come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from aiosync import WorkerLostError
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.seams import threads_of_ranks

SOON = PATIENCE / 6
"""Less than the 10 seconds that gloo waits for a rank."""


def hash_store() -> Callable[[], Any]:
    store = HashStore()
    return lambda: store  # several threads may wait in it at once


def tcp_store() -> Callable[[], Any]:
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect: Callable[[], Any] = store.clone
    return connect


STORES = pytest.mark.parametrize("store", [hash_store, tcp_store])


def members_of(size: int, connect: Callable[[], Any]) -> list[ProcessGroupMember]:
    return [ProcessGroupMember("gloo", connect, "key", rank, size, timeout=PATIENCE) for rank in range(size)]


def begin(member: ProcessGroupMember) -> Future[None]:
    """Begin to move a version."""
    buffer = torch.zeros(16, dtype=torch.uint8)
    return member.send(buffer, 1, lambda _: None) if member.rank == 0 else member.receive(buffer, 1)


async def waits_for(member: ProcessGroupMember, key: str) -> None:
    await eventually(lambda: key in member._rendezvous._keys, f"it waits for {key}")


async def waits(member: ProcessGroupMember) -> None:
    """Wait until a member waits for others in the store."""
    await waits_for(member, "0/1" if member.rank == 0 else "0/0")


async def raises(work: Future[None], reason: str) -> None:
    """The member's call raises soon, and says why."""
    with pytest.raises(WorkerLostError, match=reason):
        await within(asyncio.wrap_future(work), SOON)


@STORES
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("end", [ProcessGroupMember.interrupt, ProcessGroupMember.stop_joining])
async def test_the_wait_can_be_ended(
    end: Callable[[ProcessGroupMember], None], rank: int, store: Callable[[], Callable[[], Any]]
) -> None:
    member = members_of(2, store())[rank]
    work = begin(member)
    await waits(member)
    end(member)
    await raises(work, "the wait for the other ranks was cancelled")
    member.close()
    await eventually(lambda: not threads_of_ranks(), "its thread has ended", SOON)


@STORES
async def test_a_rank_that_gives_up_takes_those_along_that_wait_for_the_same(
    store: Callable[[], Callable[[], Any]],
) -> None:
    first, second, _ = members_of(3, store())
    works = begin(first), begin(second)
    # Both have each other's address, and wait for that of the third.
    for member in (first, second):
        await waits_for(member, "0/2")
    second.interrupt()
    await raises(works[1], "the wait for the other ranks was cancelled")
    await raises(works[0], "another rank has given up")
    first.close()
    second.close()


@STORES
async def test_a_rank_that_comes_after_another_has_given_up(store: Callable[[], Callable[[], Any]]) -> None:
    first, second = members_of(2, store())
    work = begin(first)
    await waits(first)
    first.interrupt()
    await raises(work, "the wait for the other ranks was cancelled")
    # The first has left an address, and nothing listens there any more.
    await raises(begin(second), "another rank has given up")
    first.close()
    second.close()


async def test_interrupted_before_it_begins() -> None:
    member = members_of(2, hash_store())[0]
    member.interrupt()
    await raises(begin(member), "interrupted")
    member.close()


async def test_ended_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    member = members_of(2, hash_store())[0]
    store = member._rendezvous
    wait = store.wait

    def wait_and_cancel(*arguments: Any) -> None:
        wait(*arguments)  # for its own address, which is there
        store.cancel()

    monkeypatch.setattr(store, "wait", wait_and_cancel)
    await raises(begin(member), "the wait for the other ranks was cancelled")
    member.close()
