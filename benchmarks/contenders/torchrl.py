"""torchrl's schemes, used as its documentation says, and as its collectors use them.

``shared`` and ``process`` stand alone. ``distributed`` and ``rpc`` send tensor by tensor over the default
process group of their processes, which meet in a store of their own.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed import rpc

from benchmarks.contenders import MODEL_ID, SenderEnd, Sent, Setup, Weights, WorkerEnd
from benchmarks.contenders.aiosync import join_rpc
from benchmarks.harness.models import ModelSpec, build_model
from benchmarks.harness.process import SPAWN

__all__ = ["make_sender", "make_worker"]


def make_sender(setup: Setup, model: nn.Module) -> SenderEnd:
    """The sender's end: ``torchrl`` copies the trainer's memory, ``torchrl-alias`` does not."""
    if setup.scheme == "rpc":
        return _RpcSender(setup, model)
    if setup.scheme == "distributed":
        return _DistributedSender(setup, model)
    return _Sender(_init_alone(setup, model), setup, model)


def make_worker(setup: Setup, recipe: Any, model: nn.Module, index: int) -> WorkerEnd:
    """A worker's end. torchrl applies updates in a thread of its own, or in the sender's calls."""
    if setup.scheme == "rpc":
        return _RpcWorker(setup, recipe, index)
    if setup.scheme == "distributed":
        return _DistributedWorker(setup, recipe, model, index)
    return _Worker(recipe, model, index)


def _library() -> Any:
    # torchrl registers its backends on import, and mypy does not know it.
    return importlib.import_module("torchrl.weight_update")


def _own_copy(worker_idx: int, weights: TensorDict) -> TensorDict:
    """torchrl's ``device_map_fn``: memory of its own for each worker, on the CPU."""
    return weights.clone()


def _init_alone(setup: Setup, model: nn.Module) -> Any:
    scheme = _library().WeightSyncScheme.from_backend(setup.scheme)
    common: dict[str, Any] = {"num_workers": setup.workers, "ctx": SPAWN}
    if setup.contender == "torchrl-alias":
        devices = [torch.device("cpu")] * setup.workers
        scheme.init_on_sender(
            model_id=MODEL_ID, weights=TensorDict.from_module(model), devices=devices, **common
        )
    elif setup.scheme == "shared":
        shared = TensorDict.from_module(model).data.clone().share_memory_()
        scheme.init_on_sender(params_map=dict.fromkeys(range(setup.workers), shared), ctx=SPAWN)
    else:
        scheme.init_on_sender(model_id=MODEL_ID, model=model, device_map_fn=_own_copy, **common)
    return scheme


class _Sender(SenderEnd):
    def __init__(self, scheme: Any, setup: Setup, model: nn.Module) -> None:
        self._scheme = scheme
        self._setup = setup
        self._model = model
        # The documented call for aliased shared memory is send() without weights: nothing to copy.
        self._send_nothing = setup.contender == "torchrl-alias" and setup.scheme == "shared"

    async def recipe(self, index: int) -> object:
        return self._scheme

    async def connect(self) -> None:
        self._scheme.connect()

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        payload = None if self._send_nothing else weights if weights is not None else self._model
        if off_loop:
            await asyncio.to_thread(self._scheme.send, payload)
        else:
            self._scheme.send(payload)
        return Sent()

    async def close(self) -> None:
        await asyncio.to_thread(self._scheme.shutdown)


class _Worker(WorkerEnd):
    """The caller's thread stays free: a thread of torchrl's applies updates."""

    first_index = 0

    def __init__(self, scheme: Any, model: nn.Module, index: int) -> None:
        self._scheme = scheme
        self._model = model  # torchrl keeps only a weak reference
        self._index = self.first_index + index
        self._initialize()

    def _initialize(self) -> None:
        self._scheme.init_on_receiver(model_id=MODEL_ID, model=self._model, worker_idx=self._index)

    async def connect(self) -> None:
        await asyncio.to_thread(self._scheme.connect, worker_idx=self._index)

    async def close(self) -> None:
        await asyncio.to_thread(self._scheme.shutdown)


