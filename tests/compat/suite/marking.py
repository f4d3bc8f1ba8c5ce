"""Policies and environments whose batches say which weights acted. Imported by workers too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs import GymEnv, Transform, TransformedEnv

SECONDS = 60.0
FRAMES = 16


def make_env() -> Any:
    """CartPole."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Marked(nn.Module):
    """Returns an action and what its parameter and its buffer say."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.full((), value))
        self.stamp: Tensor
        self.register_buffer("stamp", torch.full((), value))
        self.net = nn.Linear(4, 2)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes: ``[..., 4] -> [...], [...], [...]``."""
        action = self.net(observation).argmax(-1)
        shape = observation.shape[:-1]
        return action, self.mark.detach().expand(shape).clone(), self.stamp.expand(shape).clone()


def make_policy(value: float = 0.0) -> Any:
    """A policy that writes ``mark`` (its parameter) and ``stamp`` (its buffer)."""
    return TensorDictModule(Marked(value), in_keys=["observation"], out_keys=["action", "mark", "stamp"])


def fill(policy: Any, value: float) -> None:
    """Write a value into the mark and the stamp."""
    with torch.no_grad():
        policy.module.mark.fill_(value)
        policy.module.stamp.fill_(value)


class Scaling(Transform):  # type: ignore[misc]
    """An environment's own model: writes ``scaled``, which is its parameter."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["scaled"])
        self.module = nn.Linear(1, 1)
        nn.init.zeros_(self.module.weight)

    def _apply_transform(self, observation: Tensor) -> Tensor:
        return self.module.weight.detach()[0].expand(*observation.shape[:-1], 1).clone()

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, spec: Any) -> Any:
        """With ``scaled``."""
        spec["scaled"] = Unbounded(shape=(*spec.shape, 1))
        return spec


def make_scaling_env() -> Any:
    """CartPole with a model in a transform."""
    return TransformedEnv(make_env(), Scaling())


def until(batches: Iterator[Any], value: float, keys: tuple[Any, ...] = ("mark", "stamp")) -> None:
    """Collect until four batches in a row were made with the weights that say this value."""
    in_a_row = 0
    for _ in range(200):
        batch = next(batches)
        in_a_row = in_a_row + 1 if all(bool((batch[key] == value).all()) for key in keys) else 0
        if in_a_row == 4:
            return
    raise AssertionError(f"never {value}: {[batch[key].unique().tolist() for key in keys]}")


@contextmanager
def collecting(kind: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
    """A collector with two workers, shut down at the end."""
    options = {"frames_per_batch": FRAMES, "total_frames": -1, **options}
    collector = kind([make_env] * 2, *arguments, **options)
    try:
        yield collector
    finally:
        collector.shutdown()
