"""The trainer's half of a manual run: workers connect and disconnect at any time, from any machine.

In one terminal::

    export AIOSYNC_TOKEN=$(python -c "import secrets; print(secrets.token_hex(16))")
    python examples/tcp_trainer.py --address tcp://127.0.0.1:5555

and in any number of others, with the same token::

    python examples/tcp_worker.py --address tcp://127.0.0.1:5555

Kill a worker, start another one, stop the trainer and start it again: each process prints what it sees.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated

import torch
import typer
from torch import nn

import aiosync


def make_policy() -> nn.Module:
    """Return the model of trainer and workers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


async def train(scheme: aiosync.TCPWeightSyncScheme, policy: nn.Module, updates: int, pause: float) -> None:
    scheme.init_on_sender(model_id="policy", model=policy)  # no num_workers: any number may connect
    scheme.on_event(lambda event: print(f"{event.kind} {event.worker}") if event.kind in PRINTED else None)
    print(f"listening at {scheme.address}; waiting for the first worker")
    async with scheme:
        for _ in range(updates):
            await asyncio.sleep(pause)  # stands for a rollout and a step of the optimizer
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            report = await scheme.send(policy)
            connected = {worker: state.peer for worker, state in scheme.workers.items()}
            print(f"version {report.version} in {1e3 * report.seconds['total']:.1f} ms to {connected}")


PRINTED = ("joined", "lost", "failed", "dropped")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    address: Annotated[str, typer.Option(help="tcp://host:port or unix:///path")] = "tcp://127.0.0.1:5555",
    updates: Annotated[int, typer.Option(min=1)] = 1000,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between two updates.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Timeout of each call, in seconds.")] = 120.0,
) -> None:
    """Send a new version at regular intervals to all connected workers."""
    logging.basicConfig(level=logging.WARNING)
    try:
        scheme = aiosync.TCPWeightSyncScheme(
            address,
            token=os.environ.get("AIOSYNC_TOKEN"),
            codec="delta",
            cast=torch.bfloat16,
            on_failure="drop",  # a lost worker is no error: it may connect again
            timeout=timeout,
        )
        asyncio.run(train(scheme, make_policy(), updates, pause))
    except aiosync.AiosyncError as error:
        raise SystemExit(f"tcp_trainer: {error}") from None


if __name__ == "__main__":
    app()
