"""The weight updaters of torchrl's older interface, as coroutines; blocking twins in
:mod:`aiosync.sync.updaters`.

They push what they are given to workers that apply it in place: nothing is versioned or all-or-nothing over
several workers. New programs are better served by a scheme.
"""

from aiosync.updaters.base import WeightUpdaterBase
from aiosync.updaters.distributed import DistributedWeightUpdater
from aiosync.updaters.local import (
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
)
from aiosync.updaters.ray import RayWeightUpdater
from aiosync.updaters.rpc import RPCWeightUpdater

__all__ = [
    "DistributedWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
