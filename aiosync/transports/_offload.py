"""Threads: the only place of the package that starts them (the blocking twins' loop thread aside).

Four kinds. :class:`Offloader` runs blocking work for coroutines that await it. :class:`QueueReader`
waits on a multiprocessing queue for as long as it is open. :class:`LoopThread` moves the bytes of
sockets. :class:`DetachedThread` is for what cannot be interrupted, and is left to itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue as ProcessQueue
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch

from aiosync.weights.copying import Lane, Pairs, copy_lanes

__all__ = [
    "DetachedThread",
    "LoopThread",
    "Offloader",
    "QueueReader",
    "abandonable",
    "aside",
    "call_when_done",
    "detached",
    "handover",
    "left_running",
    "offloaded",
    "uninterrupted",
]

T = TypeVar("T")

_LAST_WAIT = 2.0
"""Seconds that the interpreter's exit waits for detached threads."""

_LANES = 8
"""Threads of one offloader at most; more do not copy any faster where memory is what limits."""


class Offloader:
    """A few lazily started threads. The endpoint that owns it closes it.

    Work that has begun always ends before its ``run`` returns or raises, also when the caller is
    cancelled: it may be reading the caller's tensors or writing into a slot, and no other code may use
    those before it has ended. So work that can be long takes care to be cut into pieces (``cancelled``).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run ``work(cancelled)`` in a thread; ``cancelled()`` tells that the caller has given up.

        Raises:
            Exception: whatever ``work`` raises.
            CancelledError: the caller was cancelled; ``work`` has ended.
        """
        return (await self._run_all([work]))[0]

    async def copy(self, pairs: Pairs, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """:func:`~aiosync.weights.copying.copy_pairs` in threads, as many as torch would use."""
        lanes = copy_lanes(pairs, min(torch.get_num_threads(), _LANES))
        return all(await self._run_all([partial(_drive, lane, cancelled) for lane in lanes]))

    async def _run_all(self, works: Sequence[Callable[[Callable[[], bool]], T]]) -> list[T]:
        if not works:
            return []
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_LANES, thread_name_prefix=self._name)
        gone = threading.Event()
        futures = [asyncio.wrap_future(self._executor.submit(work, gone.is_set)) for work in works]
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError:
            gone.set()
            for future in futures:
                await _outlast(future)
            raise
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the thread; idempotent. Call it when no work is under way: it waits for the thread."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def left_running(work: Callable[[], object], name: str) -> None:
    """Run ``work()`` in a thread that lives for as long as the process, and ends with it."""
    threading.Thread(target=work, name=name, daemon=True).start()


async def offloaded(work: Callable[[], T], name: str) -> T:
    """Run ``work()`` in a thread of its own and wait for its end, as :class:`Offloader` does."""
    offloader = Offloader(name)
    try:
        return await offloader.run(lambda _: work())
    finally:
        offloader.close()


def _drive(lane: Lane, cancelled: Callable[[], bool], gone: Callable[[], bool]) -> bool:
    return lane(lambda: gone() or cancelled())


async def uninterrupted(work: Callable[[Callable[[], bool]], Coroutine[Any, Any, T]]) -> T:
    """Await ``work(cancelled)`` to its end even if the caller is cancelled.

    A cancelled caller gets its ``CancelledError`` when the work has ended; the work itself is not
    interrupted, it may ask ``cancelled()`` and end early in a state of its own choice.
    """
    gone = threading.Event()
    task = asyncio.ensure_future(work(gone.is_set))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        gone.set()
        await _outlast(task)
        raise


async def _outlast(future: asyncio.Future[Any]) -> None:
    # A task can be cancelled again while it waits: the wait goes on, since the work does.
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # the caller is gone; without this asyncio would warn


