"""Workers whose processes a context has started: one that ends before it has connected is not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from aiosync.schemes.peers import peer_of
from aiosync.schemes.roster import Roster
from aiosync.transports.liveness import ProcessWatch

__all__ = ["watching"]


@contextmanager
def watching(context: Any, roster: Roster) -> Iterator[None]:
    """For the length of the body, in which they connect."""
    peer = peer_of(context)

    def ended(worker: int) -> None:
        if roster.last_version_of(worker) >= 0:
            return  # it was there: others have found out, or will
        assert peer is not None
        said = ""
        try:
            said = peer.last_words(context, worker)
        finally:
            roster.never_coming(worker, "its process has ended before it connected" + (said and f": {said}"))

    with ExitStack() as stack:
        for worker, pid in (peer.processes(context) if peer is not None else {}).items():
            stack.callback(ProcessWatch(pid, partial(ended, worker)).close)
        yield
