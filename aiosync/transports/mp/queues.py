"""A pair of multiprocessing queues between the sender and each worker."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import sys
import termios
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.queues import SimpleQueue

from aiosync.transports.base import Transport
from aiosync.transports.ioctl import ioctl_int
from aiosync.transports.mp.base import CarrierListener, MessagePipe, refuse_if_full, split_messages
from aiosync.transports.mp.queue_reader import QueueReader

__all__ = ["QueueCarrier", "QueueListener", "QueuePair"]

_F_SETPIPE_SZ = 1031
_F_GETPIPE_SZ = 1032
_PIPE_SIZE = 1 << 18
_OVERHEAD = 12


class QueuePair:
    """Two queues between the sender and one worker. Pickled to the worker when it is spawned.

    A worker in the sender's own process has the very same pair, so it closes when both are done with it.

    Attributes:
        owner: the process that made it, which is the sender's.
    """

    def __init__(self, ctx: BaseContext) -> None:
        self.owner = os.getpid()
        self._users = _Users()
        self.to_worker: SimpleQueue[bytes] = ctx.SimpleQueue()
        self.to_sender: SimpleQueue[bytes] = ctx.SimpleQueue()
        for queue in (self.to_worker, self.to_sender):
            _widen(_writer_fd(queue))

    def left_locked(self) -> bool:
        """Whether a worker that has ended was killed while it read or wrote, with the lock in its hand.

        What it read or wrote may then be cut off in the middle, so the queues are of no use any more.
        """
        # The queue's public face has no locks. These two only the worker takes.
        for lock in (self.to_worker._rlock, self.to_sender._wlock):  # type: ignore[attr-defined]
            if not lock.acquire(block=False):
                return True
            lock.release()
        return False

    def hold(self) -> None:
        """Keep it open until :meth:`release`."""
        if not self._users.here():
            self._users = _Users()  # those that were counted are the parent's
        self._users.count += 1

    def release(self) -> None:
        """Hold it no more."""
        self._users.count -= 1
        if self._users.closing:
            self.close()

    def close(self) -> None:
        """Close this process's copy, now or when its last user in this process has closed; idempotent."""
        if self._users.here() and self._users.count > 0:
            self._users.closing = True
            return
        self.to_worker.close()
        self.to_sender.close()


@dataclass
class _Users:
    """Who holds a pair in this process."""

    pid: int = field(default_factory=os.getpid)
    count: int = 0
    closing: bool = False

    def here(self) -> bool:
        return self.pid == os.getpid()


class QueueCarrier(MessagePipe):
    """A queue to read and a queue to write.

    Args:
        pair: both.
        inbound, outbound: which is which. No other code of this process reads or writes the same one.
    """

    def __init__(self, pair: QueuePair, inbound: SimpleQueue[bytes], outbound: SimpleQueue[bytes]) -> None:
        self._pair = pair
        self._inbound = inbound
        self._outbound = outbound
        self._reader: QueueReader | None = None

    def open(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Start the thread that reads."""
        self._pair.hold()
        self._reader = QueueReader(
            self._inbound, asyncio.get_running_loop(), split_messages, on_message, on_lost
        )

    def put(self, message: bytes) -> None:
        """Write a message without waiting."""
        fd = _writer_fd(self._outbound)
        refuse_if_full(_pipe_room(fd), _pipe_size(fd), len(message) + _OVERHEAD)
        # Not by put(), which would pickle what is bytes already.
        with self._outbound._wlock:  # type: ignore[attr-defined]
            self._outbound._writer.send_bytes(message)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._pair.release()


class QueueListener(CarrierListener):
    """One pair of queues per worker.

    Attributes:
        pairs: worker index -> its queues; a worker that is spawned now gets these.
    """

    def __init__(self, workers: Iterable[int], ctx: BaseContext) -> None:
        super().__init__()
        self._ctx = ctx
        self.pairs = {worker: QueuePair(ctx) for worker in workers}

    def carriers(self) -> dict[int, MessagePipe]:
        """The sender's ends."""
        return {worker: self._carrier(worker) for worker in self.pairs}

    def _carrier(self, worker: int) -> MessagePipe:
        pair = self.pairs[worker]
        return QueueCarrier(pair, pair.to_sender, pair.to_worker)

    async def replace(self, ended: Transport) -> None:
        """New queues for a worker whose process has ended and left its old ones locked."""
        worker = self.worker_of(ended)
        if worker is None or not self.pairs[worker].left_locked():
            return
        self.pairs[worker].close()
        self.pairs[worker] = QueuePair(self._ctx)
        self.exchange(worker, self._carrier(worker))

    def forget(self) -> None:
        """In a forked child: leave the queues to the worker that takes its own out of them."""
        self.pairs.clear()

    def close(self) -> None:
        """Close the queues; idempotent."""
        super().close()
        for pair in self.pairs.values():
            pair.close()
        self.pairs.clear()


def _writer_fd(queue: SimpleQueue[bytes]) -> int:
    # The queue's public face does not tell how full its pipe is.
    return int(queue._writer.fileno())  # type: ignore[attr-defined]


def _widen(fd: int) -> None:
    """Make a pipe large enough for a long layout in one piece; not as large as it could be, because all the
    pipes of a user share one limit."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_SIZE)
        except OSError:
            return  # over the user's limit: it keeps the default size


def _pipe_room(fd: int) -> int:
    unread = ioctl_int(fd, termios.FIONREAD)
    # A pipe is made of pages, and a message that does not fit into the rest of the last one begins a new
    # one: what lies in the pipe can take up twice its bytes.
    return _pipe_size(fd) - (2 * (unread + mmap.PAGESIZE) if unread else 0)


def _pipe_size(fd: int) -> int:
    return fcntl.fcntl(fd, _F_GETPIPE_SZ) if sys.platform == "linux" else mmap.PAGESIZE
