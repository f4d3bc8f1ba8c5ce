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

import mmap
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_WORTH_PINNING = 1 << 20
"""Memory of this many bytes or more is pinned before it is copied to or from a device."""

_POOL = 32
"""Streams that torch has for each priority; ``torch.cuda.Stream()`` returns them in turn."""

_PRIORITIES = (0, -1)

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
    def shared(self) -> Iterator[None]:
        """Use devices in the body; before it, wait for a capture in another thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._capturing in (None, threading.get_ident()))
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
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


def sharing() -> AbstractContextManager[None]:
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
            before = torch.cuda.current_stream()
            try:
                for stream in _streams_of(device):
                    torch.cuda.set_stream(stream)
                    if not torch.cuda.is_current_stream_capturing():
                        stream.synchronize()
            finally:
                torch.cuda.set_stream(before)


@cache
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    streams = {torch.cuda.default_stream(device)}
    for priority in _PRIORITIES:
        wanted = len(streams) + _POOL
        for _ in range(4 * _POOL):  # more than one round: other threads may take some
            if len(streams) < wanted:
                streams.add(torch.cuda.Stream(device, priority))
    return list(streams)


@contextmanager
def copying_on(devices: Collection[torch.device]) -> Iterator[None]:
    """Copy to, from and between these CUDA devices in the body. On exit the copies are done.

    Waits for the devices first. The copies have a stream of their own, so they do not wait for work that is
    queued meanwhile. Blocking.
    """
    if not devices:
        yield
        return
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(using(device))
        wait_for_devices(devices)
        for device in devices:
            stack.enter_context(torch.cuda.stream(_stream_of(device)))
        try:
            yield
        finally:
            for device in devices:
                _stream_of(device).synchronize()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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

    A CUDA device copies to and from pinned memory several times as fast. Does nothing if the memory is small,
    is not mapped, or if CUDA cannot pin it. Blocking: about 40 ms per GiB.
    """
    if not buffer.is_cpu or buffer.numel() < _WORTH_PINNING:
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
