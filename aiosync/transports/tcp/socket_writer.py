"""The sending half of a connection: any thread queues frames, and the socket's thread sends what is left."""

from __future__ import annotations

import errno
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from aiosync.protocol.frames import Cut
from aiosync.protocol.framing import encode
from aiosync.transports._loop_thread import LoopThread, TurnOfSends
from aiosync.transports.sockets import ioctl_int
from aiosync.transports.tcp.tls import TLSLayer

# Most bytes that one connection sends or reads before other connections of the thread have their turn.
TURN = 1 << 20
# Bytes that one system call counts for at least. Copying the next block may precede even a short call.
STEP = 1 << 18
# Most frames that may wait for a peer that does not read. The protocol never has as many in flight.
_MAX_UNSENT = 16


class NotYet(Exception):
    """The next chunk of a body does not exist yet."""


class Body(Protocol):
    """The bytes of one update, in chunks. The thread that sends calls the methods."""

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
class _QueuedBody:
    body: Body
    on_sent: Callable[[], None]
    next_chunk: int = 0


@dataclass(eq=False, repr=False)
class SocketWriter:
    """Sends frames and bodies over a connected socket, without blocking.

    Every method may be called from any thread, unless it says otherwise. If nothing is queued yet, the
    calling thread sends at once. The socket's thread sends the rest when the socket is writable.
    """

    thread: LoopThread
    sock: socket.socket
    lock: threading.RLock  # held while the socket, the queue and the TLS layer are used
    tls: TLSLayer | None  # encrypts what is sent. None: nothing is encrypted
    _: KW_ONLY
    post: Callable[..., None]  # calls a function on the owner's event loop
    turn: TurnOfSends  # sends what is written together
    on_error: Callable[[Exception], None]  # called in the thread if writing fails while the peer is there
    on_end: Callable[[str], None]  # called in the thread with the reason if the connection has to end

    progress: int = field(default=0, init=False)  # bytes that the kernel has taken
    muted: bool = field(default=False, init=False)  # whether nothing more is sent

    def __post_init__(self) -> None:
        self._fd = self.sock.fileno()
        self._queue: deque[bytes | memoryview | _QueuedBody] = deque()
        # The buffers that are sent next, in front of the queue.
        self._pieces: deque[bytes | memoryview] = deque()
        self._starved = False  # whether the first body in the queue has no next chunk yet
        self._sealed = memoryview(b"")  # encrypted bytes that the kernel has not taken yet
        # Whether frames may be sent: without TLS at once, with TLS after the handshake.
        self._open = False
        self._armed = False  # whether the socket's thread waits until the socket is writable, or is about to
        self._closing = False  # whether the socket's thread half-closes the socket once all is sent
        self._ended = False

    @property
    def unread(self) -> int:
        """About how many sent bytes the peer has not read from the kernel; 0 after the end."""
        with self.lock:
            return 0 if self._ended else ioctl_int(self._fd, termios.TIOCOUTQ)

    def write(self, data: bytes) -> None:
        """Send encoded frames. Ends the connection if too many frames wait for the peer to read."""
        with self.lock:
            if self.muted:
                return
            self._queue.append(data)
            self._send_queued()

    def write_together(self, data: Sequence[bytes]) -> None:
        """Send encoded frames, together with those for other connections. Called on the owner's loop."""
        with self.lock:
            if not self.muted:
                self._queue += data
                self.turn.add(self._send_queued)

    def _send_queued(self) -> None:
        with self.lock:
            self._send_or_arm()
            if len(self._queue) + len(self._pieces) > _MAX_UNSENT:
                self.mute()
                self.thread.call(self.on_end, f"it does not read: {_MAX_UNSENT} frames wait for it")

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body. ``on_sent`` is called on the owner's loop when the body's memory is no longer read."""
        with self.lock:
            if self.muted:
                return
            self._queue.append(_QueuedBody(body, on_sent))
            self._arm_soon()

    def cut(self) -> bool:
        """Replace queued bodies by a Cut; whether there was one. Their memory is not read any more."""
        with self.lock:
            found = any(isinstance(item, _QueuedBody) for item in self._queue)
            if found:
                cut = encode(Cut())
                self._queue = deque(cut if isinstance(item, _QueuedBody) else item for item in self._queue)
                # The peer expects all bytes of a chunk that has begun. They are sent from a copy.
                self._pieces = deque(bytes(piece) for piece in self._pieces)
            self._starved = False
            self.wake()
            return found

    def refuse(self, data: bytes) -> None:
        """Send a last frame as far as possible without blocking, in plain if TLS has not begun."""
        with self.lock, suppress(OSError):
            if self._open and not self._closing:
                self.write(data)
            elif not self._ended and not self.progress and not self._sealed:
                # In the middle of a TLS handshake the peer could not read a plain frame.
                self.sock.send(data, socket.MSG_DONTWAIT)

    def replace(self, data: bytes) -> None:
        """Drop what is queued, and send ``data`` as far as possible without blocking."""
        with self.lock:
            self._queue.clear()
            self._pieces.clear()
            self._queue.append(data)
            self.send_pending()

    def mute(self) -> None:
        """Drop what is queued, and send nothing more."""
        with self.lock:
            self.muted = True
            self._queue.clear()
            self._pieces.clear()
            self._sealed = memoryview(b"")

    def wake(self) -> None:
        """Have the socket's thread send what is queued. Call it under the lock."""
        if self._busy:
            self._arm_soon()

    def send_pending(self) -> None:
        """Send until the socket's buffer is full, or for one turn. Call it under the lock."""
        budget = TURN
        try:
            while budget > 0:
                sent = self._send() if self.tls is None else self._send_sealed(self.tls)
                if not sent:
                    return
                budget -= max(sent, STEP)
                self.progress += sent
        except (BlockingIOError, InterruptedError):
            return
        except Exception as exc:  # noqa: BLE001 - ends this connection, and no other one
            self.mute()
            # If the peer has closed, the reader finds that too, after the peer's last frames.
            if not isinstance(exc, ConnectionError):
                self.thread.call(self.on_error, exc)

    # -- called in the socket's thread -----------------------------------------------------------------

    def open(self) -> None:
        """Start to send frames: the handshake is done. Call it under the lock."""
        self._open = True

    def half_close(self) -> None:
        """Close the socket for writing when all is sent."""
        self._closing = True
        self._send_when_writable()

    def end(self) -> None:
        """Stop for good, before the socket is closed. Call it under the lock."""
        self._ended = True
        self.mute()
        self.thread.loop.remove_writer(self._fd)

    def _arm(self) -> None:
        if not self._ended:
            self.thread.loop.add_writer(self._fd, self._send_when_writable)

    def _send_when_writable(self) -> None:
        with self.lock:
            if self._ended:
                return
            self.send_pending()
            if self._busy:
                return
            self._armed = False
            self.thread.loop.remove_writer(self._fd)
        if self._closing:
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError as exc:
                if exc.errno != errno.ENOTCONN:
                    raise
                self.on_end("")

    # -- under the lock, in any thread -----------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        """Whether bytes could be sent now. A body that waits for its next chunk does not count."""
        if self._pieces or self._sealed or (self._queue and not self._starved):
            return True
        return self.tls is not None and self.tls.outgoing.pending > 0

    def _send_or_arm(self) -> None:
        if self._open and not self._closing and not self._armed:
            self.send_pending()
        if self._busy:
            self._arm_soon()

    def _arm_soon(self) -> None:
        if not self._armed:
            self._armed = True
            self.thread.call(self._arm)

    def _send(self) -> int:
        pieces = self._next_pieces()
        if not pieces:
            return 0
        sent = self.sock.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        self._remove(sent)
        return sent

    def _send_sealed(self, tls: TLSLayer) -> int:
        if not self._sealed:
            if self._open:
                for piece in self._next_pieces():
                    tls.encrypt(piece)
                    self._remove(len(piece))
                    if tls.outgoing.pending >= STEP:  # what waits in the clear is limited; see _MAX_UNSENT
                        break
            self._sealed = memoryview(tls.outgoing.read())
            if not self._sealed:
                return 0
        sent = self.sock.send(self._sealed, socket.MSG_DONTWAIT)
        self._sealed = self._sealed[sent:]
        return sent

    def _next_pieces(self) -> list[bytes | memoryview]:
        """Return the buffers to send next, in order; empty if nothing can be sent now."""
        while self._queue:
            item = self._queue[0]
            if not isinstance(item, _QueuedBody):
                self._pieces.append(item)
                self._queue.popleft()
                continue
            if self._pieces:
                break
            try:
                chunk = item.body.chunk(item.next_chunk)
            except NotYet:
                self._starved = True
                item.body.on_more(self._resume)
                break
            if chunk is not None:
                item.next_chunk += 1
                self._pieces += [piece for piece in chunk if piece]
            else:
                self._queue[0] = item.body.end()
                self.post(item.on_sent)
        return list(self._pieces)

    def _remove(self, nbytes: int) -> None:
        """Remove ``nbytes`` that have been sent from the front of the pieces."""
        pieces = self._pieces
        while nbytes:
            if len(pieces[0]) > nbytes:
                pieces[0] = memoryview(pieces[0])[nbytes:]
                break
            nbytes -= len(pieces.popleft())

    def _resume(self) -> None:
        """Called from any thread when a body may have its next chunk."""
        with self.lock:
            self._starved = False
            self._arm_soon()
