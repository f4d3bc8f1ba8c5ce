"""Threads. Only this module and the blocking twins' portal start threads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from aiosync._processors import shorten_time_slices
from aiosync.weights.copying import Lane, Pairs, copy_lanes
from aiosync.weights.devices import sharing, wait_for_devices

T = TypeVar("T")

_LAST_WAIT = 2.0  # seconds that the interpreter's exit waits for detached threads, all together
_SENT_AT_ONCE = 4  # sends of one turn that do not wait for the turn's end
_CALLS_AT_ONCE = 64  # calls for other threads between which the loop does nothing else
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
        self._device_thread: DetachedThread | None = None

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run ``work(cancelled)`` in a thread. ``cancelled()`` is true once the caller was cancelled."""
        return (await self._run_all([work]))[0]

    async def copy(self, pairs: Pairs, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Copy in several threads; returns false if ``cancelled()`` ended it early."""

        def run(lane: Lane, gone: Callable[[], bool]) -> bool:
            return lane(lambda: gone() or cancelled())

        lanes = copy_lanes(pairs, self._lanes)
        return all(await self._run_all([partial(run, lane) for lane in lanes]))

    async def settle(self, devices: Collection[torch.device]) -> None:
        """Wait until these CUDA devices have done all work queued so far, in every stream.

        That may take long, or for ever: a kernel may wait for another machine. So a cancelled caller does not
        wait for the thread.
        """
        if devices:
            if self._device_thread is None:
                self._device_thread = DetachedThread("aiosync-device")
            await detached(self._device_thread, partial(_settle, devices))

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
        """End the threads and wait for them; idempotent. No work may be running."""
        if self._device_thread is not None:
            self._device_thread.close()
            self._device_thread = None
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


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


class Mailbox:
    """Calls functions on the running loop for ``thread``, in order. One wake-up serves many calls.

    The thread wakes the loop when its own turn has ended. If it woke the loop for the first of many calls,
    the loop would take the interpreter from the thread at once, for one call.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self.loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        # Whether the loop is about to run the calls.
        self._woken = False

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)`` on the loop, from any thread; does nothing if the loop is closed."""
        self._calls.append((function, args))
        # The loop resets this before it looks for calls, so the call above is never left behind.
        if self._woken:
            return
        self._woken = True
        if self._thread.is_current:
            self._thread.loop.call_soon(self.wake)
        else:
            self.wake()

    def wake(self) -> None:
        """Have the loop run the calls now."""
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            self._woken = False
            self._calls.clear()

    def _run(self) -> None:
        try:
            self._woken, calls = False, self._calls
            for _ in range(min(len(calls), _CALLS_AT_ONCE)):
                function, args = calls.popleft()
                function(*args)
        finally:
            # Also after an error of a call, and after Ctrl-C: the loop may be run again.
            if self._calls:
                self._woken = True
                self.loop.call_soon(self._run)


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


class TurnOfSends:
    """What one turn of the running loop sends over the connections of ``thread``.

    The caller does the first few sends at once, which is fastest for few workers. The thread does the others
    in a row when the turn has ended. So the loop is not kept from its other work, and the two threads do not
    pass the interpreter to and fro for each send.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._later: list[Callable[[], None]] = []

    def add(self, send: Callable[[], None]) -> None:
        """Call ``send()`` now, or soon in the thread. Call this on the loop."""
        if self._count == 0:
            self._loop.call_soon(self._end)
        self._count += 1
        if self._count <= _SENT_AT_ONCE:
            send()
        else:
            self._later.append(send)

    def hand_over(self) -> None:
        """Have the thread make the calls so far, although the turn goes on. It may last long: a trainer may
        compute on its loop after a send that does not wait."""
        if self._later:
            later, self._later = self._later, []
            self._thread.call(_call_all, later)

    def _end(self) -> None:
        self._count = 0
        self.hand_over()


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


class LoopThread:
    """An event loop in its own thread. Its connections move bytes while the caller's loop is busy.

    The endpoint that owns the thread closes it. ``loop`` may be used only in the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._thread = start_thread(self._run, name)
        self._closed = False
        self._shared: tuple[Mailbox, TurnOfSends] | None = None

    def shared(self) -> tuple[Mailbox, TurnOfSends]:
        """Return what all connections of the running loop share, towards that loop and towards the thread."""
        if self._shared is None or self._shared[0].loop is not asyncio.get_running_loop():
            self._shared = Mailbox(self), TurnOfSends(self)
        return self._shared

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        shorten_time_slices()
        self.loop.run_forever()
        if self._shared is not None:
            self._shared[0].wake()  # the last turn may have posted calls

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Call ``function(*args)`` in the thread, after earlier calls; returns false if it has ended."""
        if self._closed:
            return False
        self.loop.call_soon_threadsafe(function, *args)
        return True

    def close(self) -> None:
        """Run the calls queued so far, which do not block, and wait for the thread's end; idempotent."""
        if not self._closed:
            self._closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


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
