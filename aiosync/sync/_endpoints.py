"""The blocking twins of a scheme's endpoints, written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aiosync import WeightReceiver, WeightSender
from aiosync.reports import SendReport, WorkerState
from aiosync.schemes.none import NullEndpoint
from aiosync.stats import SchemeStats
from aiosync.sync._portal import portal


class BlockingEndpoint:
    """What both sides have."""

    def __init__(self, endpoint: Any) -> None:
        self._async = endpoint

    @property
    def version(self) -> int:
        """The version last published (sender) or current (receiver); -1 before ``connect``."""
        return int(self._async.version)

    @property
    def stats(self) -> SchemeStats:
        """Counters and timings so far."""
        found: SchemeStats = self._async.stats
        return found


class BlockingSender(BlockingEndpoint):
    """The blocking twin of :class:`aiosync.WeightSender`: same methods, same arguments. It can send once the
    scheme's ``connect`` was called."""

    _async: WeightSender | NullEndpoint

    @property
    def workers(self) -> dict[int, WorkerState]:
        """Worker -> its state."""
        return self._async.workers

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        wait: bool | None = None,
        strict: bool = True,
        timeout: float | None = None,
    ) -> SendReport:
        """Publish the next version: see :meth:`aiosync.WeightSyncScheme.send`."""
        return portal().send(self._async.send, weights, worker_ids, wait=wait, strict=strict, timeout=timeout)

    def update_weights(self, weights: Any = None) -> SendReport:
        """The same as ``send(weights)``."""
        return portal().send(self._async.update_weights, weights)

    def send_async(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> SendReport:
        """Publish the next version, and do not wait for the workers."""
        return portal().send(self._async.send_async, weights, worker_ids)

    def wait_ack(self, worker_ids: int | list[int] | None = None, timeout: float | None = None) -> SendReport:
        """Wait for the workers: see :meth:`aiosync.WeightSyncScheme.wait_ack`."""
        return portal().send(self._async.wait_ack, worker_ids, timeout)

    wait_async = wait_ack


class BlockingReceiver(BlockingEndpoint):
    """The blocking twin of :class:`aiosync.WeightReceiver`: same methods, same arguments. It can receive once
    the scheme's ``connect`` was called."""

    _async: WeightReceiver | NullEndpoint

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The current tensors, name -> tensor; read only."""
        return self._async.weights_in_use or {}

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next update and return its weights: see :meth:`aiosync.WeightSyncScheme.receive`."""
        return portal().call(self._async.receive, timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the model by hand: see :meth:`aiosync.WeightSyncScheme.apply_weights`."""
        self._async.apply_weights(weights, inplace)
