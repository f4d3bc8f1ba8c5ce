"""Objects over a pipe between a process and its child, on an event loop.

They are pickled: both ends are this program, and nobody else has the pipe.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

__all__ = ["Channel"]

_HEAD = struct.Struct("!Q")


class Channel:
    """One end. Writing never waits: what the other end has not read yet is kept here.

    Args:
        reader, writer: asyncio's streams of it. Most callers want :meth:`open`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: Connection[Any, Any]) -> Channel:
        """Take over one end of a duplex pipe, which is closed here."""
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer)

    def send(self, message: object) -> None:
        """Write a message; to an end that is closed it is lost."""
        data = cloudpickle.dumps(message)
        if not self._writer.is_closing():
            self._writer.write(_HEAD.pack(len(data)) + data)

    async def drain(self) -> None:
        """Wait until not too much is kept here.

        Raises:
            OSError: the other end is closed.
        """
        await self._writer.drain()

    async def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            (size,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise EOFError("the other end of the pipe is closed") from exc
        return pickle.loads(data)

    def close(self) -> None:
        """Close this end; idempotent. What is kept here is written as far as it can be at once."""
        self._writer.close()