def handover() -> tuple[asyncio.Future[T], Callable[[Callable[[], T]], None]]:
    """A future of this event loop, and what another thread settles it with: a call, which is made in
    that thread, and whose result or exception is the future's. If no call waits any more, or the loop is
    closed, the result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(_seen)

    def put(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", value))

    def settle(work: Callable[[], T]) -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as exc:  # noqa: BLE001 - raised where it is awaited
            error = exc
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(put, value, error)

    return future, settle


async def abandonable(work: Callable[[], T], name: str) -> T:
    """Run ``work()`` in a thread that a cancelled caller leaves to itself: for what cannot be interrupted,
    ends by itself, and touches nothing of ours.

    Raises:
        Exception: whatever ``work`` raises.
    """
    future: asyncio.Future[T]
    future, settle = handover()
    threading.Thread(target=settle, args=(work,), name=name, daemon=True).start()
    return await future


def call_when_done(future: Future[T], callback: Callable[[Future[T]], None]) -> None:
    """Call ``callback`` on this event loop, if that is still there by then."""
    loop = asyncio.get_running_loop()

    def tell(done: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(callback, done)

    future.add_done_callback(tell)


def aside(work: Callable[[], object], name: str) -> None:
    """Call ``work()`` in a daemon thread, and do not wait for it."""
    threading.Thread(target=work, name=name, daemon=True).start()


class QueueReader:
    """A thread that waits on a multiprocessing queue and hands its bytes to the event loop.

    It waits on the queue's descriptor and on one of its own, so that :meth:`close` can wake it without
    a word from the other side; and never in the middle of a message, whose writer may have been killed.
    While it has read a part of a message it has the queue's reading lock: if it is killed then, the lock
    tells that the queue is of no use any more.

    Args:
        queue: the queue to read. No other code of this process may read it.
        loop: the loop that ``on_bytes`` and ``on_end`` are called on.
        split: cuts whole messages off a buffer.
        on_item: takes one message, as it was written.
        on_end: takes the reason, once, if the queue breaks before :meth:`close`.
    """

    def __init__(
        self,
        queue: ProcessQueue[bytes],
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
        self._thread = threading.Thread(target=self._run, name="aiosync-queue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wake the thread and wait for its end (it never blocks for long); idempotent."""
        if self._wake_write < 0:
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_write)
        os.close(self._wake_read)
        self._wake_write = -1

    def _run(self) -> None:
        # The queue's public face has no descriptor to wait on, and no lock; its reading end has.
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


class LoopThread:
    """An event loop in a thread of its own, for connections that are to move whatever the caller's loop
    is busy with. The endpoint that owns it closes it.

    Attributes:
        loop: to be used in its own thread only.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closed = False

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Have ``function(*args)`` called in the thread, after what was asked for before; false if the thread
        has ended."""
        if self._closed:
            return False
        self.loop.call_soon_threadsafe(function, *args)
        return True

    def close(self) -> None:
        """Do what was asked for, end the thread and wait for it (it never blocks for long); idempotent."""
        if not self._closed:
            self._closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


_detached: weakref.WeakSet[DetachedThread] = weakref.WeakSet()

_EXIT_PRIORITY = 500
"""After whatever closes schemes (they may have a last word to say), and before multiprocessing joins its
children (they may be waiting to hear it)."""

_watched_exit = 0
"""The process whose exit ends its detached threads."""


def _watch_exit() -> None:
    """Not by atexit: multiprocessing's children leave without it. A finalizer is also run there, but a forked
    child begins with none."""
    global _watched_exit
    if _watched_exit != os.getpid():
        _watched_exit = os.getpid()
        Finalize(None, _end_detached, exitpriority=_EXIT_PRIORITY)


def _end_detached() -> None:
    until = time.monotonic() + _LAST_WAIT
    for thread in list(_detached):
        thread._end(until)


class DetachedThread:
    """A thread for calls into a library that waits for other machines and cannot be interrupted, one after
    the other. :meth:`close` does not wait: the thread ends when the call that it is in returns.

    Only the interpreter waits at its exit, shortly: a thread that comes back from such a library into an
    interpreter that is no more brings the process down with an error.

    Args:
        name: the thread's.

    Attributes:
        wake: has the call that it is in return, where there is a way to; called at the interpreter's
        exit.
    """

    def __init__(self, name: str) -> None:
        self.wake: Callable[[], object] | None = None
        self._closed = False
        self._name = name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do ``work()`` after what was asked for before."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            _detached.add(self)
            _watch_exit()
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(RuntimeError("this was closed before"))
        else:
            self._jobs.put((future, work))
        return future

    def close(self) -> None:
        """Do what was asked for, and end."""
        self._closed = True
        self._jobs.put(None)

    def _end(self, until: float) -> None:
        """At the interpreter's exit."""
        if self._thread is not None and self._thread.is_alive():
            self.close()
            if self.wake is not None:
                self.wake()
            self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as exc:  # noqa: BLE001 - the future raises it
                future.set_exception(exc)
            del job, future, work  # what they hold is to go now, and not when the next one comes


async def detached(thread: DetachedThread, work: Callable[[], T]) -> T:
    """Have a thread do ``work()``, after what it was asked for before; a cancelled caller leaves it to that.

    Raises:
        Exception: whatever ``work`` raises.
    """
    future = asyncio.wrap_future(thread.submit(work))
    future.add_done_callback(_seen)
    await asyncio.wait([future])
    return future.result()


def _seen(future: asyncio.Future[Any]) -> None:
    """Read the exception of a future whose caller has given up, so that asyncio does not warn."""
    if not future.cancelled():
        future.exception()
