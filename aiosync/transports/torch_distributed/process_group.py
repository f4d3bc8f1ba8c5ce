"""Process groups of torch.distributed for a sender and its workers alone.

They are made beside whatever groups the process is in, and registered nowhere: what
``torch.distributed.is_initialized`` says does not change. A group of two is one worker's: another's death
does not break it, and a worker that comes later gets one of its own. A group of more is for broadcasts.

States: NEW → JOINED → CLOSED; from NEW to CLOSED too. The group's thread makes it at the first use, uses
it and drops it. A group that was dropped closes its connections, and what the others are in the middle of
raises. So a rank that is stuck is freed by another rank, or by the group's own timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiosync.errors import InvalidArgumentError, WorkerLostError
from aiosync.transports._offload import DetachedThread

__all__ = ["BACKENDS", "BUCKET", "ProcessGroupMember", "check_backend", "device_of"]

BUCKET = 8 << 20
"""Bytes that are sent at once: so few that copying, sending and receiving go on at the same time."""

BACKENDS = ("gloo", "nccl")

_JOIN = 30.0
"""Seconds that the others have at most to join a group."""


def check_backend(backend: str) -> None:
    """Raise InvalidArgumentError if there is no such backend here."""
    if backend not in BACKENDS:
        raise InvalidArgumentError(f"backend={backend!r}: expected one of 'gloo', 'nccl'")
    # A build without torch.distributed has none of the other names.
    found = dist.is_available() and (
        dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()
    )
    if not found:
        raise InvalidArgumentError(f"backend={backend!r}: this build of torch does not have it")


def device_of(backend: str) -> torch.device:
    """Where weights have to be for this backend."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class ProcessGroupMember:
    """One member's part in a group. Bytes go from rank 0 to the others.

    Args:
        backend: of :data:`BACKENDS`.
        store: makes a connection to the store that all members know; called in the group's thread.
        key: the group's name in the store; all members have the same, and no other group has it.
        rank: 0 on the sender.
        size: how many members; with two it is send and receive, with more a broadcast.
        timeout: seconds that one call may take.

    Attributes:
        moved: bytes that have been sent or received.
    """

    def __init__(
        self,
        backend: str,
        store: Callable[[], Any],
        key: str,
        rank: int,
        size: int = 2,
        *,
        timeout: float,
    ) -> None:
        self.moved = 0
        self._backend = backend
        self._store = store
        self._key = key
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._thread = DetachedThread("aiosync-ranks")
        self._group: Any = None
        self._closed = False

    def send(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> Future[None]:
        """Send a buffer; on rank 0.

        Args:
            buffer: 1-D uint8.
            tag: of the message; the other side receives one with the same.
            ready: ``ready(n)`` sees to it that the first ``n`` bytes are there.
        """
        return self._thread.submit(lambda: self._move(buffer, tag, ready))

    def receive(self, buffer: Tensor, tag: int, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Fill a buffer with what rank 0 sends, once the work in ``after`` has ended."""

        def work() -> None:
            wait(after)
            self._move(buffer, tag, lambda _: None)

        return self._thread.submit(work)

    def close(self) -> None:
        """Drop the group when all that was asked for has been moved; idempotent. Does not wait for that."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._drop)
            self._thread.close()

    # -- in the thread -------------------------------------------------------------------------------

    def _move(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> None:
        broken = ""
        try:
            self._move_all(buffer, tag, ready)
        except RuntimeError as exc:
            broken = str(exc).splitlines()[0] if str(exc) else repr(exc)
        if broken:
            # Not from within the handler: what is raised there knows the frames that still hold the group,
            # and the others wait until that is gone. Nor must what is queued in it be moved any more.
            self._drop()
            raise WorkerLostError((), f"its process group ({self._backend}) broke: {broken}")

    def _move_all(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> None:
        group = self._joined()
        works, end = [], 0
        for bucket in buffer.split(BUCKET):
            end += bucket.numel()
            ready(end)
            works.append((self._begin(group, bucket, tag), bucket.numel()))
        for work, nbytes in works:
            work.wait(timedelta(seconds=self._timeout))
            self.moved += nbytes
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # until then it is only queued

    def _begin(self, group: Any, bucket: Tensor, tag: int) -> Any:
        if self._size > 2:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            return group.broadcast([bucket], options)
        return group.send([bucket], 1, tag) if self._rank == 0 else group.recv([bucket], 0, tag)

    def _joined(self) -> Any:
        """The group; the first time all members make it."""
        if self._group is None:
            half = dist.PrefixStore(  # type: ignore[attr-defined]
                f"aiosync/ranks/{self._key}", self._store()
            )
            self._group = self._make(half)
            token = torch.zeros(1, dtype=torch.uint8, device=device_of(self._backend))
            if self._rank == 0:
                for other in range(1, self._size):
                    self._group.recv([token], other, 0).wait()
                _forget(half)
            else:
                self._group.send([token], 0, 0).wait()
        return self._group

    def _make(self, store: Any) -> Any:
        limit = timedelta(seconds=min(self._timeout, _JOIN))
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(store, self._rank, self._size, limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    def _drop(self) -> None:
        self._group = None


def _forget(store: Any) -> None:
    """Delete what was needed to make a group."""
    with suppress(RuntimeError):  # a store that cannot list or delete keeps a few bytes
        for key in store.list_keys():
            store.delete_key(key)
