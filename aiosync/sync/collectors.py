"""Blocking twins of :mod:`aiosync.collectors`: ``for batch in collector``."""

from aiosync.sync._generated_collectors import (
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)

__all__ = ["Collector", "MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]
