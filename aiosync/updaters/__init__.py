"""torchrl's older weight updaters, as coroutines; the blocking twins are in :mod:`aiosync.sync.updaters`.

An updater writes weights into the workers' models in place. It counts no versions, and an update of several
workers is not all or nothing. A weight sync scheme has both; use a scheme in new programs.
"""

from aiosync.updaters.base import (
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from aiosync.updaters.remote import DistributedWeightUpdater, RayWeightUpdater, RPCWeightUpdater

__all__ = [
    "DistributedWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
