"""Environments and policies that say which version acted. Imported by workers too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs import Compose, GymEnv, Transform, TransformedEnv, VecNormV2

from tests.kit.marked import Marked, make_policy, mark

__all__ = [
    "FRAMES",
    "Marked",
    "Transient",
    "check",
    "make_env",
    "make_normalised_env",
    "make_policy",
    "make_scaling_env",
    "mark",
]

FRAMES = 32
"""In each batch."""


def make_env() -> Any:
    """CartPole."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def check(batch: Any) -> set[int]:
    """That each frame claims the version that acted; returns the versions."""
    marks, claimed = batch["marks"], batch["next", "policy_version"]
    wrong = int((marks != claimed[..., None]).sum())
    assert wrong == 0, f"{wrong} of {marks.numel()}: {marks.unique()} claimed as {claimed.unique()}"
    return {int(version) for version in claimed.unique()}


class Scaling(Transform):  # type: ignore[misc]
    """Adds what its model says to what is observed; a negative size is none."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(in_keys=["observation"], out_keys=["scaled"])
        if size < 0:
            raise ValueError(f"a size of {size}")
        self.module = nn.Linear(1, size)
        nn.init.zeros_(self.module.weight)

    def _apply_transform(self, observation: Tensor) -> Tensor:
        self.module(torch.zeros(1))  # a pass of it is none of the policy's
        return self.module.weight.detach()[:, 0].expand(*observation.shape[:-1], -1).clone()

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, spec: Any) -> Any:
        """With one more entry."""
        spec["scaled"] = Unbounded(shape=(*spec.shape, self.module.out_features))
        return spec


def make_scaling_env(size: int = 1) -> Any:
    """CartPole with a model of its own."""
    return TransformedEnv(make_env(), Scaling(size))


def make_normalised_env(*, frozen: bool = True) -> Any:
    """CartPole with running statistics, by default somebody else's."""
    norm = VecNormV2(in_keys=["observation"], out_keys=["normalised"])
    env = TransformedEnv(make_env(), Compose(norm))
    env.reset()  # there are none before
    if frozen:
        norm.freeze()
    return env


class Transient(nn.Module):
    """Acts, and marks frames with a non-persistent buffer and with a parameter."""

    transient: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.register_buffer("transient", torch.tensor(3.0), persistent=False)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action and both marks."""
        marks = torch.stack([self.transient, self.net.bias.detach()[0]])
        action = self.net(observation).argmax(-1)
        return action, marks.expand(*action.shape, 2).clone()


@contextmanager
def collecting(
    make: Callable[..., Any],
    policy: Any,
    schemes: dict[str, Any],
    env: Callable[[], Any] = make_env,
    **options: Any,
) -> Iterator[Any]:
    """A collector of two workers, shut down at the end."""
    collector = make(
        [env] * 2,
        policy,
        frames_per_batch=FRAMES,
        weight_sync_schemes=schemes,
        track_policy_version=True,
        **options,
    )
    try:
        yield collector
    finally:
        collector.shutdown()