# -- over the default process group: worker 0 is rank 1, and torchrl's worker 1 ----------------------


async def _join_default_group(rank: int, workers: int, port: int) -> None:
    store: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    join = dist.init_process_group
    await asyncio.to_thread(join, "gloo", store=store, rank=rank, world_size=1 + workers)


class _Holder:
    """Holds a policy and its scheme: in torchrl's words, a collector."""

    def __init__(self, spec: ModelSpec) -> None:
        self.policy = build_model(spec)
        self.scheme: Any = None

    def register(self, worker_idx: int) -> None:
        """Receive by torchrl's RPC scheme. The sender calls it."""
        self.scheme = _library().RPCWeightSyncScheme()
        self.scheme.init_on_receiver(model_id=MODEL_ID, context=self, worker_idx=worker_idx)
        self.scheme.connect(worker_idx=worker_idx)

    def _receive_weights_scheme(self) -> None:
        self.scheme.receive()


class _DistributedSender(_Sender):
    def __init__(self, setup: Setup, model: nn.Module) -> None:
        scheme = _library().DistributedWeightSyncScheme(backend="gloo", sync=True)
        scheme.init_on_sender(model_id=MODEL_ID, model=model, num_workers=setup.workers)
        super().__init__(scheme, setup, model)

    async def connect(self) -> None:
        await _join_default_group(0, self._setup.workers, self._setup.extras["port"])
        await asyncio.to_thread(self._scheme.connect)

    async def close(self) -> None:
        """Nothing: its workers cannot be told to end while they wait for the store."""


class _DistributedWorker(_Worker):
    first_index = 1

    def __init__(self, setup: Setup, scheme: Any, model: nn.Module, index: int) -> None:
        self._setup = setup
        super().__init__(scheme, model, index)

    def _initialize(self) -> None:
        self._context = _Holder(self._setup.model)
        self._context.policy = self._model
        self._scheme.init_on_receiver(model_id=MODEL_ID, context=self._context, worker_idx=self._index)

    async def connect(self) -> None:
        await _join_default_group(self._index, self._setup.workers, self._setup.extras["port"])
        await super().connect()

    async def close(self) -> None:
        """Nothing: see the sender."""


class _RpcSender(_Sender):
    def __init__(self, setup: Setup, model: nn.Module) -> None:
        super().__init__(_library().RPCWeightSyncScheme(), setup, model)
        self._context: Any = _Holder(setup.model)
        self._context.policy = model

    async def recipe(self, index: int) -> object:
        return None

    async def connect(self) -> None:
        workers, port = self._setup.workers, self._setup.extras["port"]
        await join_rpc(self._setup, "trainer", 0)
        await _join_default_group(0, workers, port)
        await asyncio.to_thread(self._register, workers)
        self._scheme.init_on_sender(model_id=MODEL_ID, context=self._context, num_workers=workers)
        await asyncio.to_thread(self._scheme.connect)

    def _register(self, workers: int) -> None:
        context = self._context
        context.collector_class = _Holder
        context.collector_infos = [rpc.get_worker_info(f"worker{index}") for index in range(workers)]
        context.collector_rrefs = [
            rpc.remote(info, _Holder, args=(self._setup.model,)) for info in context.collector_infos
        ]
        for index, rref in enumerate(context.collector_rrefs):
            rref.rpc_sync().register(1 + index)

    async def close(self) -> None:
        """Nothing: the workers have no thread that waits."""

    async def leave(self) -> None:
        rpc.shutdown(graceful=False)


class _RpcWorker(WorkerEnd):
    """The sender's calls apply updates, to a model that the sender has made here."""

    def __init__(self, setup: Setup, recipe: object, index: int) -> None:
        self._setup = setup
        self._index = index

    async def connect(self) -> None:
        workers, port = self._setup.workers, self._setup.extras["port"]
        await join_rpc(self._setup, f"worker{self._index}", 1 + self._index)
        await _join_default_group(1 + self._index, workers, port)

    async def close(self) -> None:
        rpc.shutdown(graceful=False)
