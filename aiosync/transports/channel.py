"""One socket, moved by a thread beside the caller's event loop.

States: CONNECTING → (HANDSHAKE, with TLS) → OPEN → CLOSING → ENDED; from everywhere to ENDED.

Who owns what: the thread alone reads, and alone changes the state; the decoder and its sink are the
thread's. Frames are queued by any thread under the lock, and whoever queues them where nothing waits sends
them at once. A body is read by the thread, a chunk at a time, under the lock: once :meth:`Channel.cut` has
returned its memory is not looked at again.

A side that is done says so with a half-close, after its last frame, and reads on until the other side has
closed too: a socket closed with unread bytes in it would take back what was said last.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aiosync.errors import HandshakeError, ProtocolError
from aiosync.protocol.frames import Cut, Frame, encode
from aiosync.protocol.stream import StreamDecoder
from aiosync.transports._offload import LoopThread

__all__ = ["Body", "Channel", "NotYet"]

_TURN = 1 << 20
"""Bytes that are moved at most before other connections have their turn."""

_TLS_TURN = 1 << 18
_SMALL = 1 << 18
"""Bytes up to which a body is sent by whoever queues it: faster than waking the thread."""

_GRACE = 1.0
"""Seconds that the other side has to close after our half-close."""

_MAX_UNREAD = 64
"""Frames that may wait for the caller's loop before no more are read."""


class NotYet(Exception):
    """A chunk that is still to come."""


class Body(Protocol):
    """The bytes of one update, chunk by chunk. Its methods are called in the channel's thread."""

    @property
    def nbytes(self) -> int:
        """About how many bytes will be sent."""

    def chunk(self, index: int) -> tuple[bytes, memoryview] | None:
        """A chunk's frame and its raw bytes; None if there are no more.

        Raises:
            NotYet: it is not there yet.
        """

    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, once and from any thread, when there may be more than there was."""

    def end(self) -> bytes:
        """The frame that is sent after the last chunk."""


class _State(enum.Enum):
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(slots=True)
class _Job:
    """A body under way: ``at`` is its next chunk."""

    body: Body
    on_sent: Callable[[], None]
    at: int = 0


class Owner(Protocol):
    """Whose channel it is. Called on the owner's event loop."""

    def channel_open(self) -> None:
        """Frames can be moved now."""

    def channel_frames(self, frames: list[Frame]) -> None:
        """These have arrived."""

    def channel_ended(self, reason: str, error: ProtocolError | None) -> None:
        """The connection is no more. ``error``: the peer broke the protocol."""


