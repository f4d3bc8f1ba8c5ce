"""A policy behind HTTP, whose weights come from a trainer while it serves.

Run it with ``python examples/serve_policy.py --trainer tcp://127.0.0.1:5555`` and a trainer, as
``examples/serve_trainer.py``, beside it. The trainer may be stopped and started again under load.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated

import torch
import typer
import uvicorn
from fastapi import FastAPI
from torch import nn

from aiosync import TCPWeightSyncScheme
from aiosync.integrations.asgi import ServedPolicy

OBSERVED, ACTIONS = 8, 4


def make_policy(width: int = 64) -> nn.Sequential:
    """Return the policy: a network with one hidden layer."""
    return nn.Sequential(nn.Linear(OBSERVED, width), nn.Tanh(), nn.Linear(width, ACTIONS))


def make_app(trainer: str, token: str, width: int = 64) -> FastAPI:
    """Return the web application. ``trainer``: its address, such as ``tcp://trainer:5555``."""
    policy = make_policy(width)
    scheme = TCPWeightSyncScheme(trainer, token=token, on_sender_close="wait", reconnect_for=86400.0)
    served = ServedPolicy(scheme, policy, max_age=600.0, lost_for=60.0, drain=3.0)
    app = FastAPI(lifespan=served.lifespan)
    app.add_middleware(served.middleware)

    @app.post("/act")
    async def act(observation: list[float]) -> dict[str, int]:
        """On the event loop: the forward pass takes a fraction of a millisecond."""
        with torch.no_grad():
            return {"action": int(policy(torch.tensor(observation)).argmax())}

    @app.post("/act-in-thread")
    def act_in_thread(observation: list[float]) -> dict[str, int]:
        """In a thread of the server: for forward passes that take longer."""
        with torch.no_grad():
            return {"action": int(policy(torch.tensor(observation)).argmax())}

    return app


class _Server(uvicorn.Server):
    """Prints where it serves."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for sock in server.sockets:
                print("serving at http://{}:{}".format(*sock.getsockname()), flush=True)


def main(
    trainer: Annotated[str, typer.Option(help="The trainer's address.")] = "tcp://127.0.0.1:5555",
    host: Annotated[str, typer.Option(help="Address to serve at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve at; 0: a free one.")] = 8000,
    width: Annotated[int, typer.Option(min=1, help="Units of the policy's hidden layer.")] = 64,
) -> None:
    """Serve the policy until SIGTERM or Ctrl-C. The token is in AIOSYNC_TOKEN."""
    torch.set_num_threads(1)
    app = make_app(trainer, os.environ["AIOSYNC_TOKEN"], width)
    _Server(uvicorn.Config(app, host=host, port=port, log_level="warning")).run()


if __name__ == "__main__":
    typer.run(main)
