"""Publish the versions of one or more models: all are published, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiosync.sender.partial_write import rebase
from aiosync.sender.publisher import Publication
from aiosync.transports._offload import uninterrupted


async def publish_together(publications: Sequence[Publication], *, fallback: bool) -> None:
    """Copy all, then notify the workers of all, without an await in between: all are published, or none.

    If this raises, none was published; unless the caller was cancelled while a version that no worker had
    fetched was being overwritten. With ``fallback`` the versions that are replaced are kept until they are
    settled, in case all workers refuse.
    """
    try:
        for publication in publications:
            for write in publication.writes:
                if write.names is not None:
                    rebase(write, publication.targets)
    except BaseException:
        _discard(publications)
        raise
    for publication in publications:
        for write in publication.writes:
            if not write.is_quick:
                await _publish_from_threads(publications, fallback)
                return
    # Small models: nothing is awaited in here, so nothing can be cancelled. A thread would take longer.
    try:
        for publication in publications:
            for write in publication.writes:
                write.copy_at_once()
            publication.publisher.check_open()
    except BaseException:
        _discard(publications)
        raise
    for publication in publications:
        publication.publisher.announce(publication, fallback=fallback)


async def _publish_from_threads(publications: Sequence[Publication], fallback: bool) -> None:
    try:
        await uninterrupted(lambda gone: _write_and_announce(publications, gone, fallback))
    except asyncio.CancelledError:
        for publication in publications:
            publication.publisher.settle(publication, may_withdraw=len(publications) == 1)
        raise


async def _write_and_announce(
    publications: Sequence[Publication], gone: Callable[[], bool], fallback: bool
) -> None:
    writes = [write for publication in publications for write in publication.writes]
    publishers = [publication.publisher for publication in publications]
    if len(publications) == 1 and writes and all(write.overlaps for write in writes):
        await publishers[0].announce_and_write(publications[0], fallback=fallback)
        return
    no_way_back = any(write.reclaimed for write in writes)

    def cancelled() -> bool:
        return (gone() and not no_way_back) or any(publisher.stopped for publisher in publishers)

    due = writes
    try:
        while due:
            for write in due:
                whole = await write.copy(cancelled)
                for publisher in publishers:
                    publisher.check_open()
                if not whole:
                    raise asyncio.CancelledError
            due = [write for publication in publications for write in publication.rebase()]
    except BaseException:
        _discard(publications)
        raise
    for publication in publications:
        publication.publisher.announce(publication, fallback=fallback)


def _discard(publications: Sequence[Publication]) -> None:
    for publication in publications:
        publication.publisher.discard(publication)
