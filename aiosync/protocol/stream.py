"""Frames and the bytes of updates in one stream.

An Update frame is followed by its body: for each block a Chunk frame and the block's raw bytes, and then an
End. If the sender cancels the update, a Cut ends the body. Other frames may come between two chunks.

A block is :data:`BLOCK` bytes of the layout's buffer; the last block may be shorter. The raw bytes are
received directly into their destination. At most a few KiB of them pass through the decoder's own buffer.
"""

from __future__ import annotations

from typing import Protocol

from aiosync.errors import ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol import framing

BLOCK = 1 << 20
"""Bytes of decoded weights in one block."""

_SCRATCH = 16 * 1024
"""Smallest size in bytes of the decoder's buffer, once the peer has authenticated."""

_HELD_BACK = 16
"""Most frames between the chunks of one update."""

_FEW = 1024
"""Most bytes that are received into the decoder's buffer between two chunks."""


def block_count(nbytes: int) -> int:
    """Return the number of blocks of a buffer of ``nbytes`` bytes."""
    return -(-nbytes // BLOCK)


class BodySink(Protocol):
    """Receives the bodies of updates.

    The calls for one body are, in this order: ``begin``; ``place`` and ``placed`` for each chunk; ``finish``
    or ``abandon``. Each raises ProtocolError if the frame is invalid.
    """

    def begin(self, update: f.Update) -> None:
        """Called when the body of ``update`` begins."""

    def place(self, chunk: f.Chunk) -> memoryview:
        """Return the memory for the chunk's raw bytes, of ``chunk.size`` bytes."""

    def placed(self, chunk: f.Chunk) -> None:
        """Called when the chunk's raw bytes are in that memory."""

    def finish(self, end: f.End) -> None:
        """Called when the body is complete. Staging the update raises an error in its bytes later."""

    def abandon(self) -> None:
        """Called when the body is cancelled, or the connection has ended."""


class StreamDecoder:
    """Decodes a stream of bytes into frames, and writes the bodies of updates into a sink.

    The caller receives bytes into :meth:`buffers`, then calls :meth:`received`. An Update is returned when
    its body is complete, and a Cut when the body is cancelled. Frames between the chunks are returned after
    it. After an error the decoder is unusable.
    """

    def __init__(self, inbound: f.Inbound = f.GREETING) -> None:
        self.inbound = inbound
        self.framed = 0  # total size in bytes of the frames decoded so far
        self.sink: BodySink | None = None  # receives the bodies; None: no update may come
        self.bare = False  # whether updates have no bodies
        self._scratch = memoryview(bytearray(framing.HEADER_SIZE + f.MAX_GREETING))
        # The received bytes in ``_scratch`` that have not been decoded.
        self._start = self._end = 0
        # The memory for the raw bytes of ``_chunk``, and how many have arrived.
        self._target: memoryview | None = None
        self._filled = 0
        self._chunk: f.Chunk | None = None
        self._update: f.Update | None = None  # the update whose body is being received
        self._behind: list[f.Frame] = []  # frames that came between its chunks

    @property
    def missing(self) -> int:
        """Raw bytes of the current chunk that have not arrived; 0 if there is no chunk."""
        return 0 if self._target is None else len(self._target) - self._filled

    def buffers(self) -> list[memoryview]:
        """Return where to receive the next bytes, in this order. No buffer is empty."""
        if self._start == self._end:
            self._start = self._end = 0
        spare = self._scratch[self._end :]
        if self._target is not None:
            return [self._target[self._filled :], spare]
        # Few bytes between two chunks: a few bytes may announce a shared block, which is read from the
        # sender's memory. So the bytes that have left the sender's socket tell the sender how far this side
        # has read.
        return [spare[:_FEW] if self._update is not None else spare]

    def received(self, count: int) -> list[f.Frame]:
        """Decode ``count`` bytes that were received into :meth:`buffers`; returns the completed frames.

        Raises:
            FrameError: the bytes are not a frame, or the frame is over the limit.
            ProtocolError: the frame is not allowed here.
        """
        if self._target is not None:
            here = min(count, len(self._target) - self._filled)
            self._filled += here
            count -= here
        self._end += count
        out: list[f.Frame] = []
        while self._step(out):
            pass
        self._make_room()
        return out

    def feed(self, data: bytes) -> list[f.Frame]:
        """Decode bytes that are not in :meth:`buffers`; otherwise as :meth:`received`."""
        out: list[f.Frame] = []
        view = memoryview(data)
        while view:
            taken = 0
            for buffer in self.buffers():
                part = view[taken : taken + len(buffer)]
                buffer[: len(part)] = part
                taken += len(part)
            view = view[taken:]
            out += self.received(taken)
        return out

    def close(self) -> None:
        """End the stream: a body that is not complete is cancelled."""
        if self._update is not None and self.sink is not None:
            self.sink.abandon()
        self._update = self._chunk = self._target = None

    # -- one step at a time --------------------------------------------------------------------------

    def _step(self, out: list[f.Frame]) -> bool:
        """Decode the next frame, or complete the current chunk; returns false if bytes are missing."""
        if self._target is not None:
            return self._fill()
        available = self._end - self._start
        if available < framing.HEADER_SIZE:
            return False
        header = framing.read_header(self._scratch, self._start, self.inbound.limit)
        end = self._start + framing.HEADER_SIZE + header.length
        if self._end < end:
            return False
        body = bytes(self._scratch[self._start + framing.HEADER_SIZE : end])
        self._start = end
        self.framed += framing.HEADER_SIZE + header.length
        self._handle(framing.decode(header, body, self.inbound), out)
        return True

    def _fill(self) -> bool:
        """Move a chunk's bytes from the decoder's buffer; returns whether the chunk is complete."""
        target, chunk, sink = self._target, self._chunk, self.sink
        assert target is not None and chunk is not None and sink is not None
        step = min(len(target) - self._filled, self._end - self._start)
        if step:
            target[self._filled : self._filled + step] = self._scratch[self._start : self._start + step]
            self._filled += step
            self._start += step
        if self._filled < len(target):
            return False
        self._target = self._chunk = None
        sink.placed(chunk)
        return True

    def _handle(self, frame: f.Frame, out: list[f.Frame]) -> None:
        sink, update = self.sink, self._update
        match frame:
            case f.Update() if self.bare:
                out.append(frame)
            case f.Update() if sink is not None and update is None:
                sink.begin(frame)
                self._update = frame
            case f.Chunk() if sink is not None and update is not None:
                self._open(frame, sink)
            case f.End() if sink is not None and update is not None:
                sink.finish(frame)
                self._end_body(out, update)
            case f.Cut() if sink is not None and update is not None:
                sink.abandon()
                self._end_body(out, frame)
            case f.Update() | f.Chunk() | f.End() | f.Cut():
                raise ProtocolError(f"a {type(frame).__name__} frame may not come here")
            case _ if update is None:
                out.append(frame)
            case _ if len(self._behind) < _HELD_BACK:
                self._behind.append(frame)
            case _:
                raise ProtocolError("too many frames in the middle of an update")

    def _open(self, chunk: f.Chunk, sink: BodySink) -> None:
        target = sink.place(chunk)
        if len(target) != chunk.size:
            raise ProtocolError(f"chunk {chunk.block} has {chunk.size} bytes, expected {len(target)}")
        if target:
            self._target, self._filled, self._chunk = target, 0, chunk
        else:
            sink.placed(chunk)

    def _end_body(self, out: list[f.Frame], outcome: f.Update | f.Cut) -> None:
        out += [outcome, *self._behind]
        self._update = None
        self._behind = []

    def _make_room(self) -> None:
        """Enlarge the buffer to twice the bytes in it.

        It grows with the bytes that have arrived. A peer that only announces a long frame takes no memory.
        """
        have = self._end - self._start
        wanted = max(2 * have, _SCRATCH if self.inbound is not f.GREETING else len(self._scratch))
        if self._end < len(self._scratch) and len(self._scratch) <= wanted:
            return
        scratch = memoryview(bytearray(wanted))
        scratch[:have] = self._scratch[self._start : self._end]
        self._scratch, self._start, self._end = scratch, 0, have
