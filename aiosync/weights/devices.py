"""CUDA devices: when their memory may be read or written, and pinned memory for copies to and from them.

A call of torch only queues work on a CUDA device, in a stream. When it returns, the device may not have
begun: an optimizer step has not changed the weights yet, a forward pass has not read them yet. Work in one
stream does not wait for work in another one, and each thread begins with the default stream. So before this
package reads or writes a device's memory, or lets another process write it, it waits until the device has
done all that was queued, in every stream of torch's (:func:`wait_for_devices`).

A stream that captures a CUDA graph is not waited for: it runs nothing, and the wait would end the capture
with an error. So the device as a whole is never waited for either.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_POOL = 32
"""Streams that torch has for each priority; ``torch.cuda.Stream()`` returns them in turn."""

_pinnable: WeakValueDictionary[int, memoryview] = WeakValueDictionary()
"""Address -> the mapped memory there, until it is pinned."""


class _Use:
    """Threads of this package that use devices, and a thread that captures a CUDA graph: calls of the others
    would make the capture fail. Reentrant."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._count = 0
        self._capturing: int | None = None  # the thread

    @contextmanager
    def shared(self, *, wait: bool = True) -> Iterator[bool]:
        """Use devices in the body; before it, wait for a capture in another thread.

        Without ``wait``: yield False if a thread captures. Then the body may not use devices.
        """
        with self._changed:
            others = (None, threading.get_ident())
            free = self._changed.wait_for(lambda: self._capturing in others, None if wait else 0)
            self._count += free
        try:
            yield free
        finally:
            with self._changed:
                self._count -= free
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Capture in the body; before it, wait for the other threads."""
        with self._changed:
            self._changed.wait_for(lambda: self._capturing is None and not self._count)
            self._capturing = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._capturing = None
                self._changed.notify_all()


_uses = [_Use()]


def _use() -> _Use:
    if _uses[-1].pid != os.getpid():
        _uses.append(_Use())  # a forked child has none of the threads
    return _uses[-1]


def undisturbed() -> AbstractContextManager[None]:
    """Capture a CUDA graph in the body: no thread of this package uses a device meanwhile."""
    return _use().alone()


def sharing() -> AbstractContextManager[object]:
    """Use devices in the body, in a thread: not while a CUDA graph is captured."""
    return _use().shared()


@contextmanager
def using(device: torch.device) -> Iterator[None]:
    """Use a CUDA device in the body, from any thread; as the current device, as for others CUDA would make a
    context. On exit the device that was current is so again."""
    with sharing(), torch.cuda.device(device):
        yield


def cuda_devices(tensors: Iterable[Tensor]) -> frozenset[torch.device]:
    """Return the CUDA devices that the tensors are on."""
    return frozenset({tensor.device for tensor in tensors if tensor.is_cuda})


def wait_for_devices(devices: Collection[torch.device]) -> None:
    """Wait until these CUDA devices have done all work that this process has queued, in torch's streams.

    Blocking. The GIL is released meanwhile.
    """
    for device in devices:
        with torch.cuda.device(device):
            for stream in _streams_that_run(device):
                if not stream.query():
                    stream.synchronize()


def are_idle(devices: Collection[torch.device]) -> bool:
    """Return whether these CUDA devices have done all work that this process has queued, in torch's streams.

    Takes 1.3 to 3 us for each stream, of which there are 129 on a GPU with four priorities. To have a thread
    wait for them takes several times as long. Does not block: while a thread captures a CUDA graph, it
    returns False.
    """
    if not devices:
        return True
    with _use().shared(wait=False) as free:
        return free and _have_done(devices)


def _have_done(devices: Collection[torch.device]) -> bool:
    for device in devices:
        with torch.cuda.device(device):
            if not all(stream.query() for stream in _streams_that_run(device)):
                return False
    return True


def _streams_that_run(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Torch's streams of the current device, without those that capture a CUDA graph."""
    ask, status = _ask_for_capture(), ctypes.c_int(0)
    place = ctypes.byref(status)
    for stream, handle in _streams_of(device):
        if handle is None:  # the default stream, which cannot capture
            yield stream
        elif ask is None or ask(handle, place):  # torch raises CUDA's error
            if not _captures(stream):
                yield stream
        elif not status.value:
            yield stream


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@cache
def _ask_for_capture() -> Callable[..., int] | None:
    """CUDA's ``cudaStreamIsCapturing``; None if it cannot be called.

    torch answers for the current stream only, and for all streams that takes three times as long.
    """
    try:
        function: Callable[..., int] = ctypes.PyDLL(None).cudaStreamIsCapturing
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None
    return function


@cache
def _streams_of(device: torch.device) -> list[tuple[torch.cuda.Stream, ctypes.c_void_p | None]]:
    """All streams that torch has on a device, each with its handle; None for the default stream."""
    streams = {torch.cuda.default_stream(device): None}  # the first one that is asked: most work is in it
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
    for priority in range(least, greatest - 1, -1):  # a greater priority is a smaller number
        wanted = len(streams) + _POOL
        for _ in range(4 * _POOL):  # more than one round: other threads may take some
            if len(streams) < wanted:
                streams[torch.cuda.Stream(device, priority)] = None
    handles = ((stream, stream.cuda_stream) for stream in streams)
    return [(stream, ctypes.c_void_p(handle) if handle else None) for stream, handle in handles]


