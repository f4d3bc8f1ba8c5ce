"""Adapter to torchrl's collectors and servers, for the blocking twins. The only file that imports torchrl.

Importing this module changes torchrl in two ways, and nothing else:

- ``torchrl.weight_update.WeightSyncScheme`` and ``SharedMemWeightSyncScheme`` count the blocking twins as
  subclasses (:meth:`abc.ABCMeta.register`).
- ``torchrl.weight_update.WeightSyncScheme.from_backend`` makes the twins by the names
  ``"aiosync.<backend>"``.

aiosync imports this module in two cases: the first time that a program which has imported torchrl calls
``isinstance(twin, ...)``, as torchrl itself does; and when a scheme gets a context of torchrl's. A program
that makes twins by name imports this module itself.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from torchrl import weight_update
from torchrl.weight_update import weight_sync_schemes

from aiosync import sync
from aiosync._deadline import Deadline, default_timeout
from aiosync.errors import InvalidArgumentError
from aiosync.receiver.listeners import ContextUpdater, UpdateListener, weakly
from aiosync.transports.torch_rpc.transport import agent_here, is_member


def listener_for(context: Any, model_id: str) -> UpdateListener | None:
    """Return the listener for a torchrl context; None: the default one, as for any other context."""
    from torchrl.collectors import BaseCollector
    from torchrl.modules.inference_server import InferenceServer

    if isinstance(context, InferenceServer):
        if context.static_batch_size is not None:
            raise InvalidArgumentError(
                "an InferenceServer with static_batch_size replays CUDA graphs, and a commit could fall into "
                "a replay: do not set static_batch_size, or use torchrl's own scheme"
            )
        return _Server(context)
    if not isinstance(context, BaseCollector) or getattr(context, "weight_updater", None) is not None:
        return None
    if getattr(context, "_weight_sync_schemes", None):
        return _Parent(context)
    return _ActingCollector(context) if model_id == "policy" else UpdateListener()


def first_worker(context: Any) -> int:
    """Return the index of a context's first worker: DistributedCollector uses ranks, which begin at 1."""
    from torchrl.collectors.distributed import DistributedCollector

    return 1 if isinstance(context, DistributedCollector) else 0


def wants_transient(context: Any) -> bool:
    """Return whether the context is a collector: its workers' policies may come to them on ``meta``, and
    torchrl sends all of their buffers."""
    from torchrl.collectors import BaseCollector

    return isinstance(context, BaseCollector)


def is_enlisted(context: Any) -> bool:
    """Return whether the sender will enlist this worker: a node of torchrl's RPCCollector, which passes
    schemes to its nodes before it calls ``init_on_sender``."""
    from torchrl.collectors import BaseCollector

    if not isinstance(context, BaseCollector) or not is_member():
        return False
    return str(agent_here().get_worker_info().name).startswith("COLLECTOR_NODE_")


def with_policy_transforms(env: Any, policy: Any) -> Any:
    """Return a torchrl environment with the transforms that a recurrent policy needs and that it lacks: the
    one that marks the first step of an episode, and those that begin with the policy's initial states."""
    from torchrl.envs.transforms import Compose, InitTracker, TensorDictPrimer
    from torchrl.modules.utils import get_primers_from_module

    known = {
        key for spec in (env.full_observation_spec, env.full_state_spec) for key in spec.keys(True, True)
    }
    if not any("is_init" in (key, key[-1]) for key in known):
        env = env.append_transform(InitTracker())
    primers = get_primers_from_module(policy, warn=False) if hasattr(policy, "apply") else None
    for primer in primers if isinstance(primers, Compose) else [primers]:
        if isinstance(primer, TensorDictPrimer) and not set(primer.primers.keys(True, True)) <= known:
            env = env.append_transform(primer)
    return env


def processes(context: Any) -> dict[int, int]:
    """Return worker index -> process id, of the processes that a collector has started."""
    started = getattr(context, "procs", None) or ()
    return {index: process.pid for index, process in enumerate(started) if process.pid is not None}


