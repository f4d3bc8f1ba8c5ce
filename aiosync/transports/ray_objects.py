"""Versions in Ray's object store: put there once, and handed to actors, which read them where they lie.

A sender puts a version, hands the reference to each actor by a call of it, and lets it go. Only then is the
worker told of the version, so when it looks what it was told of is here.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.transports.ray_calls import ray_here

__all__ = ["Inbox", "hand_over", "put"]

_lock = threading.Lock()
_given: dict[str, tuple[int, Any]] = {}
"""Sender's name for a worker -> number of the version, and the reference to it."""


class Inbox:
    """What is kept here for workers of this process, as long as there is one."""

    def __init__(self) -> None:
        with _lock:
            _open.add(self)

    def take(self, name: str, number: int) -> Tensor:
        """What was handed over: a 1-D uint8 tensor in the object store's memory. Blocking.

        Raises:
            ProtocolError: nothing was.
            ray.exceptions.RayError: it is lost.
        """
        with _lock:
            found, ref = _given.pop(name, (-1, None))
        if found != number:
            raise ProtocolError(
                "an update lies in an object that was not handed to this process: workers have to be actors "
                "that init_on_sender(actors=) was given, or data_plane= another"
            )
        return _as_tensor(ray_here().get(ref))

    def close(self) -> None:
        """Nothing is taken any more; idempotent."""
        with _lock:
            _open.discard(self)
            if not _open:
                _given.clear()


_open: weakref.WeakSet[Inbox] = weakref.WeakSet()


def hand_over(_: Any, name: str, number: int, refs: list[Any]) -> bool:
    """Called by the sender, in an actor's process: keep a version for a worker; false if there is none."""
    with _lock:
        if not _open:
            return False
        _given[name] = number, refs[0]
        return True


def put(buffer: Tensor, tensor_transport: str) -> Any:
    """Put a 1-D uint8 tensor in the object store; gives the reference. Blocking."""
    ray = ray_here()
    if tensor_transport == "object_store":
        # An array's bytes go there as they are; a tensor would be pickled.
        return ray.put(buffer.numpy())
    return ray.put(buffer, _tensor_transport=tensor_transport)


def _as_tensor(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        return found
    # Without a copy. The store's memory is marked read-only, of which torch has no notion: parameters that
    # view it are read only by contract.
    memory = (ctypes.c_uint8 * found.nbytes).from_address(found.ctypes.data)
    memory.owner = found
    return torch.frombuffer(memory, dtype=torch.uint8) if found.nbytes else torch.empty(0, dtype=torch.uint8)
