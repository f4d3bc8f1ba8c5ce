"""The trainer of ``examples/serve_policy.py``. After a restart it goes on from its checkpoint."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from serve_policy import make_policy
from torch import nn

from aiosync import TCPWeightSyncScheme


def save(state: dict[str, Any], checkpoint: Path) -> None:
    """Write the checkpoint in one step: whoever reads it finds the old one or the new one."""
    unfinished = checkpoint.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(checkpoint)


async def train(
    policy: nn.Module, scheme: TCPWeightSyncScheme, checkpoint: Path, every: float, updates: int
) -> None:
    """Send an update each ``every`` seconds, and keep the weights and the version in the checkpoint."""
    scheme.init_on_sender(model_id="policy", model=policy)
    async with scheme:  # each server that connects gets the newest version
        print(f"listening at {scheme.address}", flush=True)
        for _ in range(updates):
            await asyncio.sleep(every)  # stands for a step of the optimizer
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.001 * torch.randn_like(parameter))
            await scheme.send()
            save({"policy": policy.state_dict(), "scheme": scheme.state_dict()}, checkpoint)


def main(
    listen: Annotated[str, typer.Option(help="Where servers connect.")] = "tcp://127.0.0.1:5555",
    checkpoint: Annotated[Path, typer.Option(help="File of the weights and the version.")] = Path(
        "policy.pt"
    ),
    every: Annotated[float, typer.Option(min=0, help="Seconds between updates.")] = 1.0,
    updates: Annotated[int, typer.Option(min=1, help="Stop after this many.")] = 1_000_000,
    width: Annotated[int, typer.Option(min=1, help="Units of the policy's hidden layer.")] = 64,
) -> None:
    """Train for ever, or until SIGTERM or Ctrl-C. The token is in AIOSYNC_TOKEN."""
    token, policy = os.environ["AIOSYNC_TOKEN"], make_policy(width)
    scheme = TCPWeightSyncScheme(listen, token=token, min_workers=0, on_failure="drop")
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        policy.load_state_dict(saved["policy"])
        scheme.load_state_dict(saved["scheme"])  # versions go on from there
    asyncio.run(train(policy, scheme, checkpoint, every, updates))


if __name__ == "__main__":
    typer.run(main)
