"""CartPole with PPO: an asyncio trainer, and a collector whose workers roll out the policy.

Run it with ``aiosync demo`` or ``python examples/async_cartpole.py``. `SampledPolicy` is what the workers
roll out, `train` the trainer, `learn` the reinforcement learning (PPO: Schulman et al. 2017, with the
advantage estimate of Schulman et al. 2015). Bars, tables and pictures are in `aiosync._demo`.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import gymnasium
import numpy as np
import torch
import typer
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from aiosync import RayWeightSyncScheme, WeightSyncScheme
from aiosync._demo import DemoReport, joined, member_of
from aiosync.collectors import MultiCollector

ENVS, STEPS = 8, 64  # a batch is 8 environments side by side, for 64 steps
EPOCHS, MINIBATCH, LEARNING_RATE = 4, 128, 3e-4
GAMMA, LAMBDA, CLIP = 0.98, 0.9, 0.2
EVALUATE_EVERY, EPISODES, SOLVED = 10, 20, 475.0

Backend = Literal["shared", "process", "tcp", "distributed", "rpc", "ray"]


def mlp(outputs: int) -> nn.Sequential:
    """Return a small network for CartPole's 4 observations."""
    hidden = (nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


class SampledPolicy(nn.Module):
    """The policy: a sampled action and its log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = mlp(2)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Map observations of shape ``(envs, 4)`` to actions and log-probabilities of shape ``(envs,)``."""
        choice = Categorical(logits=self.logits(observation))
        action = choice.sample()
        return action, choice.log_prob(action)


def make_policy() -> TensorDictModule:
    """Return the policy with the names that its tensors have in a batch."""
    return TensorDictModule(SampledPolicy(), in_keys=["observation"], out_keys=["action", "log_prob"])


def make_envs() -> Any:
    """Return the environments of one worker. The step after the end of an episode only resets the
    environment; the batch's mask is false there."""
    return gymnasium.make_vec("CartPole-v1", num_envs=ENVS)


# ---- the trainer ---------------------------------------------------------------------------------


async def train(scheme: WeightSyncScheme, report: DemoReport, workers: int, seed: int) -> None:
    policy, critic = make_policy(), mlp(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    collector = MultiCollector(
        [partial(joined, make_envs, scheme, worker) for worker in range(workers)],
        policy,
        sync=False,  # workers continue while the trainer learns
        frames_per_batch=ENVS * STEPS,
        weight_sync_schemes={"policy": scheme},
        launcher="ray" if isinstance(scheme, RayWeightSyncScheme) else "process",
    )
    async with collector, report.running():
        await collector.set_seed(1000 * seed)
        while report.evaluated < SOLVED and report.time_left():
            batches: list[TensorDictBase] = []
            async for batch in collector:
                report.batch(batch, collector.policy_version)
                batches.append(batch)
                if len(batches) == workers:
                    break
            # In a thread: the event loop stays free.
            await anyio.to_thread.run_sync(learn, policy, critic, optimizer, batches)
            begun = time.perf_counter()
            await collector.update_policy_weights_()  # returns when every worker has applied the version
            report.update(collector.policy_version, time.perf_counter() - begun)
            if collector.policy_version % EVALUATE_EVERY == 0:
                report.evaluation(await anyio.to_thread.run_sync(evaluate, policy, seed))


def learn(
    policy: TensorDictModule,
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[TensorDictBase],
) -> None:
    """Update policy and critic once, from batches of shape ``(envs, steps)``."""
    batch: Any = torch.cat(batches, 0)
    after, live = batch["next"], batch["collector", "mask"]
    reward, done, over = (after[key].view(live.shape) for key in ("reward", "done", "terminated"))
    with torch.no_grad():
        value, next_value = (critic(data["observation"]).squeeze(-1) for data in (batch, after))
    advantage = reward + GAMMA * next_value * ~over - value
    for t in reversed(range(batch.shape[1] - 1)):
        advantage[:, t] += GAMMA * LAMBDA * advantage[:, t + 1] * ~done[:, t]
    target = (advantage + value)[live]
    advantage = advantage[live]
    advantage = (advantage - advantage.mean()) / advantage.std()
    observation, action, old = (batch[key][live] for key in ("observation", "action", "log_prob"))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(target)).split(MINIBATCH):
            choice = Categorical(logits=policy.module.logits(observation[rows]))
            ratio = (choice.log_prob(action[rows]) - old[rows]).exp()
            gain = advantage[rows]
            surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            error = critic(observation[rows]).squeeze(-1) - target[rows]
            optimizer.zero_grad()
            (error.square().mean() / 2 - surrogate.mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            optimizer.step()


def evaluate(policy: TensorDictModule, seed: int) -> float:
    """Return the mean return of EPISODES new episodes, with sampled actions as in the workers."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES)
    obs, _ = envs.reset(seed=seed)
    score, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while running.any():
        with torch.no_grad():
            action, _ = policy.module(torch.from_numpy(obs))
        obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        score, running = score + reward * running, running & ~(terminated | truncated)
    return float(score.mean())


def main(
    scheme: Annotated[Backend, typer.Option(help="What moves the weights.")] = "shared",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the policy and the environments.")] = 0,
    updates: Annotated[int, typer.Option(min=1, help="Stop after this many updates.")] = 1000,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after this many minutes.")] = 5.0,
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("async_cartpole.png"),
) -> None:
    """Learn CartPole with an asyncio trainer and worker processes; print a table and draw a picture."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    recipe = WeightSyncScheme.from_backend(scheme)
    with DemoReport(f"CartPole ({scheme})", workers, updates, 60 * minutes, out) as report:
        with member_of(recipe, 0):
            asyncio.run(train(recipe, report, workers, seed))


if __name__ == "__main__":
    typer.run(main)
