"""Workers that roll out a policy, and the batches that they collect."""

from aiosync.collectors.config import (
    BatchConfig,
    CollectorConfig,
    PolicyConfig,
    ProcessConfig,
    ReplayConfig,
    WeightConfig,
)
from aiosync.collectors.devices import DeviceConfig
from aiosync.collectors.env import Env, adapt
from aiosync.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from aiosync.collectors.single import Collector

__all__ = [
    "BatchConfig",
    "Collector",
    "CollectorConfig",
    "DeviceConfig",
    "Env",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "PolicyConfig",
    "ProcessConfig",
    "ReplayConfig",
    "WeightConfig",
    "adapt",
]
