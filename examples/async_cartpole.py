"""CartPole with PPO: an asyncio trainer, workers that play, and weights that follow by `await`.

Run it with ``aiosync demo`` or ``python examples/async_cartpole.py``. `train` is the trainer,
`play` a worker, `learn` the reinforcement learning (PPO: Schulman et al. 2017, with the advantage
estimate of Schulman et al. 2015). Bars, tables and process bookkeeping are in `aiosync._demo`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import gymnasium
import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import nn
from torch.distributions import Categorical

from aiosync import WeightSyncScheme, WorkerLostError
from aiosync._demo import DemoReport, member_of, worker_processes

ENVS, STEPS = 8, 64  # a rollout is 8 environments played side by side for 64 steps
EPOCHS, MINIBATCH, LEARNING_RATE = 4, 128, 3e-4
GAMMA, LAMBDA, CLIP = 0.98, 0.9, 0.2
EVALUATE_EVERY, EPISODES, SOLVED = 10, 20, 475.0
SPAWN = multiprocessing.get_context("spawn")

Backend = Literal["shared", "process", "tcp", "distributed", "rpc", "ray"]
Rollout = dict[str, NDArray[Any]]  # each array is [STEPS, ENVS, ...]
Pinned = Callable[[], contextlib.AbstractAsyncContextManager[int]]


def make_policy() -> nn.ModuleDict:
    """An actor (4 observations to 2 logits) and a critic (4 observations to a value)."""

    def mlp(outputs: int) -> nn.Sequential:
        hidden = (nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(64, outputs))

    return nn.ModuleDict({"actor": mlp(2), "critic": mlp(1)})


# ---- a worker: plays with the weights it has, while newer ones arrive beside it ------------------


async def rollouts(pinned: Pinned, policy: nn.ModuleDict, seed: int) -> AsyncIterator[Rollout]:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=ENVS)
    obs, _ = envs.reset(seed=seed)
    live, score = np.ones(ENVS, bool), np.zeros(ENVS, np.float32)
    while True:
        steps = []
        for _ in range(STEPS):
            async with pinned() as version:  # no new weights land inside
                with torch.no_grad():
                    choice = Categorical(logits=policy["actor"](torch.from_numpy(obs)))
                    action = choice.sample()
            step = {"obs": obs, "action": action.numpy(), "live": live}
            step["log_prob"] = choice.log_prob(action).numpy()
            obs, reward, terminated, truncated, _ = envs.step(step["action"])
            done, score = terminated | truncated, score + reward
            step |= {"next_obs": obs, "reward": reward, "terminated": terminated, "done": done}
            steps.append(step | {"score": score, "version": np.full(ENVS, version)})
            # A finished environment spends its next step on the reset: that step is not "live".
            live, score = ~done, score * ~done
            await asyncio.sleep(0)  # the receiver task's turn: new weights land here
        yield {key: np.stack([step[key] for step in steps]) for key in steps[0]}


async def play(scheme: WeightSyncScheme, seed: int, worker: int, trainer: Connection) -> None:
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    async with scheme, scheme.receiving():  # a task beside this one takes the new weights in
        with contextlib.suppress(EOFError, ConnectionError):  # the trainer hung up: done
            async for rollout in rollouts(scheme.pinned, policy, seed):
                trainer.send(rollout)
                await anyio.wait_readable(trainer)
                trainer.recv()  # it took one; so this worker is never more than one ahead


def worker_main(scheme: WeightSyncScheme, seed: int, worker: int, trainer: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed + worker)
    with member_of(scheme, 1 + worker), contextlib.suppress(WorkerLostError):  # the trainer was killed
        asyncio.run(play(scheme, seed + worker, worker, trainer))


# ---- the trainer ---------------------------------------------------------------------------------


async def train(scheme: WeightSyncScheme, report: DemoReport, workers: int, seed: int) -> None:
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=workers, ctx=SPAWN)
    started = worker_processes(SPAWN, worker_main, workers, scheme, 1000 * seed)
    # Entering the scheme waits for the workers and hands them version 0.
    async with started as pipes, scheme, report.running():
        while report.evaluated < SOLVED and report.time_left():
            batch: list[Rollout] = []
            for worker, pipe in enumerate(pipes):
                await anyio.wait_readable(pipe)
                batch.append(pipe.recv())
                pipe.send("play on")
                report.rollout(worker, batch[-1], scheme.version)
            # In a thread, so that this loop stays free for everything else.
            await anyio.to_thread.run_sync(learn, policy, optimizer, batch)
            begun = time.perf_counter()
            sent = await scheme.send(policy)  # back when every worker has applied it
            report.update(sent.version, time.perf_counter() - begun)
            if sent.version % EVALUATE_EVERY == 0:
                report.evaluation(await anyio.to_thread.run_sync(evaluate, policy, seed))


def learn(policy: nn.ModuleDict, optimizer: torch.optim.Optimizer, batch: list[Rollout]) -> None:
    data = {k: torch.from_numpy(np.concatenate([r[k] for r in batch], 1)) for k in batch[0]}
    with torch.no_grad():
        value, after = (policy["critic"](data[k]).squeeze(-1) for k in ("obs", "next_obs"))
    advantage = data["reward"] + GAMMA * after * ~data["terminated"] - value
    for t in reversed(range(STEPS - 1)):
        advantage[t] += GAMMA * LAMBDA * advantage[t + 1] * ~data["done"][t]
    data |= {"advantage": advantage, "target": advantage + value}
    data = {k: x[data["live"]] for k, x in data.items()}
    data["advantage"] = (data["advantage"] - data["advantage"].mean()) / data["advantage"].std()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data["obs"])).split(MINIBATCH):
            obs, action, old, gain, target = (
                data[k][rows] for k in ("obs", "action", "log_prob", "advantage", "target")
            )
            ratio = (Categorical(logits=policy["actor"](obs)).log_prob(action) - old).exp()
            surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            error = policy["critic"](obs).squeeze(-1) - target
            optimizer.zero_grad()
            (error.square().mean() / 2 - surrogate.mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def evaluate(policy: nn.ModuleDict, seed: int) -> float:
    """The mean return of EPISODES fresh episodes, played as the workers play."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES)
    obs, _ = envs.reset(seed=seed)
    score, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while running.any():
        with torch.no_grad():
            action = Categorical(logits=policy["actor"](torch.from_numpy(obs))).sample()
        obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        score, running = score + reward * running, running & ~(terminated | truncated)
    return float(score.mean())


def main(
    scheme: Annotated[Backend, typer.Option(help="What moves the weights.")] = "shared",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the policy and the environments.")] = 0,
    updates: Annotated[int, typer.Option(min=1, help="Stop after so many updates.")] = 1000,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after so many minutes.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("async_cartpole.png"),
) -> None:
    """Learn CartPole with an asyncio trainer and worker processes; a table and a picture."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    recipe = WeightSyncScheme.from_backend(scheme)
    with DemoReport(f"CartPole ({scheme})", workers, updates, 60 * minutes, out) as report:
        with member_of(recipe, 0):
            asyncio.run(train(recipe, report, workers, seed))


if __name__ == "__main__":
    typer.run(main)
