"""What the worker processes of these tests run: importable, so that every start method finds it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from aiosync import sync


class Layers(nn.Module):
    """Several layers that should all hold the same number; a forward pass tells which it saw."""

    def __init__(self, value: float = 0.0, size: int = 64) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size, size), value)) for _ in range(6)])

    def forward(self) -> list[float]:
        """The number in each layer, looked at one after another."""
        return [float(part.detach()[0, 0]) for part in self.parts]

    def fill(self, value: float) -> None:
        """Put one number everywhere."""
        with torch.no_grad():
            for part in self.parts:
                part.fill_(value)


class Fragile(nn.Linear):
    """Refuses extra state that is nonzero."""

    def get_extra_state(self) -> dict[str, Tensor]:
        """Nonzero: refuse."""
        return {"refuse": torch.zeros(())}

    def set_extra_state(self, state: Any) -> None:
        """Raises if the sender says so."""
        if float(state["refuse"]):
            raise ValueError("this layer is fragile")


def hold(scheme: sync.WeightSyncScheme, worker: int, pipe: Connection[Any, Any]) -> None:
    """Connect; then answer ``look`` with version and weight, and end at ``close``."""
    model = Fragile(3, 2)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
    scheme.connect()
    pipe.send("connected")
    while pipe.recv() == "look":
        with scheme.pinned() as version:
            pipe.send((version, float(model.weight.detach()[0, 0])))
    scheme.close()
    pipe.send("closed")


def run_forwards(scheme: sync.WeightSyncScheme, worker: int, pipe: Connection[Any, Any]) -> None:
    """Run forward passes in the main thread until the pipe says stop, which it may do when they have seen
    enough; report what they saw."""
    torch.set_num_threads(1)
    model = Layers()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
    scheme.connect()
    pipe.send("connected")
    forwards = torn = 0
    seen: set[float] = set()
    enough = False
    while not pipe.poll():
        values = model()
        forwards += 1
        torn += len(set(values)) > 1
        seen.add(values[0])
        if not enough and forwards > 2000 and len(seen) > 50:
            enough = True
            pipe.send("enough")
    pipe.recv()
    pipe.send(torn)
    scheme.close()
