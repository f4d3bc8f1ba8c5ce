"""What a collector and a worker talk over: objects, in order, until one end is closed."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import Any, Self

import cloudpickle

from aiosync.transports.forks import close_in_children

__all__ = ["CommandPipe", "CommandPipeClosed", "LocalCommandPipe", "ProcessCommandPipe"]

_HEAD = struct.Struct("!Q")


class CommandPipeClosed(Exception):
    """The other end of a channel is closed. A type of its own: what an environment raises is its own."""


class CommandPipe(ABC):
    """One end. Writing never waits: what the other end has not read yet is kept here."""

    @abstractmethod
    def send(self, message: object) -> None:
        """Write a message; to an end that is closed it is lost."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until not too much is kept here.

        Raises:
            OSError: the other end is closed.
        """

    @abstractmethod
    async def receive(self) -> Any:
        """The next message.

        Raises:
            ChannelClosed: the other end is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close this end; idempotent. What is kept here is written as far as it can be at once."""


class ProcessCommandPipe(CommandPipe):
    """Over a pipe between a process and its child, on an event loop. Messages are pickled: both ends
    belong to this program, and no other process has the pipe.

    Args:
        reader, writer: asyncio's streams of it. Most callers want :meth:`open`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: Connection[Any, Any]) -> Self:
        """Take over one end of a duplex pipe, which is closed here."""
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        # An environment's own processes must not hide the end of this one.
        close_in_children(sock)
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer)

    def send(self, message: object) -> None:
        data = cloudpickle.dumps(message)
        if not self._writer.is_closing():
            self._writer.write(_HEAD.pack(len(data)) + data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def receive(self) -> Any:
        try:
            (size,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise CommandPipeClosed("the other end of the pipe is closed") from exc
        return pickle.loads(data)

    def close(self) -> None:
        self._writer.close()


class LocalCommandPipe(CommandPipe):
    """Between two tasks of one event loop, as they are. Make both with :meth:`pair`."""

    def __init__(self, incoming: asyncio.Queue[Any], outgoing: asyncio.Queue[Any]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends."""
        one: asyncio.Queue[Any] = asyncio.Queue()
        other: asyncio.Queue[Any] = asyncio.Queue()
        return cls(one, other), cls(other, one)

    def send(self, message: object) -> None:
        if not self._closed:
            self._outgoing.put_nowait(message)

    async def receive(self) -> Any:
        message = await self._incoming.get()
        if message is _END:
            self._incoming.put_nowait(_END)  # for the next call
            raise CommandPipeClosed("the other end is closed")
        return message

    async def drain(self) -> None:
        """See :class:`Channel`."""

    async def receive_all(self) -> list[Any]:
        """The next message, and those that are there after it.

        Raises:
            ChannelClosed: the other end is closed.
        """
        found = [await self.receive()]
        while not self._incoming.empty():
            message = self._incoming.get_nowait()
            if message is _END:
                self._incoming.put_nowait(_END)
                break
            found.append(message)
        return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outgoing.put_nowait(_END)
            self._incoming.put_nowait(_END)


_END = object()
"""Follows the last message."""
