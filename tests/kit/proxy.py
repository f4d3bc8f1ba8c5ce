"""A TCP proxy that breaks what passes through it, on purpose and on demand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

__all__ = ["ChaosProxy", "Weather"]

Direction = Literal["to_sender", "to_worker"]
_PIECE = 1 << 16


@dataclass
class Weather:
    """What happens to the bytes that go in one direction. May be changed at any time.

    Attributes:
        delay: seconds that each piece is held back.
        rate: bytes per second at most.
        cut_after: bytes after which the connection is cut, both ways, without a goodbye.
        half_close_after: bytes after which nothing more comes, said in order.
        truncate_after: bytes after which nothing more comes, and nothing is said.
        flip: offsets of bytes in which a bit is turned over.
    """

    delay: float = 0.0
    rate: float = 0.0
    cut_after: int | None = None
    half_close_after: int | None = None
    truncate_after: int | None = None
    flip: set[int] = field(default_factory=set)


class ChaosProxy:
    """Stands between workers and a sender on this machine.

    Args:
        address: the sender's, ``tcp://host:port``.

    Attributes:
        weather: direction -> what happens to it.
        hold: connections wait here while it is cleared; they go on in the reverse order.
        passed: bytes that went through, by direction.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.weather: dict[Direction, Weather] = {"to_sender": Weather(), "to_worker": Weather()}
        self.hold = asyncio.Event()
        self.hold.set()
        self.passed: dict[Direction, int] = {"to_sender": 0, "to_worker": 0}
        self.accepted = 0
        self._pending: list[asyncio.Event] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        """Where workers connect."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"tcp://{host}:{port}"

    def cut(self) -> None:
        """Break every connection now."""
        for writer in list(self._writers):
            writer.transport.abort()

    def release(self) -> None:
        """Let the connections that were held go on, the last first."""
        self.hold.set()
        for event in reversed(self._pending):
            event.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.accepted += 1
        try:
            await self._wait_turn()
            there, back = await asyncio.open_connection(*self._target)
            self._writers.add(back)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, back, "to_sender"))
                    group.create_task(self._pump(there, writer, "to_worker"))
            finally:
                self._writers.discard(back)
                back.transport.abort()
        except* OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._tasks.discard(task)

    async def _wait_turn(self) -> None:
        if not self.hold.is_set():
            turn = asyncio.Event()
            self._pending.append(turn)
            await turn.wait()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        weather = self.weather[direction]
        count = 0
        while True:
            data = bytearray(await reader.read(_PIECE))
            if not data:
                break
            if weather.delay:
                await asyncio.sleep(weather.delay)
            if weather.rate:
                await asyncio.sleep(len(data) / weather.rate)
            for offset in weather.flip:
                if count <= offset < count + len(data):
                    data[offset - count] ^= 0x10
            limits = (weather.cut_after, weather.half_close_after, weather.truncate_after)
            last = min((limit for limit in limits if limit is not None), default=None)
            if last is not None and count + len(data) > last:
                writer.write(data[: last - count])
                await writer.drain()
                await self._end(writer, weather, last)
                return
            writer.write(data)
            await writer.drain()
            count += len(data)
            self.passed[direction] += len(data)
        if not writer.is_closing() and writer.can_write_eof():
            writer.write_eof()

    async def _end(self, writer: asyncio.StreamWriter, weather: Weather, at: int) -> None:
        if weather.cut_after == at:
            raise ConnectionAbortedError("cut on purpose")
        if weather.half_close_after == at:
            writer.write_eof()
            return
        await asyncio.Event().wait()  # truncated: nothing is said, for ever
