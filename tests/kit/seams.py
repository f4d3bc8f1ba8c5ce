"""The places where tests look into live endpoints. Tests reach them by these functions only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from aiosync import WeightRelay, WeightSyncScheme
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.sender.connection import WorkerConnection
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.worker_group import WorkerGroup
from aiosync.transfer.slots import Lease, SlotPool
from aiosync.transports._offload import Offloader
from aiosync.weights.arena import Slot
from aiosync.weights.binding import Binding
from tests.kit.clock import eventually

__all__ = [
    "binding_of",
    "connections_of",
    "copier_of",
    "groups_of",
    "has_pending_update",
    "is_connected",
    "leases_of",
    "lookups_ended",
    "lose_connection",
    "pool_of",
    "registry_of",
    "session_of",
    "slots_of",
    "stop_reading",
    "threads_of_ranks",
    "ticket_of",
    "waits_for_readers",
    "wake_reading",
]


def registry_of(scheme: WeightSyncScheme) -> WorkerRegistry:
    """The workers of a connected sender."""
    return scheme.get_sender().registry


def connections_of(scheme: WeightSyncScheme) -> dict[int, WorkerConnection]:
    """The connections of a connected sender, by worker."""
    return registry_of(scheme).connections


def groups_of(scheme: WeightSyncScheme) -> Sequence[WorkerGroup]:
    """The copies of the weights of a connected sender."""
    return scheme.get_sender().publisher.groups


def slots_of(scheme: WeightSyncScheme) -> list[Slot]:
    """The slots of a connected sender."""
    return [slot for group in groups_of(scheme) for slot in group.pool.slots]


def leases_of(scheme: WeightSyncScheme) -> list[Lease]:
    """The leases on the slots of a connected sender."""
    return [lease for slot in slots_of(scheme) for lease in slot.leases]


def pool_of(relay: WeightRelay) -> SlotPool:
    """The slots of a connected relay."""
    applier = relay._applier
    assert applier is not None and applier._group is not None
    return applier._group.pool


# -- a receiver ------------------------------------------------------------------------------------


def binding_of(scheme: WeightSyncScheme) -> Binding:
    """How commits reach a connected receiver's model. Patch its ``check`` to have updates refused."""
    binding = scheme.get_receiver().model_applier.binding
    binding.ties = binding.ties or {"": ""}  # so that check() is called; names that are missing pass
    return binding


def copier_of(scheme: WeightSyncScheme) -> Offloader:
    """The threads that copy a connected receiver's updates."""
    return scheme.get_receiver().model_applier._offloader


def waits_for_readers(scheme: WeightSyncScheme) -> bool:
    """Whether a connected receiver's commit waits for readers or for other parts."""
    return scheme.get_receiver().model_applier._wait.job is not None


def has_pending_update(scheme: WeightSyncScheme) -> bool:
    """Whether a connected receiver has an update that it has not answered."""
    return scheme.get_receiver()._handler.pending is not None


def session_of(scheme: WeightSyncScheme) -> ReceiverSession:
    """The session of a receiver that may not be connected yet."""
    return scheme.create_receiver()._connection.session


def ticket_of(scheme: WeightSyncScheme) -> bytes:
    """The ticket of a receiver that has been connected."""
    return scheme.create_receiver()._connection._ticket


def lose_connection(scheme: WeightSyncScheme, reason: str) -> None:
    """Have a connected receiver lose its connection."""
    scheme.get_receiver().connection_lost(reason)


def is_connected(scheme: WeightSyncScheme) -> bool:
    """Whether a receiver that may have lost its connection has one."""
    receiver = scheme.get_receiver()
    return not receiver._connection.down and not receiver._connector.searching


def stop_reading(transport: Any) -> None:
    """Have this side of a Unix socket read nothing any more, as a process that hangs."""
    asyncio.get_running_loop().remove_reader(transport._sock.fileno())


def wake_reading(transport: Any) -> None:
    """Undo :func:`stop_reading`."""
    asyncio.get_running_loop().add_reader(transport._sock.fileno(), transport._readable)


async def lookups_ended() -> None:
    """Wait until the workers of this process look for no sender any more; call it while their store serves.

    A given up lookup ends by itself. It may be inside torch, which asks a name server for the name of each
    address that it connects to: one second in these tests, if the answer is lost. A store that has gone by
    then would be looked for until torch gives up, minutes later.
    """

    def none_left() -> bool:
        return all(thread.name != "aiosync-meet" for thread in threading.enumerate())

    await eventually(none_left, "no worker looks for its sender")


def threads_of_ranks() -> int:
    """How many threads of this process use a process group, or are held by one."""
    return sum(thread.name == "aiosync-ranks" for thread in threading.enumerate())
