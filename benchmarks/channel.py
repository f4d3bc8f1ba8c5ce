"""Commands between the benchmark's processes: one request, one reply, over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

__all__ = ["Channel", "Handler", "RemoteFailure", "Reply", "Request", "serve"]

Values: TypeAlias = dict[str, Any]
Handler: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Values]]


@dataclass(frozen=True, slots=True)
class Request:
    """What to do: a verb that the other side has a handler for, and its arguments."""

    verb: str
    values: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of it: values, or the text of an error (its last line says most)."""

    values: Values = field(default_factory=dict)
    error: str = ""


class RemoteFailure(RuntimeError):
    """The other side could not do what it was asked; the message carries its traceback."""


class Channel:
    """One end of a pipe, awaited on the running event loop. Use as a context manager.

    Args:
        conn: a duplex multiprocessing connection. Messages are small: reading one is short.
    """

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._inbox: asyncio.Queue[object] = asyncio.Queue()

    def __enter__(self) -> Channel:
        asyncio.get_running_loop().add_reader(self._conn.fileno(), self._on_readable)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        self._conn.close()

    def _on_readable(self) -> None:
        try:
            self._inbox.put_nowait(self._conn.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._inbox.put_nowait(None)

    def send(self, message: Request | Reply) -> None:
        """Send one message; ``BrokenPipeError`` when the other side is gone."""
        self._conn.send(message)

    async def receive(self) -> object:
        """The next message; ``EOFError`` when the other side is gone."""
        message = await self._inbox.get()
        if message is None:
            raise EOFError("the other process is gone")
        return message

    async def call(self, verb: str, **values: object) -> Values:
        """Ask and wait for the answer; :class:`RemoteFailure` with the other side's error."""
        self.send(Request(verb, values))
        reply = await self.receive()
        assert isinstance(reply, Reply)
        if reply.error:
            raise RemoteFailure(reply.error)
        return reply.values


async def serve(channel: Channel, handlers: Mapping[str, Handler]) -> None:
    """Answer requests in turn until a ``close`` has been answered or the asker is gone."""
    while True:
        try:
            request = await channel.receive()
        except EOFError:
            return
        assert isinstance(request, Request)
        try:
            reply = Reply(await handlers[request.verb](request.values))
        # The boundary of the process: whatever went wrong is a result for the one who asked.
        except Exception:  # noqa: BLE001
            reply = Reply(error=traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            channel.send(reply)
        if request.verb == "close":
            return
