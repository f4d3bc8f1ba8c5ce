"""A sender's request to the workers on its machine: yield the processor while a send is in progress.

With more threads than processors a thread that has used up its share waits for a tick of the kernel, 4 ms and
longer, if the thread before it computes without a pause. It may be a thread of the trainer's, or a worker in
the middle of a forward pass, which the send waits for. Only the worker that computes can shorten that wait.
So it looks at a byte of shared memory whenever a forward pass has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from aiosync._processors import yield_processor
from aiosync.errors import ProtocolError
from aiosync.weights.segment import Segment

_MOST_YIELDS = 16
_YIELDS_PER_SECOND = 150
"""How often a process yields: so often in a row, after it has not for a while, and so often in each second. A
worker that yields gets less of a processor than other programs, and each change costs caches. The trainer may
send all the time. A send may wait for a worker that hangs, or the sender may be killed in it."""

_open: list[YieldRequest] = []
"""Those that were made and not closed, in this process and in those that it was forked from."""


class YieldRequest:
    """The sender's side. Any thread may use this.

    Raises:
        ArenaAllocationError: there is no memory or no file descriptor.
    """

    def __init__(self) -> None:
        self._segment = Segment.shared(1)
        # 0: no send is in progress.
        self._byte = self._segment.buffer.numpy().data
        self._sends = 0
        self._lock = threading.Lock()
        self._owner = os.getpid()
        _open.append(self)

    def begin(self) -> None:
        """A send begins: workers yield until all that have begun have ended."""
        with self._lock:
            self._sends += 1
            self._byte[0] = 1

    def end(self) -> None:
        """A send that :meth:`begin` was called for has ended."""
        if self._owner != os.getpid():
            return  # a forked child drops what its parent was doing
        with self._lock:
            self._sends = max(0, self._sends - 1)
            if not self._sends:
                self._byte[0] = 0

    def handle_for(self, pid: int) -> dict[str, Any]:
        """Return the argument of :meth:`HeededRequest.attach` in process ``pid``."""
        return self._segment.handle_for(pid)

    def close(self) -> None:
        """Release the memory; idempotent. Workers that have attached keep it."""
        if self in _open:
            _open.remove(self)
        if self._owner == os.getpid():
            self._byte[0] = 0
        self._segment.close()


@contextmanager
def asking_to_yield(requests: Iterable[YieldRequest | None] = _open) -> Iterator[None]:
    """In the body, workers are asked to yield: those of all this process's senders, or of some.

    For a thread that waits for another one to send: it needs a processor before that and after it too. And
    for a call that waits for the answers to an earlier send.
    """
    asked: list[YieldRequest] = []
    try:
        for request in tuple(requests):
            if request is not None and request._owner == os.getpid():
                asked.append(request)
                request.begin()
        yield
    finally:
        for request in asked:
            request.end()


class HeededRequest:
    """The worker's side. ``byte[0]`` is what the sender writes. Any thread may use this."""

    # For all senders of this process: when it may yield _MOST_YIELDS times again, and when at all.
    _whole_at: ClassVar[float] = 0.0
    _not_before: ClassVar[float] = 0.0

    def __init__(self, byte: Sequence[int]) -> None:
        self.byte = byte

    @classmethod
    def attach(cls, handle: dict[str, Any]) -> HeededRequest:
        """Map a sender's byte.

        Raises:
            ProtocolError: the handle is invalid, or the sender has closed.
        """
        if handle.get("kind") not in ("memfd", "file"):
            raise ProtocolError(f"expected a handle of one shared byte, got {handle!r}")
        try:
            byte = Segment.attach(handle).buffer.numpy().data
            byte[0]
        except (TypeError, ValueError, OverflowError, IndexError) as exc:
            raise ProtocolError(f"expected a handle of one shared byte, got {handle!r}") from exc
        return cls(byte)

    def is_due(self) -> bool:
        """Whether a send is in progress for which this process may yield its processor now."""
        if not self.byte[0]:
            return False
        shared, now = HeededRequest, time.perf_counter()
        return now >= shared._not_before and (shared._whole_at - now) * _YIELDS_PER_SECOND <= _MOST_YIELDS - 1

    def heed(self) -> None:
        """Yield the processor, which :meth:`is_due`. For a thread that computes without a pause.

        After a yield the process computes for at least as long as others have.
        """
        shared, begun = HeededRequest, time.perf_counter()
        shared._whole_at = max(shared._whole_at, begun) + 1 / _YIELDS_PER_SECOND
        yield_processor()
        ended = time.perf_counter()
        shared._not_before = ended + (ended - begun)


NO_REQUEST = HeededRequest(b"\0")
"""That of a sender that asks for nothing."""
