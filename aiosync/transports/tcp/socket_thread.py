"""One socket, moved by a thread beside the caller's event loop.

States: NEW → HANDSHAKE → OPEN → CLOSING → ENDED. Every state may go to ENDED. Without TLS the handshake is
done at once.

Ownership: only the thread reads the socket, uses the decoder and its sink, and changes the state. Any thread
may send, through the :class:`SocketWriter`, under the lock. The lock also covers the TLS layer, and each read
of a chunk of a body. So a body's memory is not read after ``writer.cut()`` has returned.

The socket is a blocking one: each system call states whether it may block. A side that closes sends its last
frame, half-closes the socket, and reads until the other side has closed too. If it closed a socket with
unread bytes, the kernel would discard its last frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from aiosync.errors import HandshakeError, ProtocolError
from aiosync.protocol.frames import GREETING, Bye, Frame, Refused
from aiosync.protocol.framing import encode, is_frame
from aiosync.protocol.stream import StreamDecoder
from aiosync.transports._loop_thread import LoopThread
from aiosync.transports.sockets import close_in_children
from aiosync.transports.tcp.pace import Pace
from aiosync.transports.tcp.socket_writer import STEP, TURN, SocketWriter
from aiosync.transports.tcp.tls import TLSLayer, error_of_plain_answer, reason_of

logger = logging.getLogger("aiosync")

_SEALED_READ = 1 << 18  # encrypted bytes that one call reads, once updates may arrive
_RECORD = 1 << 14  # bytes of a TLS record. One call reads as many before updates may arrive
# The thread blocks in the kernel for a chunk if more bytes than this are missing. Only receivers get
# chunks, and a receiver has one connection in its thread.
_WORTH_WAITING = 1 << 16

# Seconds and microseconds that such a read may block. The thread handles no other event meanwhile.
_LONGEST_READ = struct.pack("@ll", 0, 50_000)
_GRACE = 1.0  # seconds that the other side has to close after our half-close
# Bytes of frames that may wait for the owner's loop before the thread stops reading; and of a stranger's.
_MAX_UNREAD, _MAX_UNREAD_GREETING = 1 << 19, 1 << 16
_FRAME_COST = 1 << 9  # bytes that a waiting frame takes besides its encoded size

_State = Enum("_State", "NEW HANDSHAKE OPEN CLOSING ENDED")


@dataclass(eq=False, repr=False)
class SocketThread:
    """A connection whose socket a thread reads and writes. Its callbacks run on the loop that runs now."""

    thread: LoopThread
    sock: socket.socket  # connected
    tls: TLSLayer | None = None  # encrypts what goes over the socket. None: nothing is encrypted
    _: KW_ONLY
    on_open: Callable[[], None]  # called when frames can be sent
    on_frames: Callable[[list[Frame]], None]  # called with frames that have arrived
    # Called once with the reason when the connection has ended, and with the error if the peer broke the
    # protocol.
    on_end: Callable[[str, ProtocolError | None], None]
    pace: Pace | None = None  # limits how fast the thread reads

    def __post_init__(self) -> None:
        close_in_children(self.sock)
        self.decoder = StreamDecoder()
        self._fd = self.sock.fileno()
        mailbox, turn = self.thread.shared()
        # Calls a function on the owner's loop, after the frames that were delivered before.
        self.post = mailbox.post  # calls a function on the owner's loop, after frames delivered before
        self._raw = memoryview(bytearray(_RECORD if self.tls is not None else 0))  # gets encrypted bytes
        self._state = _State.NEW
        self._lock = threading.RLock()
        self.writer = SocketWriter(
            self.thread,
            self.sock,
            self._lock,
            self.tls,
            post=self.post,
            turn=turn,
            on_error=self._break,
            on_end=self._end,
        )
        self._silent = True  # with TLS: whether the peer has sent nothing yet
        # Cost of the frames that this thread has decoded, and that the owner's loop has handled; see
        # _MAX_UNREAD. Each is changed by one thread.
        self._decoded = self._handled = 0
        self._framed = 0  # value of ``decoder.framed`` at the last delivery
        self._drained = False  # whether the last call has read all that the socket had
        self._paused = False  # whether reading is suspended until the owner's loop has caught up
        self._resting: asyncio.TimerHandle | None = None  # ends a rest between two reads; see ``pace``
        self._closed = asyncio.Event()  # set at the end
        self._timer: asyncio.TimerHandle | None = None  # limits the handshake, then the half-closed state

    # -- called by the owner --------------------------------------------------------------------------

    def start(self, patience: float | None) -> None:
        """Start to read and write. ``patience``: seconds for the TLS handshake; None: the owner limits it."""
        self.thread.call(self._start, patience)

    async def aclose(self) -> None:
        """Cancel bodies, send the queued frames and end the connection. Bounded by :data:`_GRACE` seconds."""
        self.writer.cut()
        if self.thread.call(self._begin_close):
            await self._closed.wait()

    def refuse(self, refused: Refused) -> None:
        """Send ``refused`` without waiting (in plain before TLS is agreed on) and end the connection."""
        self.writer.refuse(encode(refused))
        self.abort()

    def abort(self) -> None:
        """End the connection at once, without a Bye."""
        self.writer.mute()
        self.thread.call(self._end, "")

    # -- in the thread ---------------------------------------------------------------------------------

    def _start(self, patience: float | None) -> None:
        if self._state is not _State.NEW:
            return
        if patience is not None:
            error = HandshakeError("the TLS handshake was not finished in time")
            self._timer = self.thread.loop.call_later(patience, self._end, "too slow", error)
        self.sock.setblocking(True)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LONGEST_READ)
        self._state = _State.HANDSHAKE
        self.thread.loop.add_reader(self._fd, self._readable)
        self._continue_handshake()

    def _continue_handshake(self) -> None:
        with self._lock:
            try:
                done = self.tls is None or self.tls.do_handshake()
            except (ssl.SSLError, ValueError) as exc:
                self.writer.send_pending()  # the TLS alert
                self._fail(reason_of(exc), refused=True)
                return
            if done:
                self._state = _State.OPEN
                self.writer.open()
                self._stop_timer()
                self.post(self.on_open)
            self.writer.wake()

    def _readable(self) -> None:
        try:
            self._read()
        except Exception as exc:  # noqa: BLE001 - ends this connection, and no other one
            self._break(exc)

    def _read(self) -> None:
        budget = TURN
        while budget > 0 and self._state is not _State.ENDED and not self._paused:
            try:
                count = self._receive()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                self._fail(f"its connection broke: {reason_of(exc)}", refused=isinstance(exc, ssl.SSLError))
                return
            if count == 0:
                self._fail("its connection closed")
            elif self.pace is not None and self._state is _State.OPEN:
                if rest := self.pace.rest_after(count):
                    self._rest(rest)
                    return
            if self._drained:
                return
            budget -= max(count, STEP)  # a read may block: see _LONGEST_READ

    def _receive(self) -> int:
        """Read from the socket and decode; returns the bytes read, 0 at the end of the stream."""
        if self._state is _State.CLOSING:
            return len(self.sock.recv(TURN, socket.MSG_DONTWAIT))
        if self.tls is not None:
            return self._receive_sealed(self.tls)
        buffers = self.decoder.buffers()
        self._drained = False
        if self.decoder.missing > _WORTH_WAITING:
            most = buffers[0] if self.pace is None else buffers[0][: self.pace.most]
            count = self.sock.recv_into(most, 0, socket.MSG_WAITALL)
        elif len(buffers) == 1:  # always on a sender
            count = self.sock.recv_into(buffers[0], 0, socket.MSG_DONTWAIT)
            self._drained = 0 < count < len(buffers[0])
        else:
            count = self.sock.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]
            self._drained = 0 < count < sum(map(len, buffers))
        if count:
            self._decode(count)
        return count

    def _receive_sealed(self, tls: TLSLayer) -> int:
        if self.decoder.sink is not None and len(self._raw) < _SEALED_READ:
            self._raw = memoryview(bytearray(_SEALED_READ))
        # The TLS layer may already have part of a record. Those bytes will not arrive again.
        more = self.decoder.missing > len(self._raw) + 2 * _RECORD
        count = self.sock.recv_into(self._raw, 0, socket.MSG_WAITALL if more else socket.MSG_DONTWAIT)
        if count and self._silent:
            self._silent = False
            if is_frame(self._raw[:count]):
                self._refuse_plain_peer(tls, bytes(self._raw[:count]))
                return count
        if count:
            with self._lock:
                tls.incoming.write(self._raw[:count])
            self._decrypt(tls)
        return count

    def _refuse_plain_peer(self, tls: TLSLayer, data: bytes) -> None:
        """End a connection whose peer does not speak TLS. A worker gets the reason in a plain frame."""
        if tls.listens:
            error = HandshakeError("the worker does not speak TLS: give it tls=")
            refused = encode(Refused(reason="the sender speaks TLS: give this worker tls="))
            with suppress(OSError):
                self.sock.send(refused, socket.MSG_DONTWAIT)
        else:
            error = error_of_plain_answer(data)
        self._end(str(error), error)

    def _decrypt(self, tls: TLSLayer) -> None:
        """Decrypt and decode all that the TLS layer has."""
        if self._state is _State.HANDSHAKE:
            self._continue_handshake()
        while self._state is _State.OPEN and not self._paused:
            with self._lock:
                count = tls.decrypt(self.decoder.buffers()[0])
                if tls.outgoing.pending:
                    self.writer.wake()
            if not count:
                return
            self._decode(count)

    def _decode(self, count: int) -> None:
        """Decode ``count`` bytes in the decoder's buffers, and deliver the complete frames."""
        try:
            frames = self.decoder.received(count)
        except ProtocolError as exc:
            # The other side may have another version of the protocol. The Bye has the reason.
            self.writer.replace(encode(Bye(reason=str(exc), dropped=True)))
            self._end(str(exc), exc)
            return
        if frames:
            cost = self.decoder.framed - self._framed + _FRAME_COST * len(frames)
            self._framed = self.decoder.framed
            self._decoded += cost
            self.post(self._deliver, frames, cost)
            if self._decoded - self._handled > self._max_unread:
                self._paused = True
                self.thread.loop.remove_reader(self._fd)
                # If the owner's loop has counted meanwhile, it did not see that reading is paused.
                self._resume_if_handled()

    @property
    def _max_unread(self) -> int:
        return _MAX_UNREAD_GREETING if self.decoder.inbound is GREETING else _MAX_UNREAD

    def _resume_if_handled(self) -> None:
        if self._paused and self._decoded - self._handled <= self._max_unread // 2:
            self.thread.call(self._resume)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._read_on()

    def _rest(self, seconds: float) -> None:
        self.thread.loop.remove_reader(self._fd)
        self._resting = self.thread.loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._read_on()

    def _read_on(self) -> None:
        waits = self._paused or self._resting is not None
        if self._state in (_State.OPEN, _State.CLOSING) and not waits:
            self.thread.loop.add_reader(self._fd, self._readable)
            try:
                if self.tls is not None:
                    self._decrypt(self.tls)
            except Exception as exc:  # noqa: BLE001 - ends this connection, and no other one
                self._break(exc)
            self._readable()

    # -- the end: in the thread ------------------------------------------------------------------------

    def _begin_close(self) -> None:
        if self._state is _State.NEW or self._state is _State.HANDSHAKE or self.writer.muted:
            self._end("")
        elif self._state is _State.OPEN:  # else another caller is closing it: both wait for the same end
            self._state = _State.CLOSING
            self.decoder.close()
            self._stop_timer()
            self._timer = self.thread.loop.call_later(_GRACE, self._end, "")
            self._stop_resting()
            self._paused = False
            self._read_on()
            if self._state is _State.CLOSING:
                self.writer.half_close()

    def _break(self, exc: Exception) -> None:
        """End the connection after an exception: the network failed, or this code has a bug."""
        if isinstance(exc, OSError):
            self._fail(f"its connection broke: {reason_of(exc)}")
            return
        logger.error("a connection is closed after an unexpected error", exc_info=exc)
        self._end(f"this side of its connection failed: {exc!r}")

    def _fail(self, what: str, *, refused: bool = False) -> None:
        """End the connection. ``refused``: the TLS layer reported an error, of this side or of the peer."""
        # With TLS, an end during the handshake is a failed handshake. In TLS 1.3 a sender can refuse a
        # worker's certificate only after the worker's handshake is done.
        shaking = self._state is _State.HANDSHAKE or (refused and not self.decoder.framed)
        if self.tls is None or not shaking:
            self._end(what)
            return
        what = f"the TLS handshake failed: {what}"
        # A worker whose connection merely closed may retry, because the sender may be starting.
        self._end(what, HandshakeError(what) if refused or self.tls.listens else None)

    def _end(self, reason: str, error: ProtocolError | None = None) -> None:
        with self._lock:
            if self._state is _State.ENDED:
                return
            self._state = _State.ENDED
            self.writer.end()
        self._stop_timer()
        self._stop_resting()
        self.decoder.close()
        self.thread.loop.remove_reader(self._fd)
        self.sock.close()
        self.post(self.on_end, reason, error)
        self.post(self._closed.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_resting(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    # -- on the owner's loop ---------------------------------------------------------------------------

    def _deliver(self, frames: list[Frame], cost: int) -> None:
        try:
            self.on_frames(frames)
        finally:
            self._handled += cost
            self._resume_if_handled()
