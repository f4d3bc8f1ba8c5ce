"""Threads. Only this module and the blocking twins' portal start threads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from aiosync._deadline import Deadline
from aiosync._processors import (
    allowed_processors,
    bind_thread,
    processors,
    release_callers_threads,
    release_openmp_threads,
)
from aiosync.weights.copying import (
    Lane,
    Pairs,
    copy_lanes,
    copy_with_torch,
    nbytes_of,
    queue_copy,
    split_plain,
)
from aiosync.weights.devices import QueuedCopies, are_idle, sharing, wait_for_devices

T = TypeVar("T")

_LAST_WAIT = 2.0  # seconds that the interpreter's exit waits for detached threads, all together
_SPINNING = 0.01
"""Seconds that OpenMP threads spin at most, about."""

_LONG_COPY = 32 * 1024 * 1024
"""Bytes from which a copy takes so long that it is worth to end OpenMP's threads before it."""

_SOON = 0.0003
"""Seconds that an event loop waits itself for a device's copy: a thread takes longer than that to begin."""

_LANES = 8  # most threads of one offloader. More threads copy no faster: memory bandwidth is the limit


class Offloader:
    """A few threads, started on first use. The endpoint that owns the offloader closes it.

    ``run`` returns or raises only when the work has ended, also if the caller is cancelled: the work uses
    memory that no other code may use at the same time. So long work should be divided into pieces and call
    ``cancelled()`` between two pieces.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # As many as torch uses now. A collector lowers torch's number later, for the trainer's own work.
        self._lanes = min(torch.get_num_threads(), _LANES)
        self._executor: ThreadPoolExecutor | None = None
        # A thread for each processor, in the order of their numbers.
        self._bound: dict[int, ThreadPoolExecutor] = {}
        self._device_thread: DetachedThread | None = None

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run ``work(cancelled)`` in a thread. ``cancelled()`` is true once the caller was cancelled."""
        return (await _run_all([(self._threads(), work)], []))[0]

    async def copy(self, pairs: Pairs, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Copy in several threads, or by a device; returns false if ``cancelled()`` ended it early.

        No work that is queued on a CUDA device may use these tensors: call :meth:`settle` before.

        Raises:
            InvalidArgumentError: the shapes of a pair differ, or a source's memory was freed.
        """
        queued = queue_copy(pairs)
        if queued is not None:
            await self._finish(queued)
            return not cancelled()
        plain, rest = split_plain(pairs)
        if nbytes_of(destination for destination, _ in plain) >= _LONG_COPY:
            await _free_processors()
        lanes = copy_lanes(plain, min(self._lanes, processors()))
        submitted: list[Future[bool]] = []

        def run(lane: Lane, gone: Callable[[], bool]) -> bool:
            return lane(lambda: gone() or cancelled())

        def run_one(lane: Lane, gone: Callable[[], bool]) -> bool:
            whole = run(lane, gone)
            if whole:  # the lanes that have not begun, since their processors are busy, have nothing to do
                for other in submitted[: len(lanes)]:
                    other.cancel()
            return whole

        works = [
            (threads, partial(run_one, lane))
            for threads, lane in zip(self._threads_of(len(lanes)), lanes, strict=True)
        ]
        if rest:
            works.append((self._threads(), partial(run, partial(copy_with_torch, rest, settled=True))))
        copied = await _run_all(works, submitted)
        return all(copied)

    async def _finish(self, queued: QueuedCopies) -> None:
        """Wait until a device has done a copy; returns or raises only then, as :meth:`run`."""
        try:
            until = time.perf_counter() + _SOON
            while not queued.are_done():
                if time.perf_counter() > until:
                    await self.run(lambda _: queued.wait())
                    return
        except BaseException:  # the system starts no more threads, or Ctrl-C
            if not queued.waited:
                queued.wait()
            raise

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_LANES, thread_name_prefix=self._name)
        return self._executor

    def _threads_of(self, lanes: int) -> Sequence[ThreadPoolExecutor]:
        """Return where to run each lane of a copy.

        With as many lanes as processors, each lane has a processor. Linux may leave two threads on one
        processor, for as long as the copy takes.
        """
        allowed = allowed_processors()
        if lanes < 2 or lanes != len(allowed):
            return [self._threads()] * lanes
        if list(self._bound) != allowed:
            self._end_bound(wait=False)
            for number in allowed:
                self._bound[number] = ThreadPoolExecutor(1, self._name, bind_thread, (number,))
        return list(self._bound.values())

    def _end_bound(self, *, wait: bool) -> None:
        for thread in self._bound.values():
            thread.shutdown(wait=wait)
        self._bound.clear()

    async def settle(self, devices: Collection[torch.device]) -> None:
        """Wait until these CUDA devices have done all work queued so far, in every stream.

        That may take long, or for ever: a kernel may wait for another machine. So a cancelled caller does not
        wait for the thread.
        """
        if not are_idle(devices):
            if self._device_thread is None:
                self._device_thread = DetachedThread("aiosync-device")
            await detached(self._device_thread, partial(_settle, devices))

    async def settle_until(self, devices: Collection[torch.device], deadline: Deadline) -> None:
        """As :meth:`settle`. Raise SyncTimeoutError if the deadline passes before."""
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.settle(devices)
        except TimeoutError:
            hint = "the device has not done what was queued there before this call"
            raise deadline.error("stage", hint=hint) from None

    def close(self) -> None:
        """End the threads and wait for them; idempotent. No work may be running."""
        if self._device_thread is not None:
            self._device_thread.close()
            self._device_thread = None
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        self._end_bound(wait=True)


async def _free_processors() -> None:
    """End OpenMP threads that spin after the caller's work."""
    release_openmp_threads()
    release = release_callers_threads.get(None)
    if release is not None:
        await asyncio.wait([asyncio.wrap_future(release())], timeout=_SPINNING)


async def _run_all(
    works: Sequence[tuple[ThreadPoolExecutor, Callable[[Callable[[], bool]], T]]], submitted: list[Future[T]]
) -> list[T]:
    """Run each ``work(cancelled)`` in a thread of its executor. Append their futures to ``submitted``. Return
    the results of those that were not cancelled there before they began."""
    gone = threading.Event()
    futures: list[asyncio.Future[T]] = []
    try:
        for threads, work in works:
            submitted.append(threads.submit(_run, work, gone))
            futures.append(asyncio.wrap_future(submitted[-1]))
        if futures:
            await asyncio.wait(futures)
    except BaseException:  # cancelled, or the system starts no more threads
        gone.set()
        for future in futures:
            await _outlast(future)
        raise
    return [future.result() for future in futures if not future.cancelled()]


def _run(work: Callable[[Callable[[], bool]], T], gone: threading.Event) -> T:
    try:
        return work(gone.is_set)
    finally:
        # As long as a second thread has OpenMP threads, those of the trainer do not spin: its own work, which
        # they wait for, would take up to half as long again.
        release_openmp_threads()


def _settle(devices: Collection[torch.device]) -> None:
    with sharing():
        wait_for_devices(devices)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Run ``work()`` in a daemon thread; returns the thread. The process exits without waiting for it."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


async def offloaded(work: Callable[[], T], name: str) -> T:
    """Run ``work()`` in a new thread and return its result, as :meth:`Offloader.run` does."""
    with closing(Offloader(name)) as offloader:
        return await offloader.run(lambda _: work())


async def uninterrupted(work: Callable[[Callable[[], bool]], Coroutine[Any, Any, T]]) -> T:
    """Await ``work(cancelled)`` until it ends, even if the caller is cancelled.

    A cancelled caller gets its ``CancelledError`` when the work has ended. The work itself is not cancelled.
    It may call ``cancelled()`` and return early from a point that it chooses.
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
    # A task can be cancelled again while it waits. The work still runs, so the wait continues.
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # marks the exception as retrieved: the cancelled caller will not await it


def handover() -> tuple[asyncio.Future[T], Callable[[Callable[[], T]], None]]:
    """Make a future of the running loop, and ``resolve(work)``, by which another thread resolves it.

    ``resolve`` calls ``work()`` and gives its result or exception to the future. If the future is done or the
    loop is closed, the result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(_retrieve)

    def put(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            set_outcome(outcome)

    def resolve(work: Callable[[], T]) -> None:
        try:
            value = work()
        except Exception as exc:  # noqa: BLE001 - raised where it is awaited
            post(loop, put, future.set_exception, exc)
        else:
            post(loop, put, future.set_result, value)

    return future, resolve


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call ``callback(*args)`` on ``loop``, from any thread; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return


async def abandonable(work: Callable[[], T], name: str) -> T:
    """Run ``work()`` in a new daemon thread and return its result. A cancelled caller does not wait for it.

    Use it for calls that cannot be interrupted, end by themselves and use none of this package's memory.
    """
    future: asyncio.Future[T]
    future, resolve = handover()
    start_thread(partial(resolve, work), name)
    return await future


def call_when_done(future: Future[T], callback: Callable[[Future[T]], None]) -> None:
    """Call ``callback(future)`` on the running loop once ``future`` is done, unless the loop is closed."""
    future.add_done_callback(partial(post, asyncio.get_running_loop(), callback))


_detached: weakref.WeakSet[DetachedThread] = weakref.WeakSet()

# Lower than the finalizers that close schemes, which may still send a frame. Higher than
# multiprocessing's join of its children, which may be waiting for that frame.
_EXIT_PRIORITY = 500


@cache
def _watch_exit(pid: int) -> None:
    """Register the finalizer that ends the detached threads of this process, ``pid``."""
    # Children of multiprocessing exit without running atexit. They run finalizers, but a forked child starts
    # with none, so each process registers its own.
    Finalize(None, _end_detached, exitpriority=_EXIT_PRIORITY)


def _end_detached() -> None:
    until = time.monotonic() + _LAST_WAIT
    for thread in list(_detached):
        thread._end(until)


class DetachedThread:
    """A thread for uninterruptible calls into a library that waits for other machines; one call at a time.

    :meth:`close` does not wait: the thread ends when its running call returns. The interpreter's exit does
    wait, up to :data:`_LAST_WAIT` seconds: a thread that returns from such a call into a finalized
    interpreter crashes the process.
    """

    def __init__(self, name: str) -> None:
        # Makes the running call return; called at the interpreter's exit. None: there is no way to.
        self.wake: Callable[[], object] | None = None
        self._closed = False
        self._name = name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work()``; returns the future of its result. After :meth:`close` the future has an error."""
        if self._thread is None and not self._closed:
            self._thread = start_thread(self._run, self._name)
            _detached.add(self)
            _watch_exit(os.getpid())
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(RuntimeError("this thread is closed"))
        else:
            self._jobs.put((future, work))
        return future

    def close(self) -> None:
        """Run the queued work, then end. Does not wait."""
        self._closed = True
        self._jobs.put(None)

    def _end(self, until: float) -> None:
        """Close at the interpreter's exit, and wait for the thread until ``until`` on the monotonic clock."""
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
            del job, future, work  # release what they refer to now, not when the next job arrives


async def detached(thread: DetachedThread, work: Callable[[], T]) -> T:
    """Queue ``work()`` in ``thread`` and return its result. A cancelled caller does not wait for it."""
    future = asyncio.wrap_future(thread.submit(work))
    future.add_done_callback(_retrieve)
    await asyncio.wait([future])
    return future.result()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future whose caller was cancelled, so that asyncio logs no warning."""
    if not future.cancelled():
        future.exception()
