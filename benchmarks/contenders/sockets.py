"""The fastest that a few lines of Python do over a socket: blocking calls on one warm buffer.

``sendall`` out of a ready buffer, ``recv_into`` a warm one, and a byte back. No weights are extracted and
nothing is checked. Options of a setup: ``unix`` for a Unix socket, ``tls`` for the certificates.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import SenderEnd, Sent, Setup, Weights, WorkerEnd

__all__ = ["make_sender", "make_worker"]


def make_sender(setup: Setup, model: nn.Module) -> SenderEnd:
    """The sending socket. One worker connects to it."""
    return _Sender(setup, model)


def make_worker(setup: Setup, recipe: Any, model: nn.Module, index: int) -> WorkerEnd:
    """The receiving socket."""
    return _Worker(setup, recipe, model)


def _buffer(model: nn.Module) -> memoryview:
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    memory: memoryview = torch.zeros(nbytes, dtype=torch.uint8).numpy().data
    return memory


def _without_delay(sock: socket.socket) -> socket.socket:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _Sender(SenderEnd):
    def __init__(self, setup: Setup, model: nn.Module) -> None:
        self._tls = setup.options.get("tls")
        self._ready = _buffer(model)
        self._folder = Path(tempfile.mkdtemp(prefix="aiosync-bench-"))
        unix = setup.options.get("unix", False)
        self._listener = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self._listener.bind(str(self._folder / "socket") if unix else ("127.0.0.1", 0))
        self._listener.listen()

    async def recipe(self, index: int) -> object:
        return self._listener.getsockname()

    async def connect(self) -> None:
        await asyncio.to_thread(self._accept)

    def _accept(self) -> None:
        sock = _without_delay(self._listener.accept()[0])
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.certfile, self._tls.keyfile)
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


class _Worker(WorkerEnd):
    def __init__(self, setup: Setup, address: Any, model: nn.Module) -> None:
        self._tls = setup.options.get("tls")
        self._address = address
        self._memory = _buffer(model)
        self._thread = threading.Thread(target=self._receive)

    async def connect(self) -> None:
        self._thread.start()

    def _receive(self) -> None:
        sock = socket.socket(socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET)
        sock.connect(self._address)
        sock = _without_delay(sock)
        if self._tls is not None:
            sock = self._tls.for_worker().wrap_socket(sock, server_hostname="localhost")
        with sock:
            sock.sendall(b"r")
            while self._fill(sock):
                sock.sendall(b"k")

    def _fill(self, sock: socket.socket) -> bool:
        """Read one update into the buffer; False when the sender has closed."""
        got = 0
        while got < len(self._memory):
            count = sock.recv_into(self._memory[got:])
            if not count:
                return False
            got += count
        return True

    async def close(self) -> None:
        self._thread.join()
