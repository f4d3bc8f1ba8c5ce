"""CartPole with PPO on Ray: async actors that roll out the policy, and an asyncio driver that trains.

Run it with ``python examples/ray_actors.py``; on a cluster, with ``--address auto``. Each actor receives new
weights on its own event loop during its rollout, and every step is tagged with the version that acted. The
reinforcement learning is that of `async_cartpole`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import anyio
import ray
import torch
import typer
from async_cartpole import (
    ENVS,
    EVALUATE_EVERY,
    LEARNING_RATE,
    STEPS,
    evaluate,
    learn,
    make_envs,
    make_policy,
    mlp,
)
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from aiosync import RayWeightSyncScheme
from aiosync.ray import WeightActorMixin


class Roller(WeightActorMixin):
    """Rolls out the policy. The mixin makes the actor a worker when the sender connects."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = make_policy()
        self._rollouts = self._roll_out(seed)

    async def rollout(self) -> TensorDictBase:
        """Return the next rollout, of shape ``(envs, steps)``. Updates are applied between its steps."""
        return await anext(self._rollouts)

    async def _roll_out(self, seed: int) -> AsyncIterator[TensorDictBase]:
        envs = make_envs()
        observed = torch.from_numpy(envs.reset(seed=seed)[0])
        live = torch.ones(ENVS, dtype=torch.bool)
        while True:
            steps = []
            for _ in range(STEPS):
                step = TensorDict({"observation": observed, ("collector", "mask"): live}, [ENVS])
                async with self.pinned() as version:  # no update is applied inside
                    with torch.no_grad():
                        self.policy(step)
                step["policy_version"] = torch.full([ENVS], version)
                found = map(torch.from_numpy, envs.step(step["action"].numpy())[:4])
                observed, reward, terminated, truncated = (value.clone() for value in found)
                done = terminated | truncated
                after = {"observation": observed, "reward": reward.float(), "done": done}
                step["next"] = TensorDict(after | {"terminated": terminated}, [ENVS])
                steps.append(step)
                live = ~done  # the step after the end of an episode only resets the environment
                await asyncio.sleep(0)  # the receiver task runs: updates are applied here
            yield torch.stack(steps, 1)


async def train(actors: Sequence[Any], policy: TensorDictModule, updates: int, seed: int) -> None:
    """Learn from one rollout of each actor per update."""
    critic = mlp(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, actors=actors)
    async with scheme:  # makes the actors workers and sends them version 0
        rollouts = [actor.rollout.remote() for actor in actors]
        for _ in range(updates):
            batches: list[TensorDictBase] = await asyncio.gather(*rollouts)
            rollouts = [actor.rollout.remote() for actor in actors]  # the next ones run meanwhile
            await anyio.to_thread.run_sync(learn, policy, critic, optimizer, batches)
            begun = time.perf_counter()
            report = await scheme.send(policy)
            took = 1e3 * (time.perf_counter() - begun)
            if report.version % EVALUATE_EVERY == 0 or report.version == updates:
                score = await anyio.to_thread.run_sync(evaluate, policy, seed)
                acted = torch.cat([batch["policy_version"].view(-1) for batch in batches])
                print(
                    f"version {report.version}: return {score:.1f}, sent in {took:.1f} ms; "
                    f"versions {int(acted.min())} to {int(acted.max())} acted in the last batch"
                )


def main(
    workers: Annotated[int, typer.Option(min=1, help="Actors.")] = 2,
    updates: Annotated[int, typer.Option(min=1, help="Stop after this many updates.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the policy and the environments.")] = 0,
    address: Annotated[str | None, typer.Option(help="Of a running cluster; else one is started.")] = None,
) -> None:
    """Learn CartPole with an asyncio driver and Ray actors."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    here = os.pathsep.join(filter(None, sys.path))
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    actor = ray.remote(num_cpus=0)(Roller)
    actors = [actor.remote(1000 * seed + worker) for worker in range(workers)]
    asyncio.run(train(actors, make_policy(), updates, seed))
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