class QueuedCopies:
    """Copies in the streams of this package's copies, one stream on each of some CUDA devices.

    Keep this object until they are done: it has the tensors. Torch would give freed memory to other work,
    as it does not know that these streams use it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = [_stream_of(device) for device in devices]
        self._tensors: list[Tensor] = []
        self.waited = False  # until they were done

    def add(self, destinations: list[Tensor], sources: list[Tensor], *, non_blocking: bool) -> None:
        """Copy these tensors, in the body of :func:`copying_on` or :func:`queueing_on`."""
        self._tensors += destinations + sources
        self.waited = False
        torch._foreach_copy_(destinations, sources, non_blocking=non_blocking)

    def are_done(self) -> bool:
        """Return whether the devices have done them. Does not block, as :func:`are_idle`."""
        with _use().shared(wait=False) as free:
            return free and all(stream.query() for stream in self._streams)

    def wait(self) -> None:
        """Wait until the devices have done them. Blocking."""
        if self._streams:
            with sharing():
                for stream in self._streams:
                    stream.synchronize()
        self._tensors.clear()
        self.waited = True

    @contextmanager
    def in_their_streams(self) -> Iterator[None]:
        """What is queued in the body goes to these streams. If the body raises, wait for it."""
        try:
            with ExitStack() as stack:
                for stream in self._streams:
                    stack.enter_context(torch.cuda.device(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                yield
        except BaseException:
            self.wait()
            raise


@contextmanager
def copying_on(devices: Collection[torch.device], *, settled: bool = False) -> Iterator[QueuedCopies]:
    """Copy to, from and between these CUDA devices in the body. On exit the copies are done.

    Waits for the devices first. The copies have a stream of their own, so they do not wait for work that is
    queued meanwhile. Blocking.

    Args:
        devices: the devices of all tensors that are copied.
        settled: the caller has waited for the devices, and nothing that was queued since uses the memory.
    """
    if not devices:
        yield QueuedCopies(())
        return
    with sharing():
        if not settled:
            wait_for_devices(devices)
        copies = QueuedCopies(devices)
        with copies.in_their_streams():
            yield copies
        copies.wait()


@contextmanager
def queueing_on(devices: Collection[torch.device]) -> Iterator[QueuedCopies | None]:
    """Queue copies to, from and between these CUDA devices in the body, as :func:`copying_on`. Does not wait:
    the devices are settled.

    Yields None while a thread captures a CUDA graph: then the body may not use a device.
    """
    with _use().shared(wait=False) as free:
        if not free:
            yield None
            return
        copies = QueuedCopies(devices)
        with copies.in_their_streams():
            yield copies


_own_streams: dict[torch.device, torch.cuda.Stream] = {}
"""For copies, one on each CUDA device."""


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    # setdefault: two threads may come here first.
    return _own_streams.get(device) or _own_streams.setdefault(device, torch.cuda.Stream(device))


def allocate_on(device: torch.device, nbytes: int) -> Tensor:
    """Return zeroed memory of a CUDA device, 1-D ``uint8``, without waiting for what is queued there."""
    with using(device), torch.cuda.stream(_stream_of(device)):
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device).zero_()
        _stream_of(device).synchronize()  # the zeros must not be written over an update
    return buffer


def as_tensor(memory: mmap.mmap) -> Tensor:
    """Return mapped memory as a 1-D ``uint8`` tensor, which keeps it mapped and can be pinned.

    Not for memory that is mapped copy-on-write: pinning would copy all its pages.
    """
    view = memoryview(memory)
    buffer = torch.frombuffer(view, dtype=torch.uint8)
    _pinnable[buffer.data_ptr()] = view  # lives as long as the tensors over it
    return buffer


def pin_memory_of(buffer: Tensor, device: torch.device) -> None:
    """Pin the memory that a 1-D ``uint8`` tensor of :func:`as_tensor` begins at; idempotent.

    A CUDA device copies to and from pinned memory several times as fast, and while this process goes on. Does
    nothing if the memory is not mapped, or if CUDA cannot pin it. Blocking: about 40 ms per GiB.
    """
    if not buffer.is_cpu:
        return
    address = buffer.data_ptr()
    view = _pinnable.pop(address, None)
    if view is None:
        return
    with using(device):
        pinned = _register(address, view.nbytes)
    if pinned:
        # The finalizer keeps the mapping until it has run. Unmapped before that, its pages would be used for
        # the next mapping at this address.
        weakref.finalize(view, _unregister, os.getpid(), address, view.obj).atexit = False


def _register(address: int, nbytes: int) -> bool:
    if int(_cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    # The error also stays behind for this thread's next call of CUDA, which would raise it.
    with suppress(Exception):
        torch.empty(1, device="cuda").zero_()
    return False


def _unregister(pid: int, address: int, memory: object) -> None:
    if pid == os.getpid():  # a forked child has no CUDA context
        with suppress(Exception):
            _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
