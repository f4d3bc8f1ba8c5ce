"""What one connection has to send: frames, and the bodies of updates chunk by chunk.

A send queue is used by one thread at a time: the one that holds the connection's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aiosync.protocol.frames import Cut
from aiosync.protocol.framing import encode

__all__ = ["Body", "NotYet", "SendQueue"]


class NotYet(Exception):
    """A chunk that is still to come."""


class Body(Protocol):
    """The bytes of one update, chunk by chunk. Its methods are called in the thread that sends."""

    @property
    def nbytes(self) -> int:
        """About how many bytes will be sent."""

    def chunk(self, index: int) -> tuple[bytes, memoryview] | None:
        """A chunk's frame and its raw bytes, which may be none; None if there are no more chunks.

        Raises:
            NotYet: it is not there yet.
        """

    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, once and from any thread, when there may be more than there was."""

    def end(self) -> bytes:
        """The frame that is sent after the last chunk."""


@dataclass(slots=True)
class _Job:
    """A body under way: ``at`` is its next chunk."""

    body: Body
    on_sent: Callable[[], None]
    at: int = 0


class SendQueue:
    """A queue of frames and bodies.

    Args:
        on_more: called from any thread when a body that had to be waited for goes on.
        on_sent: called with what was to be called when a body's memory is not needed any more.
    """

    def __init__(self, on_more: Callable[[], None], on_sent: Callable[[Callable[[], None]], None]) -> None:
        self._on_more = on_more
        self._on_sent = on_sent
        self._queue: deque[memoryview | _Job] = deque()
        self._pieces: deque[memoryview] = deque()
        self._starved = False

    @property
    def length(self) -> int:
        """How many frames and bodies wait behind what is being sent."""
        return len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether there may be something to send now."""
        return bool(self._pieces) or (bool(self._queue) and not self._starved)

    def put(self, data: bytes) -> None:
        """Send frames."""
        self._queue.append(memoryview(data))

    def put_body(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body."""
        self._queue.append(_Job(body, on_sent))

    def cut(self) -> bool:
        """Send nothing more of the bodies under way, and say so; returns whether there was one. Their memory
        is not looked at again."""
        found = any(isinstance(item, _Job) for item in self._queue)
        if found:
            cut = memoryview(encode(Cut()))
            self._queue = deque(cut if isinstance(item, _Job) else item for item in self._queue)
            # What has begun of a chunk is brought to its end, out of memory of our own.
            self._pieces = deque(memoryview(bytes(piece)) for piece in self._pieces)
        self._starved = False
        return found

    def clear(self) -> None:
        """Forget all of it."""
        self._queue.clear()
        self._pieces.clear()

    def resume(self) -> None:
        """A body that had to be waited for may go on."""
        self._starved = False

    def pieces(self) -> list[memoryview]:
        """What is to be sent next, in this order; empty if there is nothing now."""
        while not self._pieces and self._queue:
            item = self._queue[0]
            if not isinstance(item, _Job):
                self._pieces.append(item)
                self._queue.popleft()
            elif not self._take_chunk(item):
                break
        return list(self._pieces)

    def sent(self, nbytes: int) -> None:
        """So many bytes of the pieces have been sent."""
        pieces = self._pieces
        while nbytes:
            if len(pieces[0]) > nbytes:
                pieces[0] = pieces[0][nbytes:]
                break
            nbytes -= len(pieces.popleft())

    def _take_chunk(self, job: _Job) -> bool:
        try:
            chunk = job.body.chunk(job.at)
        except NotYet:
            self._starved = True
            job.body.on_more(self._on_more)
            return False
        if chunk is not None:
            job.at += 1
            self._pieces += [memoryview(piece) for piece in chunk if piece]
        else:
            self._queue[0] = memoryview(job.body.end())
            self._on_sent(job.on_sent)
        return True
