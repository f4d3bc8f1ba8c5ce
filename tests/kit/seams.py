"""The places where tests look into live endpoints. Tests reach them by these functions only."""

from __future__ import annotations

from collections.abc import Sequence

from aiosync import WeightSyncScheme
from aiosync.sender.connection import WorkerConnection
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.worker_group import WorkerGroup
from aiosync.transfer.slots import Lease
from aiosync.weights.arena import Slot

__all__ = ["connections_of", "groups_of", "leases_of", "registry_of", "slots_of"]


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
