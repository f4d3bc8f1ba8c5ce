"""The worker's half of a manual run; see tcp_trainer.py."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated

import torch
import typer
from tcp_trainer import make_policy

import aiosync


async def act(scheme: aiosync.TCPWeightSyncScheme) -> None:
    policy = make_policy()
    scheme.init_on_receiver(model_id="policy", model=policy)  # no worker_idx: the trainer assigns one
    async with scheme, scheme.receiving():
        print(f"worker {scheme.worker_idx}")
        seen = -1
        while scheme.ended is None:
            async with scheme.pinned() as version:
                action = policy(torch.ones(4))
            if version != seen:
                print(f"acting with version {version}: {action.tolist()}")
                seen = version
            await asyncio.sleep(0.05)  # stands for a step of the environment
        print(f"ended at version {scheme.version}: {scheme.ended}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    address: Annotated[str, typer.Option(help="Address of the trainer.")] = "tcp://127.0.0.1:5555",
    timeout: Annotated[float, typer.Option(help="Timeout of each call, in seconds.")] = 120.0,
    reconnect_for: Annotated[float, typer.Option(min=1, help="Seconds to look for a lost trainer.")] = 60.0,
) -> None:
    """Act with the newest version, until no trainer can be found for ``reconnect_for`` seconds."""
    logging.basicConfig(level=logging.WARNING)
    try:
        token = os.environ.get("AIOSYNC_TOKEN")
        scheme = aiosync.TCPWeightSyncScheme(
            address,
            token=token,
            timeout=timeout,
            on_sender_close="wait",  # follow a trainer that is started again
            reconnect_for=reconnect_for,
        )
        asyncio.run(act(scheme))
    except aiosync.AiosyncError as error:
        raise SystemExit(f"tcp_worker: {error}") from None


if __name__ == "__main__":
    app()
