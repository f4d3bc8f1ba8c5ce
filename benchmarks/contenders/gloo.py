"""Bare gloo: one send and one receive of one tensor of the model's size, and a byte back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.contenders import SenderEnd, Sent, Setup, Weights, WorkerEnd

__all__ = ["make_sender", "make_worker"]

LIMIT = timedelta(seconds=120)


def make_sender(setup: Setup, model: nn.Module) -> SenderEnd:
    """Rank 0."""
    return _Sender(setup, model)


def make_worker(setup: Setup, recipe: object, model: nn.Module, index: int) -> WorkerEnd:
    """Rank 1, the only receiver."""
    return _Worker(setup, model)


class _End:
    """A process group of two, a buffer of the model's size, and a byte."""

    def __init__(self, setup: Setup, model: nn.Module, rank: int) -> None:
        store: Any = TCPStore("127.0.0.1", setup.extras["port"], is_master=False, wait_for_workers=False)
        self._join = lambda: dist.ProcessGroupGloo(PrefixStore("bare", store), rank, 2, LIMIT)
        self._group: Any = None
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._byte = torch.zeros(1, dtype=torch.uint8)

    async def connect(self) -> None:
        self._group = await asyncio.to_thread(self._join)

    async def close(self) -> None:
        self._group = None


class _Sender(_End, SenderEnd):
    def __init__(self, setup: Setup, model: nn.Module) -> None:
        super().__init__(setup, model, 0)

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        self._group.send([self._buffer], 1, 1).wait()
        self._group.recv([self._byte], 1, 2).wait()
        return Sent()


class _Worker(_End, WorkerEnd):
    """A thread receives, until the process ends."""

    def __init__(self, setup: Setup, model: nn.Module) -> None:
        super().__init__(setup, model, 1)

    async def connect(self) -> None:
        await super().connect()
        threading.Thread(target=self._receive, args=(self._group,), daemon=True).start()

    def _receive(self, group: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the sender has closed its connection
            while True:
                group.recv([self._buffer], 0, 1).wait()
                group.send([self._byte], 0, 2).wait()
