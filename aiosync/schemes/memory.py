"""Weights inside one process, with scripted faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from multiprocessing.context import BaseContext
from typing import Unpack

from aiosync._options import CommonOptions
from aiosync.errors import NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.recipe import UNKNOWN_SENDER
from aiosync.transfer.base import MemoryAccess, Transfer
from aiosync.transfer.mapped import MappedTransfer
from aiosync.transports.base import Listener
from aiosync.transports.memory import Fault, MemoryListener, MemoryTransport
from aiosync.weights.segment import Segment


class MemoryWeightSyncScheme(WeightSyncScheme):
    """Sender and workers in one process, each with its own copy of the scheme object.

    For tests: both sides run in full, without a second process. Give each receiver ``copy.copy(scheme)``.

    Args:
        faults: the faults to inject, and the frames that they affect.
        options: see :class:`~aiosync.WeightSyncScheme`.
    """

    backends = ("memory",)
    _fields = ("address", "faults")
    _address: str | None = None

    def __init__(self, *, faults: Sequence[Fault] = (), **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self._faults = tuple(faults)

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        listener = MemoryListener(self._faults)
        self._address = listener.address
        return listener

    def create_transport(self, *, worker_idx: int) -> MemoryTransport:
        if self._address is None:
            raise NotInitializedError(UNKNOWN_SENDER)
        return MemoryTransport(self._address, worker_idx)

    def _make_transfer(self) -> Transfer:
        return MappedTransfer(MemoryAccess.READ_ONCE, Segment.local)
