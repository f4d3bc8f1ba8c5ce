"""DistributedDataParallel trainers and workers in one job, with updates beside the training::

    torchrun --standalone --nproc-per-node 4 examples/torchrun_trainer.py --trainers 2

The first ranks train together in their own process group; the others roll out the policy. Rank 0 sends every
version to the workers: on the same machine through shared memory, to other machines through process groups of
aiosync. ``--apart`` uses the process groups on the same machine too. The trainers' all-reduce is not
affected: their losses are bit-equal to those with ``--no-sync``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiosync


def make_policy() -> nn.Module:
    """Return the model of all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))


async def train(
    rank: int, trainers: list[int], workers: int, steps: int, *, sync: bool, share_memory: bool
) -> None:
    together = dist.new_group(trainers)
    policy = make_policy()
    model = DistributedDataParallel(policy, process_group=together)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheme = aiosync.DistributedWeightSyncScheme(timeout=60, share_memory=share_memory)
    sends = sync and rank == 0
    if sends:
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=workers)
        await scheme.connect()
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=generator)
        loss = (model(x) - x[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if sends:
            await scheme.send()  # returns when every worker has applied the version
    await scheme.aclose()
    if rank == 0:
        bits = hashlib.sha256(torch.tensor(losses, dtype=torch.float64).numpy().tobytes()).hexdigest()
        print(f"trained {steps} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}, losses' hash: {bits[:16]}")


async def work(worker: int) -> None:
    policy = make_policy()
    scheme = aiosync.DistributedWeightSyncScheme(timeout=60)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    seen = set()
    async with scheme, scheme.receiving():
        while scheme.ended is None:
            async with scheme.pinned() as version:
                policy(torch.randn(1, 16))  # stands for a step of the environment
            seen.add(version)
            await asyncio.sleep(0.001)
        print(f"worker {worker} has acted with {len(seen)} versions, the last is {scheme.version}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    trainers: Annotated[int, typer.Option(min=1, help="How many of the ranks train.")] = 1,
    steps: Annotated[int, typer.Option(min=1)] = 200,
    sync: Annotated[bool, typer.Option(help="Send the weights.")] = True,
    apart: Annotated[bool, typer.Option("--apart", help="Share no memory, as between machines.")] = False,
) -> None:
    """Train with some ranks of a torchrun job, roll out the policy with the others."""
    if "RANK" not in os.environ:
        raise typer.BadParameter("start this script with torchrun --standalone --nproc-per-node 3")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if trainers >= size:
        raise typer.BadParameter(f"--trainers {trainers} leaves no worker among {size} ranks")
    if rank < trainers:
        workers = size - trainers
        asyncio.run(train(rank, list(range(trainers)), workers, steps, sync=sync, share_memory=not apart))
    else:
        dist.new_group(list(range(trainers)))  # a collective call: every rank must make it
        if sync:
            asyncio.run(work(rank - trainers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
