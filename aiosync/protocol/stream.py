"""Frames and the bytes of updates in one stream.

Each update is followed by its body: a Chunk frame for each block that is sent, right behind it as many raw
bytes as it says, and an End when all has been said; or a Cut, if the sender takes the update back. Other
frames may come between two chunks.

A block is :data:`BLOCK` bytes of the layout's buffer (the last may be shorter). The raw bytes go straight
to where they are wanted; no more than some kilobytes of them pass through memory of the decoder's own.
"""

from __future__ import annotations

from typing import Protocol

from aiosync.errors import ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol import framing

__all__ = ["BLOCK", "BodySink", "StreamDecoder", "block_count"]

BLOCK = 1 << 20
"""Bytes of the decoded weights that one chunk stands for."""

_SCRATCH = 16 * 1024
_HELD_BACK = 16
_FEW = 1024


def block_count(nbytes: int) -> int:
    """How many blocks ``nbytes`` bytes make."""
    return -(-nbytes // BLOCK)


class BodySink(Protocol):
    """Where the bodies of updates go. Called as ``begin (place placed)* (finish | forsake)``, again and
    again; each raises ProtocolError for what the sender may not say."""

    def begin(self, update: f.Update) -> None:
        """The body of this update follows."""

    def place(self, chunk: f.Chunk) -> memoryview:
        """Where to put the chunk's raw bytes: as many as it says, which may be none."""

    def placed(self, chunk: f.Chunk) -> None:
        """They are there."""

    def finish(self, end: f.End) -> None:
        """Nothing more of this body follows. An error in its bytes is not raised here, but to
        the caller that asks for the update."""

    def forsake(self) -> None:
        """The sender, or the connection, gave the body up."""


class StreamDecoder:
    """Turns a stream of bytes into frames, and puts the bodies of updates into a sink.

    Read into :meth:`buffers`, then call :meth:`received`. An update is handed out when its body is
    complete, or the Cut that ends it, and what came behind it after it. Once it has raised it stays broken.

    Attributes:
        inbound: what may come.
        framed: bytes of the frames that have been handed out so far.
        sink: where bodies go; None as long as no update may come.
        bare: whether updates come without bodies.
    """

    def __init__(self, inbound: framing.Inbound = framing.GREETING) -> None:
        self.inbound = inbound
        self.framed = 0
        self.sink: BodySink | None = None
        self.bare = False
        self._scratch = bytearray(framing.HEADER_SIZE + framing.MAX_GREETING)
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._chunk: f.Chunk | None = None
        self._update: f.Update | None = None
        self._behind: list[f.Frame] = []

    @property
    def missing(self) -> int:
        """Bytes of the chunk under way that are still to come; 0 if there is none."""
        return 0 if self._target is None else len(self._target) - self._filled

    def buffers(self) -> list[memoryview]:
        """Where to put the next bytes, in this order; none of them is empty."""
        if self._start == self._end:
            self._start = self._end = 0
        spare = memoryview(self._scratch)[self._end :]
        if self._target is not None:
            return [self._target[self._filled :], spare]
        # Little of what is between two blocks: behind a few bytes there may be a block elsewhere, and that
        # the bytes have been taken is to mean that the block has been too.
        return [spare[:_FEW] if self._update is not None else spare]

    def received(self, count: int) -> list[f.Frame]:
        """``count`` bytes have been put there; returns the frames that they complete.

        Raises:
            FrameError: bytes that are no frame of ours, or a frame over the limit.
            ProtocolError: a frame that may not come here.
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
        """The same for bytes that lie elsewhere."""
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
        """The stream has ended."""
        if self._update is not None and self.sink is not None:
            self.sink.forsake()
        self._update = self._chunk = self._target = None

    # -- one step at a time --------------------------------------------------------------------------

    def _step(self, out: list[f.Frame]) -> bool:
        """Take the next thing out of what has arrived; false if it is not whole yet."""
        if self._target is not None:
            return self._fill()
        available = self._end - self._start
        if available < framing.HEADER_SIZE:
            return False
        header = framing.read_header(self._scratch, self._start, self.inbound.limit)
        end = self._start + framing.HEADER_SIZE + header.length
        if self._end < end:
            return False
        body = bytes(memoryview(self._scratch)[self._start + framing.HEADER_SIZE : end])
        self._start = end
        self.framed += framing.HEADER_SIZE + header.length
        self._take(framing.decode(header, body, self.inbound), out)
        return True

    def _fill(self) -> bool:
        """Bring what has arrived of a chunk's bytes to where they belong."""
        target, chunk, sink = self._target, self._chunk, self.sink
        assert target is not None and chunk is not None and sink is not None
        step = min(len(target) - self._filled, self._end - self._start)
        if step:
            source = memoryview(self._scratch)[self._start : self._start + step]
            target[self._filled : self._filled + step] = source
            self._filled += step
            self._start += step
        if self._filled < len(target):
            return False
        self._target = self._chunk = None
        sink.placed(chunk)
        return True

    def _take(self, frame: f.Frame, out: list[f.Frame]) -> None:
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
                self._hand_out(out, update)
            case f.Cut() if sink is not None and update is not None:
                sink.forsake()
                self._hand_out(out, frame)
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

    def _hand_out(self, out: list[f.Frame], outcome: f.Update | f.Cut) -> None:
        out += [outcome, *self._behind]
        self._update = None
        self._behind = []

    def _make_room(self) -> None:
        """Make room for more of the frame that has begun: twice what is there. A peer that announces a long
        frame gets no memory for what it has not sent."""
        have = self._end - self._start
        wanted = max(2 * have, _SCRATCH if self.inbound is not framing.GREETING else len(self._scratch))
        if self._end < len(self._scratch) and len(self._scratch) <= wanted:
            return
        scratch = bytearray(wanted)
        scratch[:have] = memoryview(self._scratch)[self._start : self._end]
        self._scratch, self._start, self._end = scratch, 0, have
