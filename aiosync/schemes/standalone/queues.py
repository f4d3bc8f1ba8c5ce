"""The rendezvous over a queue of the caller's: the sender puts its address, the worker takes it.

The queue carries no weights. The sender puts a recipe of a private scheme, which has the address of a Unix
socket and a token. It puts one before each send while the worker is not connected and the queue is empty, so
that a worker that was started again finds one too. A worker drops the recipe of a sender that is gone, and
waits for the next one. ``multiprocessing`` pickles the message, as everything in its queues; only processes
that inherited the queue can write to it.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from contextlib import suppress
from queue import Empty, Full
from typing import Any

from aiosync.errors import InvalidArgumentError
from aiosync.schemes.shared_memory import SharedMemWeightSyncScheme
from aiosync.transfer.base import Transfer
from aiosync.transfer.mapped import PrivatelyMappedTransfer
from aiosync.transports._offload import abandonable

_WAKE = "aiosync: wake"  # ends a thread that waits for a message
_LOCKED = 0.05  # seconds until a message is tried again that another process is reading


class PrivateCopyScheme(SharedMemWeightSyncScheme):
    """Shared memory that the worker maps copy-on-write or copies, as with the multiprocessing scheme."""

    def _make_transfer(self) -> Transfer:
        return PrivatelyMappedTransfer()


def check_queue(name: str, queue: Any) -> None:
    """Raise InvalidArgumentError if ``queue`` has no ``put``, ``get`` and ``empty``."""
    if not all(callable(getattr(queue, method, None)) for method in ("put", "get", "empty")):
        raise InvalidArgumentError(
            f"{name}: expected a multiprocessing queue, or an object with put(), get() and empty(), "
            f"got {type(queue).__name__}"
        )


def announce(queue: Any, scheme: SharedMemWeightSyncScheme, *, first: bool) -> None:
    """Put a recipe of ``scheme``, the sender's, into a queue, unless an earlier one is still in it."""
    if not first and not queue.empty():
        return
    recipe = copy.copy(scheme)  # a queue of this process does not pickle it
    with suppress(Full):
        if callable(getattr(queue, "put_nowait", None)):
            queue.put_nowait(recipe)
        else:
            queue.put(recipe)


async def take_recipe(queue: Any) -> SharedMemWeightSyncScheme:
    """Wait for the recipe of a sender, without a limit. Cancelled, it loses no message.

    Raises:
        InvalidArgumentError: the message is none of ours.
    """
    while True:
        message = await (_take(queue) if hasattr(queue, "_reader") else _take_in_thread(queue))
        if isinstance(message, SharedMemWeightSyncScheme):
            return message
        if message != _WAKE:
            raise InvalidArgumentError(
                f"expected the address of an aiosync transport in the queue, got {message!r:.80}: both sides "
                "need an aiosync transport, and nothing else may use the queue"
            )


async def _take(queue: Any) -> Any:
    """Wait for a message of a multiprocessing queue, by its descriptor."""
    loop = asyncio.get_running_loop()
    fd = os.dup(queue._reader.fileno())  # multiprocessing has no public access to it
    try:
        while True:
            ready = asyncio.Event()
            loop.add_reader(fd, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(fd)
            with suppress(Empty):
                return _get_nowait(queue)
            await asyncio.sleep(_LOCKED)
    finally:
        os.close(fd)


def _get_nowait(queue: Any) -> Any:
    if callable(getattr(queue, "get_nowait", None)):
        return queue.get_nowait()
    if queue.empty():
        raise Empty
    return queue.get()


async def _take_in_thread(queue: Any) -> Any:
    """Wait for a message of any other queue, in a thread. A cancellation wakes the thread."""
    gone = threading.Event()

    def take() -> Any:
        message = queue.get()
        if gone.is_set() and message != _WAKE:
            queue.put(message)  # for the next reader
        return message

    try:
        return await abandonable(take, "aiosync-queue")
    except BaseException:
        gone.set()
        queue.put(_WAKE)
        raise
