"""One socket, moved by a thread beside the caller's event loop.

States: NEW → HANDSHAKE → OPEN → CLOSING → ENDED; from everywhere to ENDED. Without TLS the
handshake is done at once.

Ownership: only the thread reads the socket and changes the state; the decoder and its sink belong to the
thread. Any thread may queue frames, under the lock. If nothing is queued yet, the caller sends its frames at
once. The thread reads a body one chunk at a time, under the lock: once :meth:`SocketThread.cut` has returned,
the body's memory is not read again. The TLS layer is used under the lock, too.

The socket is a blocking one, and each call says whether it may wait.

A side that is done says so with a half-close, after its last frame, and reads on until the other side has
closed too: a socket closed with unread bytes in it would take back what was said last.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from aiosync.errors import HandshakeError, ProtocolError, SenderFullError
from aiosync.protocol.frames import Bye, Frame, Refused
from aiosync.protocol.framing import FrameDecoder, encode, is_frame
from aiosync.protocol.stream import StreamDecoder
from aiosync.protocol.text import clean
from aiosync.transports._offload import LoopThread
from aiosync.transports.forks import close_in_children
from aiosync.transports.ioctl import ioctl_int
from aiosync.transports.tcp.send_queue import Body, SendQueue
from aiosync.transports.tcp.tls import TLSLayer

__all__ = ["SocketThread"]

logger = logging.getLogger("aiosync")

_TURN = 1 << 20
"""Bytes that are moved at most before other connections have their turn."""

_STEP = 1 << 18
"""What anything counts for at least: behind a few bytes there may be a block that was copied just now."""

_SMALL = 1 << 18
"""Bytes up to which the caller sends a body itself, which is faster than waking the thread."""

_SEALED_READ = 1 << 18
"""Encrypted bytes of updates that are read at once."""

_RECORD = 1 << 14
"""Bytes of a TLS record; as many are read at once as long as no update may come."""

_WORTH_WAITING = 1 << 16
"""Bytes of a chunk from which they are waited for in the kernel. Only a receiver has chunks to wait for, and
one connection in its thread."""

_LONGEST_READ = struct.pack("@ll", 0, 50_000)
"""Seconds and microseconds that such a wait may take: as long does the thread hear nothing else."""

_GRACE = 1.0
"""Seconds that the other side has to close after our half-close."""

_MAX_UNREAD = 1 << 19
"""Bytes of frames that may wait for the caller's loop before no more are read."""

_FRAME_COST = 1 << 9
"""Bytes that a frame takes while it waits, besides those of its text."""

_WORDS = 200
"""Characters of a peer's answer that are quoted."""

_MAX_UNSENT = 16
"""Frames that may wait for a peer that does not read: more than the protocol ever has under way."""


class _State(enum.Enum):
    NEW = "new"
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class Owner(Protocol):
    """Whose channel it is. Called on the owner's event loop."""

    def channel_open(self) -> None:
        """Frames can be moved now."""

    def channel_frames(self, frames: list[Frame]) -> None:
        """These have arrived."""

    def channel_ended(self, reason: str, error: ProtocolError | None) -> None:
        """The connection is no more. ``error``: the peer broke the protocol."""


