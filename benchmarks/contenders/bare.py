"""The fastest that a few lines of Python do: one warm buffer of the model's size, and a byte back.

No weights are extracted and nothing is checked. ``sockets`` makes blocking calls, ``sendall`` and
``recv_into``; options of its setup are the ``address`` to listen at and ``tls`` for the certificates.
``gloo`` is one send and one receive of one tensor. Either has one worker, in which a thread receives.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import SenderEnd, Sent, Setup, Weights, WorkerEnd


def ends(setup: Setup) -> tuple[type[SenderEnd], type[WorkerEnd]]:
    """Sockets or gloo."""
    return (_GlooSender, _GlooWorker) if setup.contender == "gloo" else (_SocketSender, _SocketWorker)


def _buffer(model: nn.Module) -> Tensor:
    return torch.zeros(sum(parameter.nbytes for parameter in model.parameters()), dtype=torch.uint8)


def _socket(address: Any) -> socket.socket:
    """A Unix socket for a path; or a TCP socket that sends at once, as those that it accepts do."""
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX)
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _SocketSender(SenderEnd):
    def __post_init__(self) -> None:
        self._ready = _buffer(self.model).numpy().data
        self._listener = _socket(self.setup.options["address"])
        self._listener.bind(self.setup.options["address"])
        self._listener.listen()

    async def recipe(self, index: int) -> Any:
        return self._listener.getsockname()

    async def connect(self) -> None:
        await asyncio.to_thread(self._accept)

    def _accept(self) -> None:
        sock, tls = self._listener.accept()[0], self.setup.options["tls"]
        self._sock = tls.for_sender().wrap_socket(sock, server_side=True) if tls else sock
        self._sock.recv(1)

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        self._sock.sendall(self._ready)
        self._sock.recv(1)
        return Sent()

    async def close(self) -> None:
        self._sock.close()
        self._listener.close()


class _SocketWorker(WorkerEnd):
    async def connect(self) -> None:
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        memory, tls = _buffer(self.model).numpy().data, self.setup.options["tls"]
        sock = _socket(self.recipe)
        sock.connect(self.recipe)
        with tls.for_worker().wrap_socket(sock, server_hostname="localhost") if tls else sock as sock:
            sock.sendall(b"r")
            while True:
                got = 0
                while got < len(memory):
                    count = sock.recv_into(memory[got:])
                    if not count:
                        return  # the sender has closed
                    got += count
                sock.sendall(b"k")

    async def close(self) -> None:
        self._thread.join()


class _GlooSender(SenderEnd):
    async def connect(self) -> None:
        self._group: Any = dist.group.WORLD
        self._ready, self._byte = [_buffer(self.model)], [torch.zeros(1, dtype=torch.uint8)]

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        self._group.send(self._ready, 1, 1).wait()
        self._group.recv(self._byte, 1, 2).wait()
        return Sent()


class _GlooWorker(WorkerEnd):
    async def connect(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        group: Any = dist.group.WORLD
        memory, byte = [_buffer(self.model)], [torch.zeros(1, dtype=torch.uint8)]
        while True:
            group.recv(memory, 0, 1).wait()
            group.send(byte, 0, 2).wait()
