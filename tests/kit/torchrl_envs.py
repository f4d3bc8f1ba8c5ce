"""torchrl environments that count, with fields at the root or nested. Imported by workers too."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

__all__ = ["AGENTS", "Growing", "Masked", "Speaking", "Steps", "Team", "act", "make_policy"]

AGENTS = 3


def _flag(*shape: int) -> Any:
    return Categorical(2, shape=torch.Size(shape), dtype=torch.bool)


class Steps(EnvBase):  # type: ignore[misc]
    """Observes (the episode, the step); an episode ends after ``length`` steps. The reward is the action.

    Args:
        batch_size: environments that step together; the last ones have longer episodes.
        length: of an episode of the first one.
        truncated: whether the episodes end by a ``truncated`` key instead of ``terminated``.
        arm: whether there is a second action, ``("arm", "action")``, which counts ten times.
    """

    def __init__(
        self, batch_size: tuple[int, ...] = (), length: int = 4, truncated: bool = False, arm: bool = False
    ) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        size = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*size, 2)), shape=size)
        actions: dict[str, Any] = {"action": Bounded(-1, 9, (*size, 1))}
        if arm:
            actions["arm"] = Composite(action=Bounded(-1, 9, (*size, 1)), shape=size)
        self.action_spec = Composite(actions, shape=size)
        self.reward_spec = Unbounded((*size, 1))
        names = ("done", "terminated", "truncated") if truncated else ("done", "terminated")
        self.done_spec = Composite({name: _flag(*size, 1) for name in names}, shape=size)
        self.cut, self.arm = truncated, arm
        self.limits = length + torch.arange(size.numel()).view(*size, 1)
        self.count = torch.zeros(*size, 1)
        self.episode = torch.full((*size, 1), -1.0)

    def _observed(self) -> dict[str, Any]:
        return {"observation": torch.cat([self.episode, self.count], -1)}

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        where = None if tensordict is None else tensordict.get("_reset", None)
        where = torch.ones_like(self.count, dtype=torch.bool) if where is None else where.view_as(self.count)
        self.count = self.count.masked_fill(where, 0)
        self.episode = self.episode + where
        return TensorDict(self._observed(), self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        ended = self.count >= self.limits
        reward = tensordict["action"] + (10 * tensordict["arm", "action"] if self.arm else 0)
        flags = {"truncated": ended, "terminated": torch.zeros_like(ended), "done": ended}
        ends = flags if self.cut else {"terminated": ended, "done": ended}
        return TensorDict(self._observed() | {"reward": reward} | ends, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        pass


class Growing(Steps):
    """Observes as many numbers as there are steps, and one more."""

    def __init__(self, length: int = 4) -> None:
        super().__init__((), length)
        self.observation_spec = Composite(observation=Unbounded((-1,)))

    def _observed(self) -> dict[str, Any]:
        return {"observation": self.count.expand(int(self.count) + 1).clone()}


class Speaking(Steps):
    """Observes also a text."""

    def __init__(self, batch_size: tuple[int, ...] = (), length: int = 4) -> None:
        super().__init__(batch_size, length)
        self.observation_spec["text"] = NonTensor(batch_size, example_data="step 0")

    def _observed(self) -> dict[str, Any]:
        text = NonTensorData(f"step {int(self.count.flatten()[0])}", batch_size=self.batch_size)
        return super()._observed() | {"text": text}


class Masked(Steps):
    """Observes also a mask, ``("rules", "mask")``, of the one action of three that it takes next."""

    def __init__(self, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size)
        size = self.batch_size
        self.observation_spec["rules"] = Composite(mask=_flag(*size, 3), shape=size)

    def _observed(self) -> dict[str, Any]:
        mask = self.count % 3 == torch.arange(3)
        return super()._observed() | {"rules": TensorDict({"mask": mask}, self.batch_size)}

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Choose the allowed action, and change the input."""
        assert tensordict is not None
        action = tensordict.pop(("rules", "mask")).float().argmax(-1, keepdim=True)
        return tensordict.set("action", action.float())


class Team(EnvBase):  # type: ignore[misc]
    """Three agents, whose fields are below ``agents``. Agent ``i`` ends ``i`` steps before ``length``.

    Args:
        batch_size: teams that step together.
        length: steps of the first agent.
        together: whether there is a ``done`` at the root, true when the first agent ends.
        truncated: whether there are ``truncated`` keys, always false.
    """

    def __init__(
        self,
        batch_size: tuple[int, ...] = (),
        length: int = 5,
        together: bool = True,
        truncated: bool = False,
    ) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        size, each = self.batch_size, torch.Size([*batch_size, AGENTS])

        def nested(**specs: Any) -> Any:
            return Composite(agents=Composite(specs, shape=each), shape=size)

        self.observation_spec = nested(observation=Unbounded((*each, 2)))
        self.action_spec = nested(action=Bounded(-1, 9, (*each, 1)))
        self.reward_spec = nested(reward=Unbounded((*each, 1)))
        names = ("done", "terminated", "truncated") if truncated else ("done", "terminated")
        done = nested(**{name: _flag(*each, 1) for name in names})
        if together:
            done.update(Composite({name: _flag(*size, 1) for name in names}, shape=size))
        self.done_spec = done
        self.names, self.together = names, together
        self.limits = (length - torch.arange(AGENTS)).view(AGENTS, 1)
        self.count = torch.zeros(*each, 1)
        self.episode = torch.full((*each, 1), -1.0)

    def _nested(self, **fields: Any) -> TensorDictBase:
        observation = torch.cat([self.episode, self.count], -1)
        inner = TensorDict({"observation": observation, **fields}, self.count.shape[:-1])
        return TensorDict({"agents": inner}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        where = None
        if tensordict is not None:
            key: Any = "_reset" if self.together else ("agents", "_reset")
            where = tensordict.get(key, None)
        if where is None:
            where = torch.ones_like(self.count, dtype=torch.bool)
        elif self.together:
            where = where.unsqueeze(-2).expand_as(self.count)
        self.count = self.count.masked_fill(where, 0)
        self.episode = self.episode + where
        return self._nested()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        ended = self.count >= self.limits
        flags = {"done": ended, "terminated": ended, "truncated": torch.zeros_like(ended)}
        flags = {name: flags[name] for name in self.names}
        found = self._nested(reward=tensordict["agents", "action"] * 2, **flags)
        if self.together:
            found.update({name: flag[..., 0, :] for name, flag in flags.items()})
        return found

    def _set_seed(self, seed: int | None) -> None:
        pass


def act(observation: torch.Tensor) -> torch.Tensor:
    """The action: the sum of what is observed, at most 9."""
    return observation.sum(-1, keepdim=True) % 10


def make_policy(*prefix: str, arm: bool = False) -> Any:
    """A policy without weights, whose fields are below ``prefix``."""

    def both(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return act(observation), act(observation) / 2

    keys = [(*prefix, name) if prefix else name for name in ("observation", "action")]
    outs = [keys[1], ("arm", "action")] if arm else keys[1:]
    return TensorDictModule(both if arm else act, in_keys=keys[:1], out_keys=outs)
