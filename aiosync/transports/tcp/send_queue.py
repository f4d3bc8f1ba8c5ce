"""The queue of one connection's outgoing frames and bodies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aiosync.protocol.frames import Cut
from aiosync.protocol.framing import encode


class NotYet(Exception):
    """The next chunk of a body does not exist yet."""


class Body(Protocol):
    """The bytes of one update, in chunks. The thread that sends calls the methods."""

    @property
    def nbytes(self) -> int:
        """About how many bytes the body has."""

    def chunk(self, index: int) -> tuple[bytes, memoryview] | None:
        """Return a chunk's frame and its raw bytes, which may be empty. None: there are no more chunks.

        Raises:
            NotYet: the chunk does not exist yet.
        """

    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from any thread, when the next chunk may exist."""

    def end(self) -> bytes:
        """Return the frame that is sent after the last chunk."""


@dataclass(slots=True)
class _Job:
    body: Body
    on_sent: Callable[[], None]
    next_chunk: int = 0


class SendQueue:
    """A queue of frames and bodies. Only the thread that holds the connection's lock may use it.

    Args:
        on_more: called from any thread when a body that had no next chunk may have one.
        on_sent: called with a body's own ``on_sent`` when the body's memory is no longer read.
    """

    def __init__(self, on_more: Callable[[], None], on_sent: Callable[[Callable[[], None]], None]) -> None:
        self._on_more = on_more
        self._on_sent = on_sent
        self._queue: deque[memoryview | _Job] = deque()
        # The buffers that are sent next, in front of the queue.
        self._pieces: deque[memoryview] = deque()
        # Whether the first body in the queue has no next chunk yet.
        self._starved = False

    @property
    def length(self) -> int:
        """How many frames and bodies wait, without the one that is being sent."""
        return len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether there may be bytes to send now."""
        return bool(self._pieces) or (bool(self._queue) and not self._starved)

    def put(self, data: bytes) -> None:
        self._queue.append(memoryview(data))

    def put_body(self, body: Body, on_sent: Callable[[], None]) -> None:
        self._queue.append(_Job(body, on_sent))

    def cut(self) -> bool:
        """Replace each body by a Cut; returns whether there was one. Their memory is not read any more."""
        found = any(isinstance(item, _Job) for item in self._queue)
        if found:
            cut = memoryview(encode(Cut()))
            self._queue = deque(cut if isinstance(item, _Job) else item for item in self._queue)
            # The peer expects all bytes of a chunk that has begun. They are sent from a copy.
            self._pieces = deque(memoryview(bytes(piece)) for piece in self._pieces)
        self._starved = False
        return found

    def clear(self) -> None:
        self._queue.clear()
        self._pieces.clear()

    def resume(self) -> None:
        """Try again to get the next chunk of the first body."""
        self._starved = False

    def pieces(self) -> list[memoryview]:
        """Return the buffers to send next, in order; empty if nothing can be sent now."""
        while not self._pieces and self._queue:
            item = self._queue[0]
            if not isinstance(item, _Job):
                self._pieces.append(item)
                self._queue.popleft()
            elif not self._load_chunk(item):
                break
        return list(self._pieces)

    def sent(self, nbytes: int) -> None:
        """Remove ``nbytes`` that have been sent from the front of the pieces."""
        pieces = self._pieces
        while nbytes:
            if len(pieces[0]) > nbytes:
                pieces[0] = pieces[0][nbytes:]
                break
            nbytes -= len(pieces.popleft())

    def _load_chunk(self, job: _Job) -> bool:
        """Move a body's next chunk, or its end, to the front; returns false if there is no next chunk yet."""
        try:
            chunk = job.body.chunk(job.next_chunk)
        except NotYet:
            self._starved = True
            job.body.on_more(self._on_more)
            return False
        if chunk is not None:
            job.next_chunk += 1
            self._pieces += [memoryview(piece) for piece in chunk if piece]
        else:
            self._queue[0] = memoryview(job.body.end())
            self._on_sent(job.on_sent)
        return True
