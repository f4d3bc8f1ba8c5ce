"""CUDA devices: when their memory may be read or written, and pinned memory for copies to and from them.

A call of torch only queues work on a CUDA device. When it returns, the device may not have begun: an
optimizer step has not changed the weights yet, a forward pass has not read them yet. Work in one stream does
not wait for work in another one, and each thread begins with the default stream. So before this package reads
or writes a device's memory, or lets another process write it, it waits until the device has done all that was
queued, in every stream (:func:`wait_for_devices`).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_WORTH_PINNING = 1 << 20
"""Memory of this many bytes or more is pinned before it is copied to or from a device."""

_pinnable: WeakValueDictionary[int, memoryview] = WeakValueDictionary()
"""Address -> the mapped memory there, until it is pinned."""


UNDISTURBED = threading.RLock()
"""Held by a thread of this package while it uses a device, and by whoever captures a CUDA graph: calls of
other threads make a capture fail."""


def cuda_devices(tensors: Iterable[Tensor]) -> frozenset[torch.device]:
    """Return the CUDA devices that the tensors are on."""
    return frozenset({tensor.device for tensor in tensors if tensor.is_cuda})


def wait_for_devices(devices: Collection[torch.device]) -> None:
    """Wait until these CUDA devices have done all work queued by this process so far, in every stream.

    Blocking. The GIL is released meanwhile.
    """
    if devices:
        with UNDISTURBED:
            for device in devices:
                torch.cuda.synchronize(device)


@contextmanager
def copying_on(devices: Collection[torch.device]) -> Iterator[None]:
    """Copy to, from and between these CUDA devices in the body. On exit the copies are done.

    Waits for the devices first. The copies have a stream of their own, so they do not wait for work that is
    queued meanwhile. Blocking.
    """
    if not devices:
        yield
        return
    with UNDISTURBED, ExitStack() as streams:
        wait_for_devices(devices)
        for device in devices:
            streams.enter_context(torch.cuda.stream(_stream_of(device)))
        try:
            yield
        finally:
            for device in devices:
                _stream_of(device).synchronize()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def as_tensor(memory: mmap.mmap) -> Tensor:
    """Return mapped memory as a 1-D ``uint8`` tensor, which keeps it mapped and can be pinned.

    Not for memory that is mapped copy-on-write: pinning would copy all its pages.
    """
    view = memoryview(memory)
    buffer = torch.frombuffer(view, dtype=torch.uint8)
    _pinnable[buffer.data_ptr()] = view  # lives as long as the tensors over it
    return buffer


def pin_memory_of(buffer: Tensor) -> None:
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
    with UNDISTURBED:
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
