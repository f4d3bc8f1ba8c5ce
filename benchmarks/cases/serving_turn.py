"""One turn of ``aiosync bench serving``: a server, a trainer and clients, in a process each."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvicorn
import uvloop
from torch import nn

TOKEN = "a token of the benchmarks"
_HEAD = b"POST /act HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n[]"


@dataclass(frozen=True)
class ServingTask:
    """What a turn does."""

    own: bool  # aiosync; else the trainer posts its weights, and the server loads them under a lock
    rate: float | None  # bytes per second that the server reads of updates at most
    updated: bool  # whether updates follow each other without a pause; else there is one
    seconds: float  # of requests that count
    mebibytes: int  # size of the policy
    clients: int  # that ask at a time


@dataclass(frozen=True)
class ServingTurn:
    """What a turn found."""

    p50: float  # seconds of a request
    p99: float
    requests: float  # per second
    updates: float  # per second


class Policy(nn.Module):
    """A small network that answers, and a table that makes it large."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        self.table = nn.ParameterList(torch.zeros(1 << 18) for _ in range(mebibytes))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(observation).argmax(-1)
        return out


# -- the server ------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Says at which port it serves."""

    def __init__(self, app: Any, conn: Connection[Any, Any]) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="error", loop="uvloop", lifespan="on"))
        self._conn = conn

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._conn.send(self.servers[0].sockets[0].getsockname()[1])


def _application(policy: Policy, lock: asyncio.Lock | None) -> Any:
    """A plain ASGI application: ``/act``, and ``/weights`` if it has a lock."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []
        while (message := await receive())["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        if scope["path"] == "/weights" and lock is not None:
            state = torch.load(io.BytesIO(b"".join(parts)), weights_only=True)
            async with lock:
                policy.load_state_dict(state)
            answer = b"{}"
        else:
            with torch.no_grad():
                if lock is None:
                    action = int(policy(torch.zeros(8)))
                else:
                    async with lock:
                        action = int(policy(torch.zeros(8)))
            answer = json.dumps({"action": action}).encode()
        head = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    return app


def _serve(task: ServingTask, address: str, conn: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    policy = Policy(task.mebibytes)
    if not task.own:

        async def alone(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                for kind in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{kind}.complete"})
            else:
                await locked(scope, receive, send)

        locked = _application(policy, asyncio.Lock())
        _Server(alone, conn).run()
        return
    from aiosync import TCPWeightSyncScheme
    from aiosync.integrations.asgi import ServedPolicy

    served = ServedPolicy(TCPWeightSyncScheme(address, token=TOKEN, max_receive_rate=task.rate), policy)
    inner = served.middleware(_application(policy, None))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await inner(scope, receive, send)
            return
        await receive()
        async with served.lifespan():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    _Server(app, conn).run()


# -- the trainer -----------------------------------------------------------------------------------


def _train(task: ServingTask, conn: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    uvloop.run(_send(task, conn) if task.own else _post(task, conn))


async def _send(task: ServingTask, conn: Connection[Any, Any]) -> None:
    from aiosync import TCPWeightSyncScheme

    policy = Policy(task.mebibytes)
    scheme = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN)
    scheme.init_on_sender(model_id="policy", model=policy)
    connecting = asyncio.create_task(scheme.connect(min_workers=1))
    await asyncio.sleep(0)
    conn.send(scheme.address)
    await connecting
    while True:
        if task.updated:
            await scheme.send()
            conn.send(True)
        else:
            await asyncio.sleep(1.0)


async def _post(task: ServingTask, conn: Connection[Any, Any]) -> None:
    policy = Policy(task.mebibytes)
    conn.send("")
    port = await asyncio.to_thread(conn.recv)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        if not task.updated:
            await asyncio.sleep(1.0)
            continue
        buffer = io.BytesIO()
        torch.save(policy.state_dict(), buffer)
        body = buffer.getbuffer()
        writer.write(f"POST /weights HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()
        await _answer(reader)
        conn.send(True)


async def _answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    assert head.startswith(b"HTTP/1.1 200"), head


# -- the clients -----------------------------------------------------------------------------------


async def _ask(port: int, task: ServingTask) -> list[float]:
    """Ask until the time is over; return the seconds of each request after the first second."""
    now = time.perf_counter  # uvloop's clock has a resolution of milliseconds
    begun = now()
    took: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (at := now()) < begun + 1.0 + task.seconds:
            writer.write(_HEAD)
            await _answer(reader)
            if at > begun + 1.0:
                took.append(now() - at)
            await asyncio.sleep(0.005)  # else the clients need all of the processors
        writer.close()

    await asyncio.gather(*(client() for _ in range(task.clients)))
    return took


def main() -> None:
    """Take the turn of the command line, and print it as the last line."""
    task = ServingTask(**json.loads(sys.argv[1]))
    if task.own:
        importlib.import_module("aiosync.integrations.asgi")
    # Forked processes need not import it again. This one has no other thread, and has computed nothing.
    context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    trainer, theirs = context.Pipe()
    processes = [context.Process(target=_train, args=(task, theirs), daemon=True)]
    processes[0].start()
    address = trainer.recv()
    server, theirs = context.Pipe()
    processes.append(context.Process(target=_serve, args=(task, address, theirs), daemon=True))
    processes[1].start()
    port = server.recv()
    if not task.own:
        trainer.send(port)
    took = uvloop.run(_ask(port, task))
    updates = 0
    while trainer.poll():
        trainer.recv()
        updates += 1
    p99 = statistics.quantiles(took, n=100)[98]
    seconds = 1.0 + task.seconds
    turn = ServingTurn(statistics.median(took), p99, len(took) / task.seconds, updates / seconds)
    print(f"\n{json.dumps(asdict(turn))}", flush=True)

    for process in processes:
        process.kill()
    os._exit(0)
