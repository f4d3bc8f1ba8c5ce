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
from collections.abc import Sequence
from typing import Annotated, Any

import anyio
import ray
import torch
import typer
from async_cartpole import EVALUATE_EVERY, LEARNING_RATE, Rollout, evaluate, learn, make_policy, rollouts
from torch import nn

from aiosync import RayWeightSyncScheme
from aiosync.ray import WeightActorMixin


class Roller(WeightActorMixin):
    """Plays; the mixin makes it a worker when the sender connects."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = make_policy()
        self._rollouts = rollouts(self.pinned, self.policy, seed)

    async def rollout(self) -> Rollout:
        """The next one; new weights land between its steps."""
        return await anext(self._rollouts)


async def train(actors: Sequence[Any], policy: nn.ModuleDict, updates: int, seed: int) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, actors=actors)
    async with scheme:  # makes workers of the actors and hands them version 0
        playing = [actor.rollout.remote() for actor in actors]
        for _ in range(updates):
            batch: list[Rollout] = await asyncio.gather(*playing)
            playing = [actor.rollout.remote() for actor in actors]  # one ahead
            await anyio.to_thread.run_sync(learn, policy, optimizer, batch)
            begun = time.perf_counter()
            report = await scheme.send(policy)
            took = 1e3 * (time.perf_counter() - begun)
            if report.version % EVALUATE_EVERY == 0 or report.version == updates:
                score = await anyio.to_thread.run_sync(evaluate, policy, seed)
                acted = sorted({int(version) for rollout in batch for version in rollout["version"].flat})
                print(
                    f"version {report.version}: return {score:.1f}, sent in {took:.1f} ms; "
                    f"the last batch was acted with versions {acted[0]} to {acted[-1]}"
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
