"""Collectors: worker processes that roll out a policy, and an iterator of their batches.

One batch goes through the files in this order:

1. :mod:`collector` starts the workers: a :mod:`host` each, kept in a :mod:`pool`. Options are in
   :mod:`config`.
2. :mod:`batch_iterator` requests a batch; :mod:`proxy`, which stands for one worker, sends the request
   through the :mod:`command_pipe`.
3. :mod:`worker` receives the request. :mod:`rollout` steps the environment (:mod:`env`) with the policy
   (:mod:`policy`) and writes the frames into shared memory (:mod:`batch_buffers`).
4. :mod:`proxy` receives the message that the batch is complete; :mod:`batch_buffers` joins the parts of
   several workers; :mod:`batch_iterator` returns the batch.

:mod:`controls` has the calls that send weights, with the :mod:`versions` of the policy. :mod:`access` has the
calls that read from the workers, and :mod:`saved_state` the state that can be saved.
"""

from aiosync.collectors.adapters import adapt
from aiosync.collectors.batch_config import BatchConfig
from aiosync.collectors.collector import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from aiosync.collectors.config import (
    CollectorConfig,
    DeviceConfig,
    PolicyConfig,
    ProcessConfig,
    ReplayConfig,
    WeightConfig,
)
from aiosync.collectors.env import Env
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
