"""The sending half of a connection: any thread queues frames, and the socket's thread sends what is left."""

from __future__ import annotations

import errno
import socket
import termios
import threading
from collections.abc import Callable
from contextlib import suppress

from aiosync.transports._offload import LoopThread
from aiosync.transports.socket_options import ioctl_int
from aiosync.transports.tcp.send_queue import Body, SendQueue
from aiosync.transports.tcp.tls import TLSLayer

# Most bytes that one connection sends before other connections of the thread have their turn.
_TURN = 1 << 20
# Bytes that one system call counts for at least. Copying the next block may precede even a short call.
_STEP = 1 << 18
# Largest body in bytes that the calling thread sends itself, which is faster than waking the socket's
# thread.
_SMALL = 1 << 18

# Most frames that may wait for a peer that does not read. The protocol never has as many in flight.
_MAX_UNSENT = 16


class SocketWriter:
    """Sends frames and bodies over a connected socket, without blocking.

    Every method may be called from any thread, unless it says otherwise. If nothing is queued yet, the
    calling thread sends at once. The socket's thread sends the rest when the socket is writable.

    Args:
        thread: the socket's thread.
        sock: connected.
        lock: held while the socket, the queue and the TLS layer are used.
        tls: encrypts what is sent. None: nothing is encrypted.
        post: calls a function on the owner's event loop.
        on_error: called in ``thread`` if writing fails for another reason than the peer's end.
        on_end: called in ``thread`` with the reason if the connection has to end.
    """

    def __init__(
        self,
        thread: LoopThread,
        sock: socket.socket,
        lock: threading.RLock,
        tls: TLSLayer | None,
        *,
        post: Callable[..., None],
        on_error: Callable[[Exception], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.progress = 0  # bytes that the kernel has taken
        self.muted = False  # whether nothing more is sent
        self._thread = thread
        self._sock = sock
        self._fd = sock.fileno()
        self._lock = lock
        self._tls = tls
        self._queue = SendQueue(self._resume, post)
        self._sealed = memoryview(b"")  # encrypted bytes that the kernel has not taken yet
        # Whether frames may be sent: without TLS at once, with TLS after the handshake.
        self._open = False
        self._armed = False  # whether the socket's thread waits until the socket is writable, or is about to
        self._closing = False  # whether the socket's thread half-closes the socket once all is sent
        self._ended = False
        self._on_error = on_error
        self._on_end = on_end

    @property
    def unread(self) -> int:
        """About how many sent bytes the peer has not read from the kernel; 0 after the end."""
        with self._lock:
            return 0 if self._ended else ioctl_int(self._fd, termios.TIOCOUTQ)

    def write(self, data: bytes) -> None:
        """Send encoded frames. Ends the connection if too many frames wait for the peer to read."""
        with self._lock:
            if self.muted:
                return
            self._queue.put(data)
            self._send_or_arm()
            if self._queue.length > _MAX_UNSENT:
                self.mute()
                self._thread.call(self._on_end, f"it does not read: {_MAX_UNSENT} frames wait for it")

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body. ``on_sent`` is called on the owner's loop when the body's memory is no longer read."""
        with self._lock:
            if self.muted:
                return
            self._queue.put_body(body, on_sent)
            if body.nbytes <= _SMALL:
                self._send_or_arm()
            else:
                self._arm_soon()

    def cut(self) -> bool:
        """Replace queued bodies by a Cut; whether there was one. Their memory is not read any more."""
        with self._lock:
            found = self._queue.cut()
            self.wake()
            return found

    def refuse(self, data: bytes) -> None:
        """Send a last frame as far as possible without blocking, in plain if TLS has not begun."""
        with self._lock, suppress(OSError):
            if self._open and not self._closing:
                self.write(data)
            elif not self._ended and not self.progress and not self._sealed:
                # In the middle of a TLS handshake the peer could not read a plain frame.
                self._sock.send(data, socket.MSG_DONTWAIT)

    def replace(self, data: bytes) -> None:
        """Drop what is queued, and send ``data`` as far as possible without blocking."""
        with self._lock:
            self._queue.clear()
            self._queue.put(data)
            self.send_pending()

    def mute(self) -> None:
        """Drop what is queued, and send nothing more."""
        with self._lock:
            self.muted = True
            self._queue.clear()
            self._sealed = memoryview(b"")

    def wake(self) -> None:
        """Have the socket's thread send what is queued. Call it under the lock."""
        if self._busy:
            self._arm_soon()

    def send_pending(self) -> None:
        """Send until the socket's buffer is full, or for one turn. Call it under the lock."""
        budget = _TURN
        try:
            while budget > 0:
                sent = self._send() if self._tls is None else self._send_sealed(self._tls)
                if not sent:
                    return
                budget -= max(sent, _STEP)
                self.progress += sent
        except (BlockingIOError, InterruptedError):
            return
        except Exception as exc:  # noqa: BLE001 - ends this connection, and no other one
            self.mute()
            # If the peer has closed, the reader finds that too, after the peer's last frames.
            if not isinstance(exc, ConnectionError):
                self._thread.call(self._on_error, exc)

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
        self._thread.loop.remove_writer(self._fd)

    def _arm(self) -> None:
        if not self._ended:
            self._thread.loop.add_writer(self._fd, self._send_when_writable)

    def _send_when_writable(self) -> None:
        with self._lock:
            if self._ended:
                return
            self.send_pending()
            if self._busy:
                return
            self._armed = False
            self._thread.loop.remove_writer(self._fd)
        if self._closing:
            self._shut_down()

    def _shut_down(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            if exc.errno != errno.ENOTCONN:
                raise
            self._on_end("")

    # -- under the lock, in any thread -----------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        """Whether bytes could be sent now. A body that waits for its next chunk does not count."""
        tls = self._tls
        return self._queue.ready or len(self._sealed) > 0 or (tls is not None and tls.outgoing.pending > 0)

    def _send_or_arm(self) -> None:
        if self._open and not self._closing and not self._armed:
            self.send_pending()
        if self._busy:
            self._arm_soon()

    def _arm_soon(self) -> None:
        if not self._armed:
            self._armed = True
            self._thread.call(self._arm)

    def _send(self) -> int:
        pieces = self._queue.pieces()
        if not pieces:
            return 0
        sent = self._sock.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        self._queue.sent(sent)
        return sent

    def _send_sealed(self, tls: TLSLayer) -> int:
        if not self._sealed:
            if self._open:
                for piece in self._queue.pieces():
                    tls.encrypt(piece)
                    self._queue.sent(len(piece))
            self._sealed = memoryview(tls.outgoing.read())
            if not self._sealed:
                return 0
        sent = self._sock.send(self._sealed, socket.MSG_DONTWAIT)
        self._sealed = self._sealed[sent:]
        return sent

    def _resume(self) -> None:
        """Called from any thread when a body has its next chunk."""
        with self._lock:
            self._queue.resume()
            self._arm_soon()
