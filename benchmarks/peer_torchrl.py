"""torchrl's two schemes, used as its documentation says (stand-alone use, and ``params_map``)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from contextlib import AbstractAsyncContextManager
from multiprocessing.context import SpawnContext
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from benchmarks.peers import ReceivePeer, SendPeer, Sent, Weights

__all__ = ["make_receiver", "make_sender"]

MODEL_ID = "policy"


def make_sender(name: str, scheme: str, model: nn.Module, num_workers: int, ctx: SpawnContext) -> SendPeer:
    """The sender's end: ``torchrl`` copies the trainer's memory, ``torchrl-alias`` does not."""
    return _TorchrlSender(name == "torchrl-alias", scheme, model, num_workers, ctx)


def make_receiver(recipe: object, model: nn.Module, worker_idx: int) -> ReceivePeer:
    """A worker's end."""
    return _TorchrlReceiver(recipe, model, worker_idx)


def _own_copy(worker_idx: int, weights: TensorDict) -> TensorDict:
    """torchrl's ``device_map_fn``: memory of its own for each worker, on the CPU."""
    return weights.clone()


class _TorchrlSender(SendPeer):
    def __init__(
        self, alias: bool, scheme: str, model: nn.Module, num_workers: int, ctx: SpawnContext
    ) -> None:
        # torchrl registers its backends on import; it is optional, hence by name.
        library: Any = importlib.import_module("torchrl.weight_update")
        self._scheme: Any = library.WeightSyncScheme.from_backend(scheme)
        # The documented call for aliased shared memory is send() without weights: nothing to copy.
        self._send_nothing = alias and scheme == "shared"
        if alias:
            self._scheme.init_on_sender(
                model_id=MODEL_ID,
                weights=TensorDict.from_module(model),
                devices=[torch.device("cpu")] * num_workers,
                num_workers=num_workers,
                ctx=ctx,
            )
        elif scheme == "shared":
            shared = TensorDict.from_module(model).data.clone().share_memory_()
            self._scheme.init_on_sender(params_map=dict.fromkeys(range(num_workers), shared), ctx=ctx)
        else:
            self._scheme.init_on_sender(
                model_id=MODEL_ID,
                model=model,
                device_map_fn=_own_copy,
                num_workers=num_workers,
                ctx=ctx,
            )
        self.recipe = self._scheme

    async def connect(self) -> None:
        self._scheme.connect()

    async def send(self, weights: Weights, *, off_loop: bool = False) -> Sent:
        payload = None if self._send_nothing else weights
        if off_loop:
            await asyncio.to_thread(self._scheme.send, payload)
        else:
            self._scheme.send(payload)
        return Sent()

    async def close(self) -> None:
        await asyncio.to_thread(self._scheme.shutdown)


class _TorchrlReceiver(ReceivePeer):
    """Updates are applied by torchrl's own background thread; the caller's thread stays free."""

    def __init__(self, recipe: Any, model: nn.Module, worker_idx: int) -> None:
        self._scheme = recipe
        self._model = model  # torchrl keeps only a weak reference
        self._idx = worker_idx
        self._scheme.init_on_receiver(model_id=MODEL_ID, model=model, worker_idx=worker_idx)

    async def connect(self) -> None:
        await asyncio.to_thread(self._scheme.connect, worker_idx=self._idx)

    def version(self) -> int | None:
        return None

    def pinned(self) -> AbstractAsyncContextManager[int | None]:
        return contextlib.nullcontext()

    async def close(self) -> None:
        await asyncio.to_thread(self._scheme.shutdown)
