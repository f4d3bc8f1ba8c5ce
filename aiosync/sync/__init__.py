"""Blocking twins of aiosync's classes, for callers without an event loop.

Same names, same arguments, no ``await``. All run on one event loop thread per process, which the first
call starts. A receiver's ``connect()`` starts its receiver task there, and no commit lands inside a
running forward pass of its model. A call from a thread that runs an event loop of its own blocks that
loop: await the class of the same name in :mod:`aiosync` there.
"""

from aiosync.sync._generated_schemes import (
    DistributedWeightSyncScheme,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    TCPWeightSyncScheme,
    WeightSyncScheme,
)
from aiosync.sync._joint import JointUpdate, atomic

__all__ = [
    "DistributedWeightSyncScheme",
    "JointUpdate",
    "MemoryWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "TCPWeightSyncScheme",
    "WeightSyncScheme",
    "atomic",
]
