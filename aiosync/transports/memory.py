"""A pair of transports inside one process, with faults on demand.

For tests: of aiosync itself, and of anybody's trainer or worker code that should be seen to survive a
cut, a lost or a garbled frame without a second process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, WorkerLostError
from aiosync.protocol.frames import Frame
from aiosync.transports.base import Listener, Transport

__all__ = ["Fault", "FaultKind", "MemoryListener", "MemoryTransport"]

FaultKind = Literal["drop", "corrupt", "truncate", "duplicate", "swap", "close"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one frame.

    Attributes:
        kind: ``drop`` it, ``corrupt`` one byte of it, ``truncate`` it to its first half, deliver it
            twice (``duplicate``), ``swap`` it with the next one, or ``close`` the connection in its place.
        frame: which frame of the connection, counted from 0 in its direction.
        to: who it is on its way to.
        worker: whose connection; None means each.
    """

    kind: FaultKind
    frame: int
    to: Literal["sender", "worker"] = "worker"
    worker: int | None = None


class MemoryTransport(Transport):
    """One end of an in-process connection.

    Args:
        address: the listener's address, for the side that dials.
        worker: the index of the worker at the dialling end.
        role: which end this is; a fault names the end that a frame is on its way to.
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
        self._held: bytes | None = None
        self._early: list[bytes] = []

    async def open(self, deadline: Deadline) -> None:
        """Connect to the listener of this address."""
        listener = _listeners.get(self._address)
        if listener is None:
            raise WorkerLostError((), "no sender listens at the scheme's address: it has closed")
        self._loop = asyncio.get_running_loop()
        listener.accept(self)

    def join(self, peer: MemoryTransport, loop: asyncio.AbstractEventLoop, faults: Sequence[Fault]) -> None:
        """Become one end of a pair; this end lives on ``loop``."""
        self._peer, self._loop, self._faults = peer, loop, faults

    def connected(self) -> None:
        """The other end exists: send what was written before."""
        early, self._early = self._early, []
        for data in early:
            self._write(data)

    def write(self, *frames: Frame) -> None:
        """One by one, because faults are counted by frames."""
        for frame in frames:
            super().write(frame)

    def _write(self, data: bytes) -> None:
        peer = self._peer
        if peer is None:
            self._early.append(data)  # the sender has not begun to listen yet
            return
        number, self._sent = self._sent, self._sent + 1
        fault = next((x for x in self._faults if self._concerns(x, number)), None)
        held, self._held = self._held, None
        for piece in self._bend(data, fault):
            peer._post(piece)
        if held is not None:
            peer._post(held)
        if fault is not None and fault.kind == "close":
            self._lost("the connection was closed by a scripted fault")
            peer._post(None)

    def _concerns(self, fault: Fault, number: int) -> bool:
        whose = fault.worker is None or fault.worker == self.worker
        return fault.frame == number and fault.to != self._role and whose

    def _bend(self, data: bytes, fault: Fault | None) -> list[bytes]:
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
                self._held = data
                return []

    def _post(self, data: bytes | None) -> None:
        loop = self._loop
        assert loop is not None
        try:
            loop.call_soon_threadsafe(self._arrived, data)
        except RuntimeError:
            return  # that end's loop is closed, as a dead peer's would be

    def _arrived(self, data: bytes | None) -> None:
        if data is None:
            self._lost("its channel closed")
        elif self.check_connection():
            self._feed(data)

    async def _close(self) -> None:
        if self._peer is not None:
            self._peer._post(None)


_listeners: dict[str, MemoryListener] = {}


class MemoryListener(Listener):
    """The sender's end of the in-process rendezvous.

    Attributes:
        address: what workers dial; means something in this process only.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        for fault in faults:
            if fault.frame < 0:
                raise InvalidArgumentError(f"a fault's frame is counted from 0, got {fault.frame}")
        self.address = f"memory:{secrets.token_hex(8)}"
        self.faults = tuple(faults)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_connection: Callable[[Transport], None] | None = None
        self._early: list[MemoryTransport] = []
        _listeners[self.address] = self

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Call ``on_connection`` for every peer that connects, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._on_connection = on_connection
        early, self._early = self._early, []
        for dialled in early:
            self.accept(dialled)

    def accept(self, dialled: MemoryTransport) -> None:
        """Pair ``dialled`` with an end of ours; called on the dialling side's loop."""
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
        """In a forked child: nothing to let go of."""

    def close(self) -> None:
        """Stop listening; idempotent."""
        _listeners.pop(self.address, None)
