"""Blocking twins of :mod:`aiosync.updaters`: hooks run in the caller's thread."""

from aiosync.sync._generated_updaters import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "DistributedWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
