"""Objects that live in other processes of torch RPC, for the tests; and the processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.distributed import rpc

from aiosync import RPCTransport
from aiosync.weights.strategy import WeightStrategy
from tests.kit.clock import PATIENCE
from tests.kit.models import Uniform, value_of
from tests.kit.rpc import join

__all__ = ["Collector", "Fallible", "Receiving", "leave", "linger", "serve"]


class Collector:
    """Has a policy, and records the values that it gets."""

    def __init__(self, size: int = 16, tensors: int = 4) -> None:
        self.policy = Uniform(-1.0, size=size, tensors=tensors)
        self.received: list[float] = []

    def get_model(self, model_id: str) -> Any:
        """The policy, by its name."""
        return {"policy": self.policy}[model_id]

    def update_policy_weights_(self, policy_or_weights: Any, model_id: str = "policy") -> None:
        """Called with each update."""
        weights = WeightStrategy("state_dict").extract_weights(policy_or_weights)
        self.received.append(float(next(iter(weights.values())).flatten()[0]))

    def values(self) -> tuple[float, list[float]]:
        """Return the policy's value, and the recorded values."""
        return value_of(self.policy), self.received

    def torn(self, passes: int) -> int:
        """How many of so many forward passes saw two versions."""
        count = len(self.policy.values)
        seen = (self.policy(torch.zeros(1))[0].item() / count for _ in range(passes))
        return sum(value != int(value) for value in seen)


class Fallible(Collector):
    """Applies what it is given itself, or refuses; asynchronously."""

    async def update_policy_weights_(  # type: ignore[override]
        self, policy_or_weights: Any, model_id: str = "policy"
    ) -> None:
        """Called with each update."""
        WeightStrategy().apply_weights(self.policy, policy_or_weights)
        if value_of(self.policy) == 13:
            raise ArithmeticError("thirteen is refused")

    def _receive_weights_scheme(self) -> None:
        self.received.append(-2.0)


class Receiving(Collector):
    """Receives by a transport of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._transport = RPCTransport(timeout=PATIENCE)

    async def receive(self, count: int) -> float:
        """Receive so many versions; return the policy's value."""
        for _ in range(count):
            await self._transport.receive_weights(model=self.policy)
        await self._transport.aclose()
        return value_of(self.policy)


def serve(address: str, worker: int, size: int) -> None:
    """The main of a process that takes part, and does what it is asked."""
    join(address, worker + 1, size)
    threading.Event().wait()


def linger(seconds: float) -> None:
    """Keep a thread of the agent busy."""
    time.sleep(seconds)


def leave() -> None:
    """Shut RPC down in an orderly manner, soon."""
    threading.Thread(target=rpc.shutdown).start()
