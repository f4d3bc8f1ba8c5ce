"""torchrl's schemes, used as its documentation says, and as its collectors use them.

``shared`` and ``process`` stand alone. ``torchrl`` copies the trainer's memory, ``torchrl-alias`` does not.
``distributed`` and ``rpc`` send tensor by tensor over the default process group of their processes, which
meet in a store of their own: worker 0 is rank 1, and torchrl's worker 1.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed import rpc
from torchrl import weight_update

from benchmarks.contenders import MODEL_ID, SenderEnd, Sent, Setup, Weights, WorkerEnd
from benchmarks.contenders.aiosync import join_rpc
from benchmarks.harness.models import ModelSpec, build_model
from benchmarks.harness.process import SPAWN


def ends(setup: Setup) -> tuple[type[SenderEnd], type[WorkerEnd]]:
    """Ends of the scheme. torchrl applies updates in a thread of its own, or in the sender's calls."""
    if setup.scheme == "rpc":
        return _RpcSender, _RpcWorker
    if setup.scheme == "distributed":
        return _DistributedSender, _DistributedWorker
    return _Sender, _Worker


def _own_copy(worker_idx: int, weights: TensorDict) -> TensorDict:
    """torchrl's ``device_map_fn``: memory of its own for each worker, on the CPU."""
    return weights.clone()


async def _join_default_group(setup: Setup, rank: int) -> None:
    port, size = setup.extras["port"], 1 + setup.workers
    store: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    await asyncio.to_thread(dist.init_process_group, "gloo", store=store, rank=rank, world_size=size)


class _Holder:
    """Holds a policy and its scheme: in torchrl's words, a collector."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.scheme: Any = None

    def register(self, worker_idx: int) -> None:
        """Receive by torchrl's RPC scheme. The sender calls it."""
        self.scheme = weight_update.RPCWeightSyncScheme()
        self.scheme.init_on_receiver(model_id=MODEL_ID, context=self, worker_idx=worker_idx)
        self.scheme.connect(worker_idx=worker_idx)

    def _receive_weights_scheme(self) -> None:
        self.scheme.receive()


def _make_holder(spec: ModelSpec) -> _Holder:
    return _Holder(build_model(spec))


class _Sender(SenderEnd):
    def __init__(self, setup: Setup, model: nn.Module) -> None:
        super().__init__(setup, model)
        self._scheme = self._make_scheme()
        # The documented call for aliased shared memory is send() without weights: nothing to copy.
        self._send_nothing = setup.contender == "torchrl-alias" and setup.scheme == "shared"

    def _make_scheme(self) -> Any:
        workers = self.setup.workers
        scheme = weight_update.WeightSyncScheme.from_backend(self.setup.scheme)
        given: dict[str, Any] = {"model_id": MODEL_ID, "num_workers": workers}
        weights = TensorDict.from_module(self.model)
        if self.setup.contender == "torchrl-alias":
            given |= {"weights": weights, "devices": [torch.device("cpu")] * workers}
        elif self.setup.scheme == "shared":
            given = {"params_map": dict.fromkeys(range(workers), weights.data.clone().share_memory_())}
        else:
            given |= {"model": self.model, "device_map_fn": _own_copy}
        scheme.init_on_sender(ctx=SPAWN, **given)
        return scheme

    async def recipe(self, index: int) -> Any:
        return self._scheme

    async def connect(self) -> None:
        self._scheme.connect()

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        payload = None if self._send_nothing else weights if weights is not None else self.model
        if off_loop:
            await asyncio.to_thread(self._scheme.send, payload)
        else:
            self._scheme.send(payload)
        return Sent()

    async def close(self) -> None:
        await asyncio.to_thread(self._scheme.shutdown)


class _Worker(WorkerEnd):
    """The caller's thread stays free: a thread of torchrl's applies updates."""

    def __init__(self, setup: Setup, recipe: Any, model: nn.Module, index: int) -> None:
        super().__init__(setup, recipe, model, index)  # torchrl keeps only a weak reference to the model
        recipe.init_on_receiver(model_id=MODEL_ID, model=model, worker_idx=index)

    async def connect(self) -> None:
        await asyncio.to_thread(self.recipe.connect, worker_idx=self.index)

    async def close(self) -> None:
        await asyncio.to_thread(self.recipe.shutdown)


class _DistributedSender(_Sender):
    def _make_scheme(self) -> Any:
        scheme = weight_update.DistributedWeightSyncScheme(backend="gloo", sync=True)
        scheme.init_on_sender(model_id=MODEL_ID, model=self.model, num_workers=self.setup.workers)
        return scheme

    async def connect(self) -> None:
        await _join_default_group(self.setup, 0)
        await asyncio.to_thread(self._scheme.connect)

    async def close(self) -> None:
        """Nothing: its workers cannot be stopped while they wait for the store."""


class _DistributedWorker(WorkerEnd):
    def __init__(self, setup: Setup, recipe: Any, model: nn.Module, index: int) -> None:
        super().__init__(setup, recipe, model, 1 + index)
        self._context = _Holder(model)
        recipe.init_on_receiver(model_id=MODEL_ID, context=self._context, worker_idx=self.index)

    async def connect(self) -> None:
        await _join_default_group(self.setup, self.index)
        await asyncio.to_thread(self.recipe.connect, worker_idx=self.index)


class _RpcSender(_Sender):
    def _make_scheme(self) -> Any:
        return weight_update.RPCWeightSyncScheme()

    async def recipe(self, index: int) -> Any:
        return None

    async def connect(self) -> None:
        await join_rpc(self.setup, "trainer", 0)
        await _join_default_group(self.setup, 0)
        self._context = await asyncio.to_thread(self._register)
        self._scheme.init_on_sender(model_id=MODEL_ID, context=self._context, num_workers=self.setup.workers)
        await asyncio.to_thread(self._scheme.connect)

    def _register(self) -> Any:
        """Make a holder in each worker; returns what torchrl's scheme expects of a collector."""
        context: Any = _Holder(self.model)
        context.collector_class = _Holder
        names = [f"worker{index}" for index in range(self.setup.workers)]
        context.collector_infos = [rpc.get_worker_info(name) for name in names]
        context.collector_rrefs = [rpc.remote(name, _make_holder, args=(self.setup.model,)) for name in names]
        for index, rref in enumerate(context.collector_rrefs):
            rref.rpc_sync().register(1 + index)
        return context

    async def close(self) -> None:
        """Nothing: the workers have no thread that waits."""

    async def leave(self) -> None:
        rpc.shutdown(graceful=False)


class _RpcWorker(WorkerEnd):
    """The sender's calls apply updates, to a model that the sender has made here."""

    async def connect(self) -> None:
        await join_rpc(self.setup, f"worker{self.index}", 1 + self.index)
        await _join_default_group(self.setup, 1 + self.index)

    async def close(self) -> None:
        rpc.shutdown(graceful=False)
