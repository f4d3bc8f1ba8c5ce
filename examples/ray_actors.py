"""CartPole with PPO on Ray: async actors that play, an asyncio driver that trains.

Run it with ``python examples/ray_actors.py``; on a cluster, with ``--address auto``. Each actor receives
new weights on its own event loop while it plays, and every step carries the version that acted. The
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
    """Plays; the mixin makes it a worker when the sender connects."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = make_policy()
        self._rollouts = self._play(seed)

    async def rollout(self) -> TensorDictBase:
        """The next one, of shape ``(envs, steps)``; new weights land between its steps."""
        return await anext(self._rollouts)

    async def _play(self, seed: int) -> AsyncIterator[TensorDictBase]:
        envs = make_envs()
        observed = torch.from_numpy(envs.reset(seed=seed)[0])
        live = torch.ones(ENVS, dtype=torch.bool)
        while True:
            steps = []
            for _ in range(STEPS):
                step = TensorDict({"observation": observed, ("collector", "mask"): live}, [ENVS])
                async with self.pinned() as version:  # no new weights land inside
                    with torch.no_grad():
                        self.policy(step)
                step["policy_version"] = torch.full([ENVS], version)
                found = map(torch.from_numpy, envs.step(step["action"].numpy())[:4])
                observed, reward, terminated, truncated = (value.clone() for value in found)
                done = terminated | truncated
                after = {"observation": observed, "reward": reward.float(), "done": done}
                step["next"] = TensorDict(after | {"terminated": terminated}, [ENVS])
                steps.append(step)
                live = ~done  # a finished environment spends its next step on the reset
                await asyncio.sleep(0)  # the receiver task's turn: new weights land here
            yield torch.stack(steps, 1)


async def train(actors: Sequence[Any], policy: TensorDictModule, updates: int, seed: int) -> None:
    """One update from a rollout of each actor, and the next."""
    critic = mlp(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, actors=actors)
    async with scheme:  # makes workers of the actors and hands them version 0
        playing = [actor.rollout.remote() for actor in actors]
        for _ in range(updates):
            batches: list[TensorDictBase] = await asyncio.gather(*playing)
            playing = [actor.rollout.remote() for actor in actors]  # one ahead
            await anyio.to_thread.run_sync(learn, policy, critic, optimizer, batches)
            begun = time.perf_counter()
            report = await scheme.send(policy)
            took = 1e3 * (time.perf_counter() - begun)
            if report.version % EVALUATE_EVERY == 0 or report.version == updates:
                score = await anyio.to_thread.run_sync(evaluate, policy, seed)
                acted = torch.cat([batch["policy_version"].view(-1) for batch in batches])
                print(
                    f"version {report.version}: return {score:.1f}, sent in {took:.1f} ms; "
                    f"the last batch was acted with versions {int(acted.min())} to {int(acted.max())}"
                )


def main(
    workers: Annotated[int, typer.Option(min=1, help="Actors.")] = 2,
    updates: Annotated[int, typer.Option(min=1, help="Stop after so many updates.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the policy and the environments.")] = 0,
    address: Annotated[str | None, typer.Option(help="A running cluster's; else one is started.")] = None,
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