class SocketThread:
    """A connection.

    Args:
        thread: moves it.
        sock: connected.
        owner: told what happens, on the running loop.
        tls: encrypts what goes over the socket; None: nothing does.

    Attributes:
        decoder: what comes in goes through it.
        progress: bytes that the kernel has taken.
    """

    def __init__(
        self, thread: LoopThread, sock: socket.socket, owner: Owner, tls: TLSLayer | None = None
    ) -> None:
        self.decoder = StreamDecoder()
        self.progress = 0
        self._thread = thread
        self._sock = sock
        close_in_children(sock)
        self._fd = sock.fileno()
        self._owner = owner
        self._home = asyncio.get_running_loop()
        self._tls = tls
        self._sealed = memoryview(b"")
        self._raw = memoryview(bytearray(_RECORD if tls is not None else 0))
        self._state = _State.NEW
        self._lock = threading.RLock()
        self._outbox = SendQueue(self._fed, self._post)
        self._armed = False
        self._mute = False
        self._silent = True
        self._unread = 0
        self._framed = 0
        self._paused = False
        self._closed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- called by the owner --------------------------------------------------------------------------

    def start(self, patience: float | None) -> None:
        """Begin. It ends after ``patience`` seconds if the TLS handshake is not done by then; None: the owner
        sees to that."""
        self._thread.call(self._begin, patience)

    @property
    def unread(self) -> int:
        """About how many bytes the kernel has that the other side has not taken."""
        with self._lock:
            return 0 if self._state is _State.ENDED else ioctl_int(self._fd, termios.TIOCOUTQ)

    def write(self, data: bytes) -> None:
        """Send frames, without waiting."""
        with self._lock:
            if self._state is _State.ENDED or self._mute:
                return
            self._outbox.put(data)
            self._send_or_arm()
            if self._outbox.length > _MAX_UNSENT:
                self._mute = True
                self._forget_unsent()
                self._thread.call(self._end, f"it does not read: {_MAX_UNSENT} frames wait for it")

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body; ``on_sent`` is called on the owner's loop when its memory is not needed any more."""
        with self._lock:
            if self._state is _State.ENDED or self._mute:
                return
            self._outbox.put_body(body, on_sent)
            if body.nbytes <= _SMALL:
                self._send_or_arm()
            else:
                self._arm_soon()

    def cut(self) -> bool:
        """Send nothing more of the bodies under way, and say so; returns whether there was one."""
        with self._lock:
            found = self._outbox.cut()
            if self._busy:
                self._arm_soon()
            return found

    async def aclose(self) -> None:
        """Send what is queued, without bodies, and end the connection; bounded."""
        self.cut()
        closed = self._closed = self._home.create_future()
        if self._thread.call(self._begin_close):
            await closed

    def refuse(self, refused: Refused) -> None:
        """Send this without waiting, in plain before TLS is agreed on, and end the connection at once."""
        with self._lock, suppress(OSError):
            if self._state is _State.OPEN:
                self.write(encode(refused))
            elif self._state is not _State.ENDED and not self.progress and not self._sealed:
                # Nothing has been sent before it. In the middle of a TLS handshake it would be nonsense.
                self._sock.send(encode(refused), socket.MSG_DONTWAIT)
        self.abort()

    def abort(self) -> None:
        """End the connection at once, without a word."""
        with self._lock:
            self._mute = True
            self._forget_unsent()
        self._thread.call(self._end, "")

    # -- writing: under the lock, in any thread --------------------------------------------------------

    def _send_or_arm(self) -> None:
        if self._state is _State.OPEN and not self._armed:
            self._pump()
        if self._busy:
            self._arm_soon()

    @property
    def _busy(self) -> bool:
        """Whether there is something to send, and not only to wait for."""
        tls = self._tls
        return self._outbox.ready or len(self._sealed) > 0 or (tls is not None and tls.pending)

    def _arm_soon(self) -> None:
        if not self._armed:
            self._armed = True
            self._thread.call(self._arm)

    def _pump(self) -> None:
        """Send until the socket is full, or it is others' turn."""
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
        except Exception as exc:  # noqa: BLE001 - the end of this connection, and of no other
            self._mute = True
            self._forget_unsent()
            # After the other side's end, reading tells of that, and brings what it said before.
            if not isinstance(exc, ConnectionError):
                self._thread.call(self._break, exc)

    def _send(self) -> int:
        pieces = self._outbox.pieces()
        if not pieces:
            return 0
        sent = self._sock.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        self._outbox.sent(sent)
        return sent

    def _send_sealed(self, tls: TLSLayer) -> int:
        if not self._sealed:
            if self._state is not _State.HANDSHAKE:
                for piece in self._outbox.pieces():
                    tls.encrypt(piece)
                    self._outbox.sent(len(piece))
            self._sealed = tls.take()
            if not self._sealed:
                return 0
        sent = self._sock.send(self._sealed, socket.MSG_DONTWAIT)
        self._sealed = self._sealed[sent:]
        return sent

    def _forget_unsent(self) -> None:
        self._outbox.clear()
        self._sealed = memoryview(b"")

    def _fed(self) -> None:
        with self._lock:
            self._outbox.resume()
            self._arm_soon()

    # -- in the thread ---------------------------------------------------------------------------------

    def _begin(self, patience: float | None) -> None:
        if self._state is not _State.NEW:
            return
        if patience is not None:
            self._timer = self._thread.loop.call_later(patience, self._overdue)
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LONGEST_READ)
        self._state = _State.HANDSHAKE
        self._thread.loop.add_reader(self._fd, self._readable)
        self._shake_hands()

    def _overdue(self) -> None:
        if self._state is _State.HANDSHAKE:
            self._end("too slow", HandshakeError("the TLS handshake was not finished in time"))

    def _arm(self) -> None:
        if self._state is not _State.ENDED:
            self._thread.loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        with self._lock:
            if self._state is _State.ENDED:
                return
            self._pump()
            if self._busy:
                return
            self._armed = False
            self._thread.loop.remove_writer(self._fd)
        if self._state is _State.CLOSING:
            self._half_close()

    def _shake_hands(self) -> None:
        """Go on as far as what has come allows."""
        with self._lock:
            try:
                done = self._tls is None or self._tls.shake_hands()
            except (ssl.SSLError, ValueError) as exc:
                self._pump()  # send the TLS alert
                self._fail(_words(exc), refused=True)
                return
            if done:
                self._state = _State.OPEN
            if self._busy:
                self._arm_soon()
        if done:
            self._stop_timer()
            self._post(self._owner.channel_open)

    def _readable(self) -> None:
        try:
            self._read()
        except Exception as exc:  # noqa: BLE001 - the end of this connection, and of no other
            self._break(exc)

    def _read(self) -> None:
        budget = _TURN
        while budget > 0 and self._state is not _State.ENDED and not self._paused:
            try:
                count = self._receive()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                self._fail(f"its channel broke: {_words(exc)}", refused=isinstance(exc, ssl.SSLError))
                return
            if count == 0:
                self._fail("its channel closed")
            budget -= count

    def _receive(self) -> int:
        """Take in what there is; how many bytes, 0 at the end of the stream."""
        if self._state is _State.CLOSING:
            return len(self._sock.recv(_TURN, socket.MSG_DONTWAIT))
        if self._tls is not None:
            return self._receive_sealed(self._tls)
        buffers = self.decoder.buffers()
        if self.decoder.missing > _WORTH_WAITING:
            count = self._sock.recv_into(buffers[0], 0, socket.MSG_WAITALL)
        else:
            count = self._sock.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]
        if count:
            self._take(count)
        return count

    def _receive_sealed(self, tls: TLSLayer) -> int:
        if self.decoder.sink is not None and len(self._raw) < _SEALED_READ:
            self._raw = memoryview(bytearray(_SEALED_READ))
        # A record that has come in part is in the TLS layer already, and will not come again.
        more = self.decoder.missing > len(self._raw) + 2 * _RECORD
        count = self._sock.recv_into(self._raw, 0, socket.MSG_WAITALL if more else socket.MSG_DONTWAIT)
        if count and self._silent:
            self._silent = False
            if is_frame(self._raw[:count]):
                self._meet_plain_peer(tls, bytes(self._raw[:count]))
                return count
        if count:
            with self._lock:
                tls.feed(self._raw[:count])
            self._unseal(tls)
        return count

    def _meet_plain_peer(self, tls: TLSLayer, data: bytes) -> None:
        """End a connection whose other side does not speak TLS, after telling it so in frames of its own."""
        if tls.listens:
            error = HandshakeError("the worker does not speak TLS: give it tls=")
            told = encode(Refused(reason="the sender speaks TLS: give this worker tls="))
            with suppress(OSError):
                self._sock.send(told, socket.MSG_DONTWAIT)
        else:
            error = _plain_answer(data)
        with self._lock:
            self._mute = True
        self._end(str(error), error)

    def _unseal(self, tls: TLSLayer) -> None:
        """Make the most of what has come."""
        if self._state is _State.HANDSHAKE:
            self._shake_hands()
        while self._state is _State.OPEN and not self._paused:
            with self._lock:
                count = tls.decrypt(self.decoder.buffers()[0])
                if tls.pending:
                    self._arm_soon()
            if not count:
                return
            self._take(count)

    def _take(self, count: int) -> None:
        try:
            frames = self.decoder.received(count)
        except ProtocolError as exc:
            with self._lock:  # the other side may be of another version, and is to know
                self._outbox.clear()
                self._outbox.put(encode(Bye(reason=str(exc), dropped=True)))
                self._pump()
            self._end(str(exc), exc)
            return
        if frames:
            cost = self.decoder.framed - self._framed + _FRAME_COST * len(frames)
            self._framed = self.decoder.framed
            with self._lock:
                self._unread += cost
                if self._unread > _MAX_UNREAD:
                    self._paused = True
                    self._thread.loop.remove_reader(self._fd)
            self._post(self._deliver, frames, cost)

    def _resume(self) -> None:
        self._paused = False
        if self._state in (_State.OPEN, _State.CLOSING):
            self._thread.loop.add_reader(self._fd, self._readable)
            try:
                if self._tls is not None:
                    self._unseal(self._tls)
            except Exception as exc:  # noqa: BLE001 - as above
                self._break(exc)
            self._readable()

    # -- the end: in the thread ------------------------------------------------------------------------

    def _begin_close(self) -> None:
        if self._state is _State.ENDED:
            self._report_closed()
        elif self._state is not _State.OPEN or self._mute:
            self._end("")
        else:
            self._state = _State.CLOSING
            self.decoder.close()
            self._stop_timer()
            self._timer = self._thread.loop.call_later(_GRACE, self._end, "")
            if self._paused:
                self._resume()
            if self._state is _State.CLOSING:
                self._writable()

    def _half_close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            if exc.errno != errno.ENOTCONN:
                raise
            self._end("")

    def _break(self, exc: Exception) -> None:
        """The network is gone, there is no memory, or this code failed in a way that it does not expect."""
        if isinstance(exc, OSError):
            self._fail(f"its channel broke: {_words(exc)}")
            return
        logger.error("a connection is given up", exc_info=exc)
        self._end(f"this side of its channel failed: {exc!r}")

    def _fail(self, what: str, *, refused: bool = False) -> None:
        # In TLS 1.3 a sender that does not take a worker's certificate says so after the worker's handshake.
        meeting = self._state is _State.HANDSHAKE or (refused and not self.decoder.framed)
        if self._tls is None or not meeting:
            self._end(what)
            return
        what = f"the TLS handshake failed: {what}"
        # A dialling side whose connection only ended may try again: the sender may be starting.
        self._end(what, HandshakeError(what) if refused or self._tls.listens else None)

    def _end(self, reason: str, error: ProtocolError | None = None) -> None:
        with self._lock:
            if self._state is _State.ENDED:
                return
            self._state = _State.ENDED
            self._forget_unsent()
        self._stop_timer()
        self.decoder.close()
        self._thread.loop.remove_reader(self._fd)
        self._thread.loop.remove_writer(self._fd)
        self._sock.close()
        self._post(self._owner.channel_ended, reason, error)
        self._report_closed()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report_closed(self) -> None:
        if self._closed is not None:
            self._post(_resolve, self._closed)

    # -- over to the owner's loop ----------------------------------------------------------------------

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._home.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # the loop is closed

    def _deliver(self, frames: list[Frame], cost: int) -> None:
        self._owner.channel_frames(frames)
        with self._lock:
            self._unread -= cost
            resume = self._paused and self._unread <= _MAX_UNREAD // 2
        if resume:
            self._thread.call(self._resume)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _plain_answer(data: bytes) -> HandshakeError:
    """What it means that a sender answers TLS with a frame."""
    hint = "the sender does not speak TLS: take tls= away here, or give it to the sender"
    with suppress(ProtocolError):
        for frame in FrameDecoder().feed(data):
            if isinstance(frame, Refused) and frame.retry:
                return SenderFullError(f"the sender refused the connection: {clean(frame.reason, _WORDS)}")
            if isinstance(frame, Refused | Bye):
                return HandshakeError(f"{hint} (it said: {clean(frame.reason, _WORDS)})")
    return HandshakeError(hint)


def _words(exc: Exception) -> str:
    """An exception's message, without the line of the C file that OpenSSL adds."""
    if isinstance(exc, ssl.SSLError):
        return getattr(exc, "verify_message", None) or (exc.reason or str(exc)).replace("_", " ").lower()
    return getattr(exc, "strerror", None) or str(exc)
