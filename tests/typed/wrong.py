"""Mistakes, each in a line of its own. Type checkers read this file; it is not run.

A checker that finds no mistake in one of these lines reports the comment, which ignores nothing then.
"""

from __future__ import annotations

import aiosync
import aiosync.sync
import aiosync.sync.collectors
from aiosync.collectors import Collector, MultiCollector

aiosync.SharedMemScheme()  # type: ignore[attr-defined]
aiosync.SharedMemWeightSyncScheme(timeout="3")  # type: ignore[arg-type]
aiosync.MultiProcessWeightSyncScheme(first_version=1.5)  # type: ignore[arg-type]
aiosync.TCPWeightSyncScheme(timeot=3)  # type: ignore[call-arg]
aiosync.DistributedWeightSyncScheme(commit="flop")  # type: ignore[arg-type]
aiosync.RPCWeightSyncScheme(max_slot=3)  # type: ignore[call-arg]
aiosync.RayWeightSyncScheme(token="t")  # type: ignore[call-arg]
aiosync.RayModuleTransformScheme(cst=None)  # type: ignore[call-arg]
aiosync.sync.SharedMemWeightSyncScheme(tiemout=1)  # type: ignore[call-arg]
MultiCollector([], frame_per_batch=3)  # type: ignore[call-arg]
MultiCollector([], on_stale="keep")  # type: ignore[arg-type]
Collector(print, num_thread=3)  # type: ignore[call-arg]
aiosync.sync.collectors.MultiCollector([], total_frame=3)  # type: ignore[call-arg]
