"""A pair of multiprocessing queues between the sender and each worker."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.queues import SimpleQueue

from aiosync.transports._offload import post, start_thread
from aiosync.transports.base import FramedTransport
from aiosync.transports.mp.base import MessagePipe, MessagePipeListener, refuse_if_full, split_messages
from aiosync.transports.sockets import ioctl_int, is_writable

_PIPE_SIZE = 1 << 18  # bytes that a queue's pipe holds, if the system allows it
_OVERHEAD = 12  # most bytes of the length that precedes a message


@dataclass(eq=False, repr=False)
class _QueueReader:
    """A thread that reads a multiprocessing queue and passes its messages to the event loop.

    The thread waits on the queue's descriptor and on a pipe, by which :meth:`close` wakes it. It never blocks
    in the middle of a message, because the writer may have been killed there. While it has part of a message
    it holds the queue's reading lock. If this process is killed then, the lock stays held, and shows that the
    queue is unusable.
    """

    queue: SimpleQueue[bytes]  # no other code of this process may read it
    on_item: Callable[[bytes], None]
    on_end: Callable[[str], None]  # called once with the reason if the queue breaks before ``close``

    def __post_init__(self) -> None:
        self._post = partial(post, asyncio.get_running_loop())
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
        reader, lock = self.queue._reader, self.queue._rlock  # type: ignore[attr-defined]
        buffer = bytearray()
        try:
            while True:
                ready = wait([reader, self._wake_read])
                if self._wake_read in ready:
                    return
                if not buffer and not lock.acquire(block=False):
                    self._post(self.on_end, "its queue was left locked by a process that was killed")
                    return
                data = os.read(reader.fileno(), 1 << 16)
                if not data:
                    self._post(self.on_end, "its queue was closed")
                    return
                buffer += data
                for item in split_messages(buffer):
                    self._post(self.on_item, item)
                if not buffer:
                    lock.release()
        except OSError as exc:
            self._post(self.on_end, f"its queue broke: {exc!r}")
        finally:
            if buffer:
                lock.release()


class QueuePair:
    """Two queues between the sender and one worker. The pair is pickled to the worker when it is spawned.

    A worker in the sender's process uses the same object. So users are counted, and the queues close when the
    last user in this process has released the pair.
    """

    def __init__(self, ctx: BaseContext) -> None:
        self.owner = os.getpid()  # the sender
        self._users: Counter[int] = Counter()  # by process id
        self._closing = 0  # id of the process that has called ``close``
        self.to_worker: SimpleQueue[bytes] = ctx.SimpleQueue()
        self.to_sender: SimpleQueue[bytes] = ctx.SimpleQueue()
        _widen(_writer_fd(self.to_worker))

    def left_locked(self) -> bool:
        """Return whether a worker was killed while it read or wrote: the queues are unusable then."""
        # multiprocessing has no public access to the locks. Only the worker acquires these two.
        for lock in (self.to_worker._rlock, self.to_sender._wlock):  # type: ignore[attr-defined]
            if not lock.acquire(block=False):
                return True
            lock.release()
        return False

    def acquire(self) -> None:
        """Keep the queues open until :meth:`release`."""
        self._users[os.getpid()] += 1

    def release(self) -> None:
        """End the use that :meth:`acquire` began."""
        self._users[os.getpid()] -= 1
        if self._closing == os.getpid():
            self.close()

    def close(self) -> None:
        """Close this process's descriptors, now or at the last :meth:`release` here; idempotent."""
        self._closing = os.getpid()
        if not self._users[os.getpid()]:
            self.to_worker.close()
            self.to_sender.close()


@dataclass(eq=False, repr=False)
class QueuePipe(MessagePipe):
    """A message pipe of two queues of ``pair``. No other code of this process may use these ends of them."""

    pair: QueuePair
    inbound: SimpleQueue[bytes]
    outbound: SimpleQueue[bytes]
    _reader: _QueueReader | None = field(default=None, init=False)

    def open(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        self.pair.acquire()
        self._reader = _QueueReader(self.inbound, on_message, on_lost)

    def put(self, message: bytes) -> None:
        fd = _writer_fd(self.outbound)
        refuse_if_full(_pipe_room(fd), _pipe_size(fd), len(message) + _OVERHEAD)
        # SimpleQueue.put() would pickle the bytes.
        with self.outbound._wlock:  # type: ignore[attr-defined]
            self.outbound._writer.send_bytes(message)  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self.pair.release()


class QueueListener(MessagePipeListener):
    """Accepts connections over one pair of queues per worker."""

    def __init__(self, workers: Iterable[int], ctx: BaseContext) -> None:
        self._ctx = ctx
        # The queues that a worker spawned now has to get.
        self.pairs = {worker: QueuePair(ctx) for worker in workers}
        super().__init__({worker: _senders_end(pair) for worker, pair in self.pairs.items()})

    async def replace(self, ended: FramedTransport) -> None:
        """Make new queues for a worker that was killed and left its queues locked."""
        worker = self.worker_of(ended)
        if worker is None or not self.pairs[worker].left_locked():
            return
        self.pairs[worker].close()
        self.pairs[worker] = QueuePair(self._ctx)
        self.exchange(worker, _senders_end(self.pairs[worker]))

    def forget(self) -> None:
        """Drop the queues in a forked child, without closing them: the child's worker uses its own pair."""
        super().forget()
        self.pairs.clear()

    def close(self) -> None:
        super().close()
        for pair in self.pairs.values():
            pair.close()
        self.pairs.clear()


def _senders_end(pair: QueuePair) -> MessagePipe:
    return QueuePipe(pair, pair.to_sender, pair.to_worker)


def _writer_fd(queue: SimpleQueue[bytes]) -> int:
    # multiprocessing has no public access to the descriptor, which tells how full the pipe is.
    return int(queue._writer.fileno())  # type: ignore[attr-defined]


def _widen(fd: int) -> None:
    """Enlarge a pipe so that a long layout fits. Not to the maximum: all pipes of a user share one limit."""
    if sys.platform == "linux":
        with suppress(OSError):  # over the user's limit: the pipe keeps its size
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)


def _pipe_room(fd: int) -> int:
    """Return how many bytes surely fit into a pipe now."""
    unread = ioctl_int(fd, termios.FIONREAD)
    # A pipe consists of pages. A message that does not fit into the rest of the last page starts a new page.
    # So unread messages can take up to twice their bytes.
    room = _pipe_size(fd) - (2 * (unread + mmap.PAGESIZE) if unread else 0)
    if room < mmap.PAGESIZE and is_writable(fd):
        return mmap.PAGESIZE  # a page is free. Where the user has many pipes, one has two pages
    return room


def _pipe_size(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) if sys.platform == "linux" else mmap.PAGESIZE
