"""The worker's half; see tcp_trainer.py."""

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
    scheme.init_on_receiver(model_id="policy", model=policy)  # no worker_idx: the trainer gives one
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
        print(f"the end, at version {scheme.version}: {scheme.ended}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    address: Annotated[str, typer.Option(help="the trainer's")] = "tcp://127.0.0.1:5555",
    timeout: Annotated[float, typer.Option(help="Seconds that one step may take.")] = 120.0,
    reconnect_for: Annotated[
        float, typer.Option(min=1, help="Seconds to look for a trainer that is gone.")
    ] = 60.0,
) -> None:
    """Act with whatever version is the newest, until no trainer has been there for a while."""
    logging.basicConfig(level=logging.WARNING)
    try:
        token = os.environ.get("AIOSYNC_TOKEN")
        scheme = aiosync.TCPWeightSyncScheme(
            address,
            token=token,
            timeout=timeout,
            on_sender_close="wait",  # a trainer that is started again is followed
            reconnect_for=reconnect_for,
        )
        asyncio.run(act(scheme))
    except aiosync.AiosyncError as error:
        raise SystemExit(f"tcp_worker: {error}") from None


if __name__ == "__main__":
    app()