class Channel:
    """A connection.

    Args:
        thread: moves it.
        sock: non-blocking; connected, or about to be.
        owner: told what happens, on the running loop.
    """

    def __init__(self, thread: LoopThread, sock: socket.socket, owner: Owner) -> None:
        self.decoder = StreamDecoder()
        self.progress = 0
        self._thread = thread
        self._sock = sock
        self._fd = sock.fileno()
        self._owner = owner
        self._home = asyncio.get_running_loop()
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._state = _State.CONNECTING
        self._lock = threading.RLock()
        self._queue: deque[memoryview | _Job] = deque()
        self._pieces: deque[memoryview] = deque()
        self._armed = False
        self._starved = False
        self._mute = False
        self._unread = 0
        self._paused = False
        self._closed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- called by the owner --------------------------------------------------------------------------

    def start(self, patience: float | None) -> None:
        """Begin: connected already, or about to be. It ends after ``patience`` seconds if the TLS handshake
        is not done by then; None: the owner sees to that."""
        self._thread.call(self._begin, patience)

    def trust(self) -> None:
        """The peer has authenticated. No frame of its is being read meanwhile: it waits for an answer."""
        self.decoder.trust()

    def write(self, data: bytes) -> None:
        """Send frames, without waiting."""
        with self._lock:
            if self._state is _State.ENDED or self._mute:
                return
            self._queue.append(memoryview(data))
            self._send_or_arm()

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body; ``on_sent`` is called on the owner's loop when its memory is not needed any more."""
        with self._lock:
            if self._state is _State.ENDED or self._mute:
                return
            self._queue.append(_Job(body, on_sent))
            if body.nbytes <= _SMALL:
                self._send_or_arm()
            else:
                self._arm_soon()

    def cut(self) -> bool:
        """Send nothing more of the bodies under way, and say so; returns whether there was one."""
        with self._lock:
            found = False
            queue, self._queue = self._queue, deque()
            for item in queue:
                if isinstance(item, _Job):
                    found = True
                    self._queue.append(memoryview(encode(Cut())))
                else:
                    self._queue.append(item)
            self._starved = False
            if found:
                # What has begun of a chunk is brought to its end, out of memory of our own.
                self._pieces = deque(memoryview(bytes(piece)) for piece in self._pieces)
            return found

    async def aclose(self) -> None:
        """Send what is queued, without bodies, and end the connection; bounded."""
        self.cut()
        closed = self._closed = self._home.create_future()
        if self._thread.call(self._begin_close):
            await closed

    def abort(self) -> None:
        """End the connection at once."""
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
        return bool(self._pieces) or (bool(self._queue) and not self._starved)

    def _arm_soon(self) -> None:
        if not self._armed:
            self._armed = True
            self._thread.call(self._arm)

    def _pump(self) -> None:
        """Send until the socket is full, or it is others' turn."""
        budget = _TLS_TURN if self._tls else _TURN
        while budget > 0 and self._refill():
            try:
                sent = self._send()
            except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError:
                # Reading tells why, and brings what the other side said before.
                self._mute = True
                self._queue.clear()
                self._pieces.clear()
                return
            budget -= sent
            self.progress += sent

    def _send(self) -> int:
        pieces = self._pieces
        sent = self._send_records(pieces[0]) if self._tls else self._sock.sendmsg(list(pieces)[:8])
        rest = sent
        while rest:
            if len(pieces[0]) > rest:
                pieces[0] = pieces[0][rest:]
                break
            rest -= len(pieces.popleft())
        return sent

    def _send_records(self, data: memoryview) -> int:
        """TLS sends one record of 16 KiB at a time: as many as the socket takes, or as are a turn."""
        send, end, sent = self._sock.send, min(len(data), _TLS_TURN), 0
        while sent < end:
            try:
                sent += send(data[sent:end])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                if not sent:
                    raise
                break
        return sent

    def _refill(self) -> bool:
        """Have something in ``_pieces``; false if there is nothing to send."""
        while not self._pieces and self._queue:
            item = self._queue[0]
            if not isinstance(item, _Job):
                self._pieces.append(item)
                self._queue.popleft()
            elif not self._refill_from(item):
                return False
        return bool(self._pieces)

    def _refill_from(self, job: _Job) -> bool:
        try:
            chunk = job.body.chunk(job.at)
        except NotYet:
            self._starved = True
            job.body.on_more(self._fed)
            return False
        if chunk is not None:
            job.at += 1
            self._pieces += [memoryview(chunk[0]), chunk[1]]
        else:
            self._queue[0] = memoryview(job.body.end())
            self._post(job.on_sent)
        return True

    def _fed(self) -> None:
        with self._lock:
            self._starved = False
            self._arm_soon()

    # -- in the thread ---------------------------------------------------------------------------------

    def _begin(self, patience: float | None) -> None:
        if self._state is not _State.CONNECTING:
            return
        if patience is not None:
            self._timer = self._thread.loop.call_later(patience, self._overdue)
        self._thread.loop.add_writer(self._fd, self._writable)
        self._armed = True

    def _overdue(self) -> None:
        if self._state in (_State.CONNECTING, _State.HANDSHAKE):
            self._end("too slow", HandshakeError("the TLS handshake was not finished in time"))

    def _arm(self) -> None:
        if self._state in (_State.OPEN, _State.CLOSING) and self._fd >= 0:
            self._thread.loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        if self._state is _State.CONNECTING:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end(f"connecting failed: {os.strerror(code)}")
                return
            self._state = _State.HANDSHAKE
            self._thread.loop.add_reader(self._fd, self._readable)
        if self._state is _State.HANDSHAKE:
            self._shake_hands()
        if self._state not in (_State.OPEN, _State.CLOSING):
            return
        with self._lock:
            self._pump()
            if self._busy:
                return
            self._armed = False
            self._thread.loop.remove_writer(self._fd)
        if self._state is _State.CLOSING and not self._queue:
            self._half_close()

    def _shake_hands(self) -> None:
        sock = self._sock
        if isinstance(sock, ssl.SSLSocket):
            try:
                with self._lock:
                    sock.do_handshake()
            except ssl.SSLWantReadError:
                self._thread.loop.remove_writer(self._fd)
                return
            except ssl.SSLWantWriteError:
                return
            except (OSError, ValueError) as exc:
                self._end(_tls_failure(exc), HandshakeError(_tls_failure(exc)))
                return
        with self._lock:
            self._state = _State.OPEN
            self._armed = True
        self._thread.loop.add_writer(self._fd, self._writable)
        self._post(self._owner.channel_open)

    def _readable(self) -> None:
        if self._state is _State.HANDSHAKE:
            self._shake_hands()
            return
        budget = _TLS_TURN if self._tls else _TURN
        while self._state in (_State.OPEN, _State.CLOSING) and not self._paused:
            try:
                count = self._receive()
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as exc:
                self._end(f"its channel broke: {exc.strerror or exc}")
                return
            if count == 0:
                self._end("its channel closed")
                return
            if self._state is _State.OPEN:
                self._take(count)
            budget -= count
            if budget <= 0:
                if self._tls:  # what lies inside the TLS layer does not make the socket readable
                    self._thread.loop.call_soon(self._readable)
                return

    def _receive(self) -> int:
        if self._state is _State.CLOSING:
            return len(self._sock.recv(_TURN))
        buffers = self.decoder.buffers()
        if not self._tls:
            return self._sock.recvmsg_into(buffers)[0]
        with self._lock:
            return self._receive_records(buffers[0])

    def _receive_records(self, buffer: memoryview) -> int:
        """As :meth:`_send_records`."""
        receive, end, count = self._sock.recv_into, min(len(buffer), _TLS_TURN), 0
        while count < end:
            try:
                more = receive(buffer[count:end])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not count:
                    raise
                break
            if not more:
                break
            count += more
        return count

    def _take(self, count: int) -> None:
        try:
            frames = self.decoder.received(count)
        except ProtocolError as exc:
            self._end(str(exc), exc)
            return
        if frames:
            with self._lock:
                self._unread += len(frames)
                if self._unread > _MAX_UNREAD:
                    self._paused = True
                    self._thread.loop.remove_reader(self._fd)
            self._post(self._deliver, frames)

    def _resume(self) -> None:
        self._paused = False
        if self._state in (_State.OPEN, _State.CLOSING):
            self._thread.loop.add_reader(self._fd, self._readable)
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
            # Not the TLS socket's own, which would forget its keys.
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
        except OSError as exc:
            if exc.errno != errno.ENOTCONN:
                raise
            self._end("")

    def _end(self, reason: str, error: ProtocolError | None = None) -> None:
        with self._lock:
            if self._state is _State.ENDED:
                return
            self._state = _State.ENDED
            self._queue.clear()
            self._pieces.clear()
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
            return  # the loop is closed: nobody is left to tell

    def _deliver(self, frames: list[Frame]) -> None:
        self._owner.channel_frames(frames)
        with self._lock:
            self._unread -= len(frames)
            resume = self._paused and self._unread <= _MAX_UNREAD // 2
        if resume:
            self._thread.call(self._resume)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _tls_failure(exc: Exception) -> str:
    reason = getattr(exc, "verify_message", None) or getattr(exc, "reason", None) or str(exc)
    return f"the TLS handshake failed: {reason}"
