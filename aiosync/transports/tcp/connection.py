"""TCP and Unix sockets that carry the weights themselves: a connection, and the side that dials."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from aiosync._deadline import Deadline, pauses
from aiosync.errors import HandshakeError, ProtocolError, WorkerLostError
from aiosync.protocol.frames import Frame
from aiosync.protocol.framing import Inbound
from aiosync.protocol.stream import BodySink
from aiosync.transports._offload import LoopThread, abandonable
from aiosync.transports.base import Transport
from aiosync.transports.socket_options import credentials, tune
from aiosync.transports.tcp.address import Address
from aiosync.transports.tcp.send_queue import Body
from aiosync.transports.tcp.socket_thread import SocketThread
from aiosync.transports.tcp.tls import TLSConfig, TLSLayer

__all__ = ["DialledTransport", "TCPTransport"]

logger = logging.getLogger("aiosync")

_ATTEMPT = 5.0
"""Seconds that one address of a host has to answer."""


class TCPTransport(Transport):
    """A TCP or Unix socket to one peer."""

    # Not even on loopback: containers may share that and have process ids of their own. (Those of a Unix
    # socket's peer come from the kernel.)
    same_machine = False
    maps = False

    def __init__(self) -> None:
        super().__init__()
        self._channel: SocketThread | None = None
        self._peer_pid = 0

    @property
    def peer_pid(self) -> int:
        """The peer's process id from the kernel; only Unix sockets have it."""
        return self._peer_pid

    @property
    def progress(self) -> int:
        """Bytes handed to the kernel so far."""
        return self._channel.progress if self._channel is not None else 0

    @property
    def unread(self) -> int:
        """About how many bytes the peer has not taken from the kernel yet."""
        return self._channel.unread if self._channel is not None else 0

    @property
    def shares_with(self) -> int:
        """The peer's process id if its memory can be read from here and need not be encrypted; else 0."""
        return 0

    # -- frames and bodies ----------------------------------------------------------------------------

    def trust(self, inbound: Inbound) -> None:
        """The peer has authenticated."""
        if self._channel is not None:
            self._channel.decoder.inbound = inbound

    def land(self, sink: BodySink) -> None:
        """Put the bodies of updates into ``sink``. To be called before one is fetched."""
        if self._channel is not None:
            self._channel.decoder.sink = sink

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body behind its update; ``on_sent`` is called when its memory is not needed any more."""
        if self._channel is not None and self.check_connection():
            self._channel.stream(body, on_sent)

    def cut(self) -> bool:
        """Give up the body that is being sent; returns whether there was one."""
        return self._channel is not None and self._channel.cut()

    def _write(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.write(data)

    def _run(
        self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None, patience: float | None
    ) -> None:
        """Have ``thread`` take over a connected socket."""
        self._peer_pid, _ = credentials(sock)
        self._channel = SocketThread(thread, sock, self, tls)
        self._channel.start(patience)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.aclose()

    @abstractmethod
    def _opened(self) -> None:
        """Frames can be moved now."""

    @abstractmethod
    def _ended(self, error: ProtocolError | None) -> None:
        """The connection is no more. ``error``: the peer broke the protocol."""

    # -- told by the channel --------------------------------------------------------------------------

    def channel_open(self) -> None:
        """Called by the socket thread, on this loop: frames can be sent now."""
        self._opened()

    def channel_frames(self, frames: list[Frame]) -> None:
        """Called by the socket thread, on this loop: these frames have arrived."""
        try:
            for frame in frames:
                if not self.check_connection():
                    return
                self._deliver(frame)
        except ProtocolError as exc:
            self._lost(str(exc), exc)

    def channel_ended(self, reason: str, error: ProtocolError | None) -> None:
        """Called by the socket thread, on this loop: the connection has ended."""
        self._lost(reason or "this side has closed the connection", error)
        self._ended(error)

    def give_up(self, reason: str) -> None:
        """End the connection at once: it is of no use any more."""
        self._lost(reason)
        self.abort()

    def abort(self) -> None:
        """End the connection at once, without a word."""
        if self._channel is not None:
            self._channel.abort()


class DialledTransport(TCPTransport):
    """The connection of the side that dials, with a thread of its own.

    Args:
        address: the sender's.
        tls: how to speak TLS; None: not at all.
        any_user: whether the sender may be another user's process: then a token or a certificate has to say
            who it is.
    """

    def __init__(self, address: Address, tls: TLSConfig | None = None, *, any_user: bool = False) -> None:
        super().__init__()
        self._any_user = any_user
        self.peer_name = str(address)
        self._address = address
        self._tls = tls
        self._thread: LoopThread | None = None
        self._done: asyncio.Future[None] | None = None

    async def open(self, deadline: Deadline) -> None:
        """Connect to the sender, which may still have to start, and authenticate it by its certificate if TLS
        is asked for.

        Raises:
            WorkerLostError: there is no such host, or it hung up.
            HandshakeError: the sender's certificate does not do, or its Unix socket is another user's.
            SyncTimeoutError: no sender listened there, or answered, in time.
        """
        address, tls = self._address, None
        if self._tls is not None:
            name = self._tls.server_hostname or address.host or "localhost"
            tls = TLSLayer(self._tls.for_worker(), name)
        try:
            async with asyncio.timeout(deadline.remaining()):
                sock = await self._dial(deadline)
                try:
                    self.reached = True
                    self._check_user(sock)
                except BaseException:
                    sock.close()
                    raise
                self._thread = LoopThread("aiosync-tcp")
                self._done = asyncio.get_running_loop().create_future()
                self._run(self._thread, sock, tls, None)
                await self._done
        except TimeoutError:
            hint = self.trouble or f"{address} did not answer"
            raise deadline.error("connect", hint=hint) from None
        if self._breach is not None:
            raise self._breach
        if self._end is not None:
            raise WorkerLostError((), f"cannot connect to {address}: {self._end}")

    @property
    def shares_with(self) -> int:
        # Who may list the files that a process has open may most likely open them too.
        may = self._tls is None and os.access(f"/proc/{self.peer_pid}/fd", os.R_OK | os.X_OK)
        return self.peer_pid if may else 0

    def _check_user(self, sock: socket.socket) -> None:
        """Another user can put a socket at a path that anyone may write to, before the sender does."""
        _, uid = credentials(sock)
        if not self._any_user and uid not in (-1, 0, os.geteuid()):
            raise HandshakeError(
                f"the process that listens at {self._address} is of user {uid}, this worker of user "
                f"{os.geteuid()}: give both sides a token=, or take a path that only this user can write to"
            )

    async def _dial(self, deadline: Deadline) -> socket.socket:
        """A connected socket."""
        address = self._address
        targets = await _resolve(address)
        for pause in pauses(deadline):
            for family, target in targets:
                try:
                    async with asyncio.timeout(_ATTEMPT):
                        return await _connected(family, target)
                except OSError as exc:  # a timeout is one
                    problem = os.strerror(exc.errno) if exc.errno else str(exc) or "no answer"
                    if not self.trouble:
                        logger.info("%s: %s; trying again", address, problem)
                    self.trouble = f"cannot connect to {address}: {problem}"
            await asyncio.sleep(pause)
        raise TimeoutError

    async def _close(self) -> None:
        await super()._close()
        if self._thread is not None:
            self._thread.close()

    def abandon_loop(self) -> None:
        super().abandon_loop()
        self.abort()
        if self._thread is not None:
            self._thread.close()

    def _opened(self) -> None:
        self._settle()

    def _ended(self, error: ProtocolError | None) -> None:
        self._settle()

    def _settle(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


async def _connected(family: int, target: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(address: Address) -> list[tuple[int, Any]]:
    """(family, address to connect to), in order of preference."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    look_up = partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
    try:
        found = look_up(flags=socket.AI_NUMERICHOST)
    except OSError:
        try:
            found = await abandonable(look_up, "aiosync-resolve")
        except OSError as exc:
            raise WorkerLostError((), f"cannot connect to {address}: {exc.strerror or exc}") from exc
    return [(family, target) for family, _, _, _, target in found]
