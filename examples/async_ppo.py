"""PPO on CartPole with a collector, with synchronous or asynchronous batches, over several seeds.

    python examples/async_ppo.py --mode sync --seeds 5
    python examples/async_ppo.py --mode async --seeds 5

With ``--mode sync`` no worker steps while the trainer learns, and each batch was collected with the newest
version. With ``--mode async`` the workers continue, at most one version behind. Each seed runs until its mean
return is 450. The learning curves are drawn. The reinforcement learning is that of `async_cartpole`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import anyio
import torch
import typer
from async_cartpole import ENVS, LEARNING_RATE, STEPS, evaluate, learn, make_envs, make_policy, mlp
from matplotlib.figure import Figure

from aiosync.collectors import MultiCollector

EVALUATE_EVERY, ENOUGH = 5, 450.0

Curve = list[tuple[int, float]]
"""Frames so far, and the mean return of 20 episodes."""


async def train(mode: str, workers: int, seed: int, updates: int) -> Curve:
    """Learn with one seed until the mean return is reached."""
    torch.manual_seed(seed)
    policy, critic = make_policy(), mlp(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    collector = MultiCollector(
        [make_envs] * workers,
        policy,
        sync=mode == "sync",
        frames_per_batch=ENVS * STEPS * (workers if mode == "sync" else 1),
        total_frames=ENVS * STEPS * workers * updates,
        cat_results=0 if mode == "sync" else None,
        max_staleness=None if mode == "sync" else 1,
        on_stale="drop" if mode == "sync" else "wait",
    )
    curve: Curve = []
    async with collector:
        await collector.set_seed(1000 * seed)
        async for batch in collector:
            await anyio.to_thread.run_sync(learn, policy, critic, optimizer, [batch])
            await collector.update_policy_weights_()
            if collector.policy_version % (EVALUATE_EVERY * (1 if mode == "sync" else workers)) == 0:
                curve.append((collector.frames, await anyio.to_thread.run_sync(evaluate, policy, seed)))
                if curve[-1][1] >= ENOUGH:
                    break
    return curve


def draw(curves: list[Curve], title: str, out: Path) -> None:
    """Draw the learning curve of each seed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for seed, curve in enumerate(curves):
        frames, returns = zip(*curve, strict=True)
        axes.plot(frames, returns, ".-", label=f"seed {seed}")
    axes.axhline(ENOUGH, color="0.4", ls="--", lw=0.9)
    axes.set(title=title, xlabel="frames", ylabel="mean return of 20 episodes", ylim=(0, 520))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out, dpi=130)


def main(
    mode: Annotated[Literal["sync", "async"], typer.Option(help="Kind of batches.")] = "async",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    updates: Annotated[int, typer.Option(min=1, help="Batches of all workers, at most.")] = 400,
    out: Annotated[Path | None, typer.Option(help="File of the picture.  [async_ppo_MODE.png]")] = None,
) -> None:
    """Learn CartPole with several seeds; print a line per seed and draw a picture."""
    torch.set_num_threads(1)
    curves = []
    for seed in range(seeds):
        curves.append(asyncio.run(train(mode, workers, seed, updates)))
        frames, score = curves[-1][-1] if curves[-1] else (0, 0.0)
        print(f"seed {seed}: return {score:.1f} after {frames} frames", flush=True)
    solved = sum(bool(curve) and curve[-1][1] >= ENOUGH for curve in curves)
    print(f"{solved} of {seeds} seeds came to {ENOUGH:.0f}")
    out = out or Path(f"async_ppo_{mode}.png")
    if all(curves):
        draw(curves, f"PPO on CartPole, {mode} batches, {workers} workers", out)
        print(f"The picture is in {out}")


if __name__ == "__main__":
    typer.run(main)
