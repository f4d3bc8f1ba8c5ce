"""Connections inside one process, with scripted faults.

They are for tests: of aiosync, and of trainer or worker code that has to survive a closed connection, or a
lost or corrupted frame.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, WorkerLostError
from aiosync.protocol.frames import Frame
from aiosync.transports._offload import post
from aiosync.transports.base import FramedTransport, Listener, OnConnection, OnLost

FaultKind = Literal["drop", "corrupt", "truncate", "duplicate", "swap", "close"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one frame.

    Attributes:
        kind: ``drop`` the frame, ``corrupt`` one byte, ``truncate`` the frame to its first half, deliver it
            twice (``duplicate``), ``swap`` it with the next frame, or ``close`` the connection in its place.
        frame: the frame's number in its connection and direction, from 0.
        to: the frame's destination.
        worker: the index of the worker whose connection has the fault. None: all connections.
    """

    kind: FaultKind
    frame: int
    to: Literal["sender", "worker"] = "worker"
    worker: int | None = None


class MemoryTransport(FramedTransport):
    """One end of an in-process connection.

    Args:
        address: the listener's address, on the side that dials.
        worker: the index of the worker that dials.
        role: which end this is.
    """

    def __init__(
        self, address: str = "", worker: int = 0, role: Literal["sender", "worker"] = "worker"
    ) -> None:
        super().__init__()
        self.worker = worker
        self._address = address
        self._role = role
        self._peer: MemoryTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._faults: Sequence[Fault] = ()
        self._sent = 0
        self._swapped: bytes | None = None  # a frame that is sent after the next one: the fault "swap"
        self._early: list[bytes] = []  # frames written before the sender listens

    async def open(self, deadline: Deadline) -> None:
        """Connect to the listener of this address.

        Raises:
            WorkerLostError: there is no such listener.
        """
        listener = _listeners.get(self._address)
        if listener is None:
            raise WorkerLostError((), "no sender listens at the scheme's address: it has closed")
        self._loop = asyncio.get_running_loop()
        listener.accept(self)

    def join(self, peer: MemoryTransport, loop: asyncio.AbstractEventLoop, faults: Sequence[Fault]) -> None:
        """Become one end of a pair. ``loop`` is the loop of this end."""
        self._peer, self._loop, self._faults = peer, loop, faults

    def connected(self) -> None:
        """Send the frames that were written before the other end existed."""
        early, self._early = self._early, []
        for data in early:
            self._write(data)

    def write(self, *frames: Frame) -> None:
        """Send frames one by one, because faults count frames."""
        for frame in frames:
            super().write(frame)

    def _write(self, data: bytes) -> None:
        peer = self._peer
        if peer is None:
            self._early.append(data)  # the sender does not listen yet
            return
        number, self._sent = self._sent, self._sent + 1
        fault = next((x for x in self._faults if self._applies(x, number)), None)
        swapped, self._swapped = self._swapped, None
        for piece in self._apply_fault(data, fault):
            peer._post(piece)
        if swapped is not None:
            peer._post(swapped)
        if fault is not None and fault.kind == "close":
            self._lost("the connection was closed by a scripted fault")
            peer._post(None)

    def _applies(self, fault: Fault, number: int) -> bool:
        whose = fault.worker is None or fault.worker == self.worker
        return fault.frame == number and fault.to != self._role and whose

    def _apply_fault(self, data: bytes, fault: Fault | None) -> list[bytes]:
        match fault.kind if fault else None:
            case None:
                return [data]
            case "drop" | "close":
                return []
            case "corrupt":
                return [data[:-1] + bytes([data[-1] ^ 0x40])]
            case "truncate":
                return [data[: len(data) // 2]]
            case "duplicate":
                return [data, data]
            case "swap":
                self._swapped = data
                return []

    def _post(self, data: bytes | None) -> None:
        assert self._loop is not None
        post(self._loop, self._arrived, data)  # if that loop is closed, the peer is as good as dead

    def _arrived(self, data: bytes | None) -> None:
        if data is None:
            self._lost("its connection closed")
        elif self.check_connection():
            self._feed(data)

    async def _close(self) -> None:
        if self._peer is not None:
            self._peer._post(None)


_listeners: dict[str, MemoryListener] = {}


class MemoryListener(Listener):
    """The sender's end of the in-process rendezvous. ``faults`` apply to every connection."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        for fault in faults:
            if fault.frame < 0:
                raise InvalidArgumentError(f"expected a fault's frame number of 0 or more, got {fault.frame}")
        self.address = f"memory:{secrets.token_hex(8)}"  # valid in this process only
        self.faults = tuple(faults)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_connection: OnConnection | None = None
        self._early: list[MemoryTransport] = []
        _listeners[self.address] = self

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_connection = on_connection
        early, self._early = self._early, []
        for dialled in early:
            self.accept(dialled)

    def accept(self, dialled: MemoryTransport) -> None:
        """Pair ``dialled`` with a new end on the sender's loop. Called on the dialling side's loop."""
        loop, on_connection = self._loop, self._on_connection
        if loop is None or on_connection is None:
            self._early.append(dialled)
            return
        ours = MemoryTransport(worker=dialled.worker, role="sender")
        ours.join(dialled, loop, self.faults)
        assert dialled._loop is not None
        dialled.join(ours, dialled._loop, self.faults)
        loop.call_soon_threadsafe(on_connection, ours)
        dialled.connected()

    def forget(self) -> None:
        """Do nothing: there are no descriptors."""

    def close(self) -> None:
        _listeners.pop(self.address, None)