def last_words(context: Any, worker: int) -> str:
    """Return the error that a worker sent before it ended, or ""; torchrl itself would not read it."""
    pipe = context.pipes[worker]
    with suppress(EOFError, OSError):
        while pipe.poll():
            message = pipe.recv()
            if isinstance(message, dict) and message.get("error"):
                return f"{message['exception_type']}: {message['exception_msg']}\n{message['traceback']}"
    return ""


class _Parent(ContextUpdater):
    """Listener for a collector that has its own workers.

    torchrl's schemes may pickle the tensors that they are given, which moves these out of shared memory. So
    such a collector may get the sender's memory only if all its schemes are aiosync's.
    """

    def __init__(self, collector: Any) -> None:
        super().__init__(collector)
        self._collector = weakly(collector)
        schemes = collector._weight_sync_schemes.values()
        self.writes = not all(isinstance(scheme, sync.WeightSyncScheme) for scheme in schemes)

    def updating(self, model_id: str, weights: Any) -> Any:
        # Before the commit here, the collector's own workers get the update. A worker that is not started
        # yet begins with the model as it is at its start; one that is starting gets it once it is connected.
        scheme = (getattr(self._collector(), "_weight_sync_schemes", None) or {}).get(model_id)
        if scheme is None or not scheme.initialized_on_sender:
            return None
        deadline = Deadline.after(default_timeout())
        while not scheme.synchronized_on_sender:
            time.sleep(0.01)  # in a thread; torchrl has no event to wait for
            if self._collector() is None or not scheme.initialized_on_sender:
                return None
            if deadline.remaining() <= 0:
                raise deadline.error("connect", hint="this collector's own workers have not started")
        return super().updating(model_id, weights)


class _Counting(UpdateListener):
    """Counts the versions since the last call of :meth:`more`. A new sender begins at 0 again."""

    def __init__(self) -> None:
        self._counted = 0

    def more(self, version: int) -> int:
        before, self._counted = self._counted, version
        return max(0, version - before)


class _ActingCollector(_Counting):
    """Listener for a collector that acts with the model itself.

    Its ``update_policy_weights_`` would write into parameters that have the weights already; only its version
    has to be counted. A version counts from the first forward pass with it, not from the commit: frames are
    tagged some time after the pass, with the version that acted. A captured graph makes no forward passes:
    there a version counts from the commit.
    """

    def __init__(self, collector: Any) -> None:
        super().__init__()
        self._collector = weakly(collector)
        self._replays = bool(getattr(collector, "cudagraphed_policy", False))

    def committed(self, version: int) -> None:
        if self._replays:
            self.acting(version)

    def acting(self, version: int) -> None:
        tracker = getattr(self._collector(), "policy_version_tracker", None)
        more = self.more(version)
        if tracker is None or not more:
            return
        if isinstance(tracker.version, int):
            tracker.version += more
        else:
            tracker.increment_version()


class _Server(_Counting):
    """Listener for an inference server. The server holds a lock from a forward pass until it has reported
    that pass's version.

    A version counts from the commit if no batch is being served, else from the next pass.
    """

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server = weakly(server)

    def committed(self, version: int) -> None:
        server = self._server()
        if server is not None and server._model_lock.acquire(blocking=False):
            try:
                self.acting(version)
            finally:
                server._model_lock.release()

    def acting(self, version: int) -> None:
        server, more = self._server(), self.more(version)
        if server is not None and more:
            server._mark_weight_update(server.policy_version + more)


# The changes to torchrl that the module's docstring lists.
weight_update.WeightSyncScheme.register(sync.WeightSyncScheme)
# torchrl's InferenceServer checks for this class to know whether updates arrive without a call.
weight_update.SharedMemWeightSyncScheme.register(sync.WeightSyncScheme)
_by_name = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
if _by_name is not None:
    for _backend, _twin in sync.WeightSyncScheme.twins_by_backend().items():
        _by_name(f"aiosync.{_backend}")(_twin)
