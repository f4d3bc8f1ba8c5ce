"""Read a multiprocessing queue in a thread, without blocking in the middle of a message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue
from typing import Any

from aiosync.transports._offload import start_thread

__all__ = ["QueueReader"]


class QueueReader:
    """A thread that reads a multiprocessing queue and passes its messages to the event loop.

    The thread waits on the queue's descriptor and on a pipe, by which :meth:`close` wakes it. It never blocks
    in the middle of a message, because the writer may have been killed there. While it has part of a message
    it holds the queue's reading lock. If this process is killed then, the lock stays held, and shows that the
    queue is unusable.

    Args:
        queue: the queue to read. No other code of this process may read it.
        loop: the loop that ``on_item`` and ``on_end`` are called on.
        split: removes whole messages from the front of a buffer and returns them.
        on_item: called with each message, as it was written.
        on_end: called once with the reason if the queue breaks before :meth:`close`.
    """

    def __init__(
        self,
        queue: SimpleQueue[bytes],
        loop: asyncio.AbstractEventLoop,
        split: Callable[[bytearray], list[bytes]],
        on_item: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._loop = loop
        self._split = split
        self._on_item = on_item
        self._on_end = on_end
        self._wake_read, self._wake_write = os.pipe()
        self._thread = start_thread(self._run, "aiosync-queue")

    def close(self) -> None:
        """Wake the thread and wait for its end, which comes soon; idempotent."""
        if self._wake_write < 0:
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_write)
        os.close(self._wake_read)
        self._wake_write = -1

    def _run(self) -> None:
        # multiprocessing has no public access to a queue's descriptor and lock.
        reader, lock = self._queue._reader, self._queue._rlock  # type: ignore[attr-defined]
        buffer = bytearray()
        try:
            while True:
                ready = wait([reader, self._wake_read])
                if self._wake_read in ready:
                    return
                if not buffer and not lock.acquire(block=False):
                    self._post(self._on_end, "its queue was left locked by a process that was killed")
                    return
                data = os.read(reader.fileno(), 1 << 16)
                if not data:
                    self._post(self._on_end, "its queue was closed")
                    return
                buffer += data
                for item in self._split(buffer):
                    self._post(self._on_item, item)
                if not buffer:
                    lock.release()
        except OSError as exc:
            self._post(self._on_end, f"its queue broke: {exc!r}")
        finally:
            if buffer:
                lock.release()

    def _post(self, callback: Callable[[Any], None], value: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, value)
        except RuntimeError:
            return  # the loop is closed
