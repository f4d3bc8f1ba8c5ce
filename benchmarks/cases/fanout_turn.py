"""One turn of ``aiosync bench fanout``: a small model to many receivers over TCP.

The receivers live in four processes. ``sockets`` is the limit: the same bytes with one ``sendmsg`` to each
receiver, and one read of its answer, in one thread without an event loop.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import select
import socket
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import aiosync

_PROCESSES = 4
_WARM_UP = 5  # sends
_PAUSE = 0.03  # seconds between two sends, for the receivers to become idle
_DEADLINE = 60.0
_ANSWER = 80  # bytes of an answer
_CONNECTING = 16  # receivers of a process that connect at a time


@dataclass(frozen=True)
class FanoutTask:
    """What a turn does."""

    contender: str
    receivers: int
    sends: int


@dataclass(frozen=True)
class FanoutTurn:
    """What a turn found, of each send."""

    cpu: list[float]  # seconds of processor time that the sender's process took per receiver
    seconds: list[float]  # until the last receiver had answered


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))  # 50 KB


def _nbytes() -> int:
    return sum(parameter.nbytes for parameter in _model().parameters())


class _Meter:
    def __init__(self, receivers: int) -> None:
        self._receivers = receivers
        self.turn = FanoutTurn([], [])

    def __enter__(self) -> None:
        time.sleep(_PAUSE)
        self._cpu, self._clock = time.process_time(), time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.turn.seconds.append(time.perf_counter() - self._clock)
        self.turn.cpu.append((time.process_time() - self._cpu) / self._receivers)


def _shares(receivers: int) -> list[range]:
    """The indices of the receivers of each process."""
    count = min(_PROCESSES, receivers)
    bounds = [receivers * part // count for part in range(count + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


# -- aiosync -----------------------------------------------------------------------------------------


def _receive(address: str, indices: range, ready: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(_receive_all(address, indices, ready))


async def _receive_all(address: str, indices: range, ready: Any) -> None:
    async with AsyncExitStack() as stack:
        schemes = [aiosync.TCPWeightSyncScheme(address, timeout=_DEADLINE) for _ in indices]
        for index, scheme in zip(indices, schemes, strict=True):
            scheme.init_on_receiver(model_id="policy", model=_model(), worker_idx=index)
        for start in range(0, len(schemes), _CONNECTING):
            await asyncio.gather(*(scheme.connect() for scheme in schemes[start : start + _CONNECTING]))
        for scheme in schemes:
            await stack.enter_async_context(scheme.receiving())
        ready.release()
        await asyncio.Event().wait()  # until the sender kills this process


async def _send(task: FanoutTask) -> FanoutTurn:
    torch.set_num_threads(1)
    spawn, model, meter = mp.get_context("spawn"), _model(), _Meter(task.receivers)
    scheme = aiosync.TCPWeightSyncScheme(timeout=_DEADLINE, max_connections=2 * task.receivers)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=task.receivers)
    ready = spawn.Semaphore(0)
    processes = [
        spawn.Process(target=_receive, args=(scheme.address, share, ready), daemon=True)
        for share in _shares(task.receivers)
    ]
    for process in processes:
        process.start()
    await scheme.connect()
    for _ in processes:
        await asyncio.to_thread(ready.acquire)
    for number in range(_WARM_UP + task.sends):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(number))
        if number < _WARM_UP:
            await scheme.send(model)
            continue
        with meter:
            await scheme.send(model)
    for process in processes:
        process.kill()
    return meter.turn


# -- the limit ---------------------------------------------------------------------------------------


def _echo(port: int, indices: range) -> None:
    """Answer each time that a socket has read as many bytes as a version has."""
    nbytes, memory, poll = _nbytes(), bytearray(1 << 18), select.epoll()
    socks = {sock.fileno(): sock for sock in (socket.create_connection(("127.0.0.1", port)) for _ in indices)}
    missing = dict.fromkeys(socks, nbytes)
    for descriptor in socks:
        poll.register(descriptor, select.EPOLLIN)
    while True:
        for descriptor, _ in poll.poll():
            count = socks[descriptor].recv_into(memory)
            if not count:
                return
            missing[descriptor] -= count
            if not missing[descriptor]:
                missing[descriptor] = nbytes
                socks[descriptor].send(bytes(_ANSWER))


def _send_bare(task: FanoutTask) -> FanoutTurn:
    listener = socket.create_server(("127.0.0.1", 0), backlog=task.receivers)
    spawn, meter, poll = mp.get_context("spawn"), _Meter(task.receivers), select.epoll()
    processes = [
        spawn.Process(target=_echo, args=(listener.getsockname()[1], share), daemon=True)
        for share in _shares(task.receivers)
    ]
    for process in processes:
        process.start()
    socks = {}
    for _ in range(task.receivers):
        sock = listener.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        socks[sock.fileno()] = sock
        poll.register(sock.fileno(), select.EPOLLIN)
    body = memoryview(bytes(_nbytes()))
    for number in range(_WARM_UP + task.sends):
        if number < _WARM_UP:
            _fan_out(socks, poll, body)
            continue
        with meter:
            _fan_out(socks, poll, body)
    for process in processes:
        process.kill()
    return meter.turn


def _fan_out(socks: dict[int, socket.socket], poll: select.epoll, body: memoryview) -> None:
    for sock in socks.values():
        sent = sock.sendmsg([body])
        if sent < len(body):
            sock.sendall(body[sent:])
    missing = len(socks)
    while missing:
        for descriptor, _ in poll.poll():
            socks[descriptor].recv(1 << 12)
            missing -= 1


def main() -> None:
    """Take the turn of the command line, and print it as the last line."""
    task = FanoutTask(**json.loads(sys.argv[1]))
    turn = _send_bare(task) if task.contender == "sockets" else asyncio.run(_send(task))
    print(f"\n{json.dumps(asdict(turn))}", flush=True)
    os._exit(0)
