"""Blocking twins of :mod:`aiosync.collectors`: ``for batch in collector``."""

from aiosync.sync._generated_collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]
