"""The fastest that a few lines of Python do: one warm buffer of the model's size, and a byte back.

No weights are extracted and nothing is checked. ``sockets`` makes blocking calls, ``sendall`` and
``recv_into``; options of its setup are ``unix`` for a Unix socket and ``tls`` for the certificates. ``gloo``
is one send and one receive of one tensor; extra of its setup is the ``port`` of a store. Either has one
worker, in which a thread receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.contenders import SenderEnd, Sent, Setup, Weights, WorkerEnd

LIMIT = timedelta(seconds=120)


def ends(setup: Setup) -> tuple[type[SenderEnd], type[WorkerEnd]]:
    """Sockets or gloo."""
    return (_GlooSender, _GlooWorker) if setup.contender == "gloo" else (_SocketSender, _SocketWorker)


def _buffer(model: nn.Module) -> Tensor:
    return torch.zeros(sum(parameter.nbytes for parameter in model.parameters()), dtype=torch.uint8)


def _without_delay(sock: socket.socket) -> socket.socket:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _SocketSender(SenderEnd):
    def __init__(self, setup: Setup, model: nn.Module) -> None:
        super().__init__(setup, model)
        self._ready = _buffer(model).numpy().data
        self._folder = Path(tempfile.mkdtemp(prefix="aiosync-bench-"))
        unix = setup.options["unix"]
        self._listener = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self._listener.bind(str(self._folder / "socket") if unix else ("127.0.0.1", 0))
        self._listener.listen()

    async def recipe(self, index: int) -> Any:
        return self._listener.getsockname()

    async def connect(self) -> None:
        await asyncio.to_thread(self._accept)

    def _accept(self) -> None:
        sock, tls = _without_delay(self._listener.accept()[0]), self.setup.options["tls"]
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls.certfile, tls.keyfile)
            sock = context.wrap_socket(sock, server_side=True)
        self._sock = sock
        self._sock.recv(1)

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        self._sock.sendall(self._ready)
        self._sock.recv(1)
        return Sent()

    async def close(self) -> None:
        self._sock.close()
        self._listener.close()
        shutil.rmtree(self._folder)


class _SocketWorker(WorkerEnd):
    async def connect(self) -> None:
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        memory, tls = _buffer(self.model).numpy().data, self.setup.options["tls"]
        sock = socket.socket(socket.AF_UNIX if isinstance(self.recipe, str) else socket.AF_INET)
        sock.connect(self.recipe)
        sock = _without_delay(sock)
        if tls is not None:
            sock = tls.for_worker().wrap_socket(sock, server_hostname="localhost")
        with sock:
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


class _Group:
    """A process group of two, a buffer of the model's size, and a byte."""

    def __init__(self, setup: Setup, model: nn.Module, rank: int) -> None:
        store: Any = TCPStore("127.0.0.1", setup.extras["port"], is_master=False, wait_for_workers=False)
        self.group: Any = dist.ProcessGroupGloo(PrefixStore("bare", store), rank, 2, LIMIT)
        self.buffer = [_buffer(model)]
        self.byte = [torch.zeros(1, dtype=torch.uint8)]


class _GlooSender(SenderEnd):
    async def connect(self) -> None:
        self._end = await asyncio.to_thread(_Group, self.setup, self.model, 0)

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        self._end.group.send(self._end.buffer, 1, 1).wait()
        self._end.group.recv(self._end.byte, 1, 2).wait()
        return Sent()

    async def close(self) -> None:
        del self._end


class _GlooWorker(WorkerEnd):
    async def connect(self) -> None:
        end = await asyncio.to_thread(_Group, self.setup, self.model, 1)
        threading.Thread(target=self._receive, args=(end,), daemon=True).start()

    def _receive(self, end: _Group) -> None:
        with contextlib.suppress(RuntimeError):  # the sender has closed its connection
            while True:
                end.group.recv(end.buffer, 0, 1).wait()
                end.group.send(end.byte, 0, 2).wait()
