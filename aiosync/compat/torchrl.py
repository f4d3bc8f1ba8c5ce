"""torchrl's collectors and servers as the twins meet them. The only file that imports torchrl.

It is imported when torchrl is there already: by :mod:`aiosync.sync`, or by the first scheme that has a
context of torchrl's. From then on the twins count as torchrl's schemes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torchrl import weight_update
from torchrl.weight_update import weight_sync_schemes

from aiosync import sync
from aiosync.schemes.cascade import Cascade, Follower, weakly
from aiosync.transports.rpc_calls import agent_here, is_member

__all__ = ["first_worker", "follower_of", "is_enlisted", "last_words", "processes"]


def follower_of(context: Any) -> Follower | None:
    """How a context of torchrl's is told of updates; None: as any other, by ``update_policy_weights_``."""
    from torchrl.collectors import BaseCollector
    from torchrl.modules.inference_server import InferenceServer

    if isinstance(context, InferenceServer):
        return _Server(context)
    if not isinstance(context, BaseCollector) or getattr(context, "weight_updater", None) is not None:
        return None
    return _Parent(context) if getattr(context, "_weight_sync_schemes", None) else _ActingCollector(context)


def first_worker(context: Any) -> int:
    """torchrl's DistributedCollector numbers its workers by their ranks."""
    from torchrl.collectors.distributed import DistributedCollector

    return 1 if isinstance(context, DistributedCollector) else 0


def is_enlisted(context: Any) -> bool:
    """torchrl's RPCCollector hands schemes to its nodes before it calls ``init_on_sender``."""
    from torchrl.collectors import BaseCollector

    if not isinstance(context, BaseCollector) or not is_member():
        return False
    return str(agent_here().get_worker_info().name).startswith("COLLECTOR_NODE_")


def processes(context: Any) -> dict[int, int]:
    """Those that torchrl's collectors of several processes have started."""
    started = getattr(context, "procs", None) or ()
    return {index: process.pid for index, process in enumerate(started) if process.pid is not None}


def last_words(context: Any, worker: int) -> str:
    """What has gone wrong, which torchrl's worker sends before it ends and nobody would read any more."""
    pipe = context.pipes[worker]
    with suppress(EOFError, OSError):
        while pipe.poll():
            message = pipe.recv()
            if isinstance(message, dict) and message.get("error"):
                return f"{message['exception_type']}: {message['exception_msg']}\n{message['traceback']}"
    return ""


class _Parent(Cascade):
    """A collector that has others to update."""

    writes = False

    def __init__(self, collector: Any) -> None:
        super().__init__(collector)
        self._collector = weakly(collector)

    def updating(self, model_id: str, weights: Any) -> Any:
        """See :class:`Follower`. Before they have been started there is nobody: they begin with the model."""
        schemes = getattr(self._collector(), "_weight_sync_schemes", None) or {}
        scheme = schemes.get(model_id)
        return super().updating(model_id, weights) if scheme and scheme.synchronized_on_sender else None


class _ActingCollector(Follower):
    """A collector that acts with the model itself. Its ``update_policy_weights_`` would write into the
    parameters, which have the weights already; what is left of it is to count.

    A version counts from the first forward pass with it, not from the commit: frames are tagged some time
    after the pass, and are to have the version that acted.
    """

    def __init__(self, collector: Any) -> None:
        self._collector = weakly(collector)

    def acting(self, version: int) -> None:
        """See :class:`Follower`."""
        tracker = getattr(self._collector(), "policy_version_tracker", None)
        if tracker is None or version == 0:
            return
        if isinstance(tracker.version, int):
            tracker.version = version
        else:
            tracker.increment_version()


class _Server(Follower):
    """An inference server, which holds a lock from a pass until it has said what version that was.

    A version counts from the commit where no batch is being served, else from the next pass.
    """

    def __init__(self, server: Any) -> None:
        self._server = weakly(server)
        self._counted = 0

    def committed(self, version: int) -> None:
        """See :class:`Follower`."""
        server = self._server()
        if server is not None and server._model_lock.acquire(blocking=False):
            try:
                self._count(server, version)
            finally:
                server._model_lock.release()

    def acting(self, version: int) -> None:
        """See :class:`Follower`."""
        server = self._server()
        if server is not None:
            self._count(server, version)

    def _count(self, server: Any, version: int) -> None:
        if version > self._counted:
            server._mark_weight_update(server.policy_version + version - self._counted)
            self._counted = version


def _register() -> None:
    """Have the twins count as torchrl's schemes, and be made by
    ``torchrl.weight_update.WeightSyncScheme.from_backend("aiosync.shared")``."""
    weight_update.WeightSyncScheme.register(sync.WeightSyncScheme)
    # torchrl's InferenceServer need not ask this one for updates: they come by themselves.
    weight_update.SharedMemWeightSyncScheme.register(sync.SharedMemWeightSyncScheme)
    by_name = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
    if by_name is not None:
        for backend, twin in sync.WeightSyncScheme.twins_by_backend().items():
            by_name(f"aiosync.{backend}")(twin)


_register()
