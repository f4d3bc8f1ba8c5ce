"""torchrl's schemes, used as its documentation says, and as its collectors use them.

``shared`` and ``process`` stand alone. ``torchrl`` copies the trainer's memory, ``torchrl-alias`` does not.
``distributed`` and ``rpc`` send tensor by tensor over the default process group: worker 0 is rank 1, and
torchrl's worker 1.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed import rpc
from torchrl import weight_update

from benchmarks.contenders import MODEL_ID, SenderEnd, Sent, Setup, Weights, WorkerEnd
from benchmarks.harness.model_specs import ModelSpec
from benchmarks.harness.models import build_model
from benchmarks.harness.trainer import SPAWN


def ends(setup: Setup) -> tuple[type[SenderEnd], type[WorkerEnd]]:
    """Ends of the scheme. torchrl applies updates in a thread of its own, or in the sender's calls."""
    if setup.scheme == "rpc":
        return _RpcSender, WorkerEnd  # which does nothing: the sender makes a model there
    if setup.scheme == "distributed":
        return _Sender, _DistributedWorker
    return _Sender, _Worker


def memory_of_workers(scheme: str, model: nn.Module, workers: int) -> dict[str, Any]:
    """What ``init_on_sender`` of ``shared`` and ``process`` is given, so that updates are really copied.

    By default the workers' parameters are the trainer's own memory."""
    if scheme == "shared":
        one = TensorDict.from_module(model).data.clone().share_memory_()
        return {"params_map": dict.fromkeys(range(workers), one)}
    return {"model_id": MODEL_ID, "model": model, "num_workers": workers, "device_map_fn": _own_copy}


def _own_copy(worker_idx: int, weights: TensorDict) -> TensorDict:
    """torchrl's ``device_map_fn``: memory of its own for each worker, on the CPU."""
    return weights.clone()


class Holder:
    """Holds a policy and its scheme: in torchrl's words, a collector. A trainer makes it in a worker."""

    def __init__(self, policy: nn.Module | ModelSpec) -> None:
        if isinstance(policy, ModelSpec):
            torch.set_num_threads(1)
            policy = build_model(policy)
        self.policy = policy

    def register(self, scheme: Any, worker_idx: int) -> None:
        """Receive by this scheme."""
        self.scheme, self.worker_idx = scheme, worker_idx
        scheme.init_on_receiver(model_id=MODEL_ID, context=self, worker_idx=worker_idx)

    def _connect_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.connect(worker_idx=self.worker_idx)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.receive()


class _Sender(SenderEnd):
    def __post_init__(self) -> None:
        self._scheme = self._make_scheme()
        # The documented call for aliased shared memory is send() without weights: nothing to copy.
        self._send_nothing = (self.setup.contender, self.setup.scheme) == ("torchrl-alias", "shared")

    def _make_scheme(self) -> Any:
        workers = self.setup.workers
        given: dict[str, Any] = {"model_id": MODEL_ID, "num_workers": workers}
        if self.setup.scheme == "distributed":
            scheme: Any = weight_update.DistributedWeightSyncScheme(backend="gloo", sync=True)
            scheme.init_on_sender(model=self.model, **given)
            return scheme
        scheme = weight_update.WeightSyncScheme.from_backend(self.setup.scheme)
        if self.setup.contender == "torchrl-alias":
            weights = TensorDict.from_module(self.model)
            given |= {"weights": weights, "devices": [torch.device("cpu")] * workers}
        else:
            given = memory_of_workers(self.setup.scheme, self.model, workers)
        scheme.init_on_sender(ctx=SPAWN, **given)
        return scheme

    async def recipe(self, index: int) -> Any:
        return self._scheme

    async def connect(self) -> None:
        await asyncio.to_thread(self._scheme.connect)

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        payload = None if self._send_nothing else weights if weights is not None else self.model
        if off_loop:
            await asyncio.to_thread(self._scheme.send, payload)
        else:
            self._scheme.send(payload)
        return Sent()

    async def close(self) -> None:
        # The others have no thread that waits, or one that cannot be stopped while it waits for the store.
        if self.setup.scheme in ("shared", "process"):
            await asyncio.to_thread(self._scheme.shutdown)


class _Worker(WorkerEnd):
    """The caller's thread stays free: a thread of torchrl's applies updates."""

    def __post_init__(self) -> None:
        self.recipe.init_on_receiver(model_id=MODEL_ID, model=self.model, worker_idx=self.index)

    async def connect(self) -> None:
        await asyncio.to_thread(self.recipe.connect, worker_idx=self.index)

    async def close(self) -> None:
        await asyncio.to_thread(self.recipe.shutdown)


class _DistributedWorker(WorkerEnd):
    def __post_init__(self) -> None:
        self._holder = Holder(self.model)
        self._holder.register(self.recipe, 1 + self.index)

    async def connect(self) -> None:
        await asyncio.to_thread(self._holder._connect_weights_scheme)


class _RpcSender(_Sender):
    def _make_scheme(self) -> Any:
        return weight_update.RPCWeightSyncScheme()

    async def recipe(self, index: int) -> Any:
        return None

    async def connect(self) -> None:
        self._holder = await asyncio.to_thread(self._register)
        self._scheme.init_on_sender(model_id=MODEL_ID, context=self._holder, num_workers=self.setup.workers)
        await super().connect()

    def _register(self) -> Any:
        """Make a holder in each worker; returns what torchrl's scheme expects of a collector."""
        holder: Any = Holder(self.model)
        holder.collector_class = Holder
        holder.collector_infos = [rpc.get_worker_info(f"worker{i}") for i in range(self.setup.workers)]
        holder.collector_rrefs = [
            rpc.remote(info, Holder, args=(self.setup.model,)) for info in holder.collector_infos
        ]
        for index, rref in enumerate(holder.collector_rrefs):
            rref.rpc_sync().register(weight_update.RPCWeightSyncScheme(), 1 + index)
            rref.rpc_sync()._connect_weights_scheme()
        return holder
