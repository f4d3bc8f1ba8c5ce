"""Process groups of torch.distributed that only a sender and its workers are in.

They are independent of the process's other groups, and not registered: ``torch.distributed.is_initialized()``
does not change. A group of two serves one worker. So another worker's death does not break it, and a worker
that connects later gets its own group. A larger group is for broadcasts.

States: NEW → JOINED → CLOSED, or NEW → CLOSED.
The group's thread makes the group at the first use, uses it and drops it. When a member drops the group, its
connections close, and pending calls of the other members raise. So a blocked rank is released by another
rank, or by the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiosync.errors import InvalidArgumentError, WorkerLostError
from aiosync.transports._offload import DetachedThread
from aiosync.transports.torch_distributed.store import first_line

BUCKET = 8 << 20  # bytes of one message. Small enough that copying, sending and receiving overlap
_JOIN = 30.0  # most seconds that the other member has to join a group of two

STALLED = 10.0
"""Most seconds that a message of a broadcast takes, and that all members have to join its group. Longer means
that a rank is suspended or dead, and its thread must not keep the others' threads."""


def check_backend(backend: str) -> None:
    """Raise InvalidArgumentError if this build of torch does not have ``backend``."""
    # A build without torch.distributed does not have is_..._available().
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        raise InvalidArgumentError(f"backend={backend!r}: this build of torch does not have it")


def device_of(backend: str) -> torch.device:
    """Return the device that ``backend`` sends from and receives into."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(eq=False, repr=False)
class ProcessGroupMember:
    """One member of a process group. Rank 0 sends, the other ranks receive."""

    backend: str  # "gloo" or "nccl"
    store: Callable[[], Any]  # connects to the members' common store; called in the group's thread
    key: str  # the group's name in the store, the same for all members and unique to the group
    rank: int  # 0 on the sender
    size: int = 2  # two members use send and recv, more use broadcast
    _: KW_ONLY
    timeout: float  # seconds that one message may take

    steps: int = field(default=0, init=False)  # members that have joined, and messages that were started
    moved: int = field(default=0, init=False)  # bytes sent or received so far
    _group: Any = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._thread = DetachedThread("aiosync-ranks")

    def send(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> Future[None]:
        """Send a 1-D uint8 buffer, on rank 0. The other side receives with the same tag.

        ``ready(n)``, called in the thread, returns when the first ``n`` bytes of the buffer are written.
        """
        return self._thread.submit(lambda: self._move(buffer, tag, ready))

    def receive(self, buffer: Tensor, tag: int) -> Future[None]:
        """Receive into a 1-D uint8 buffer what rank 0 sends."""
        return self._thread.submit(lambda: self._move(buffer, tag, lambda _: None))

    def close(self) -> None:
        """Drop the group after the queued messages; idempotent. Does not wait."""
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
            broken = first_line(exc)
        if broken:
            # Not within the handler: there the exception refers to frames that hold the group, which would
            # not be destroyed, and the other members would go on waiting. Queued messages must not be moved
            # either.
            self._drop()
            raise WorkerLostError((), f"its process group ({self.backend}) broke: {broken}")

    def _move_all(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> None:
        group = self._joined()
        works, end = [], 0
        for bucket in buffer.split(BUCKET):
            end += bucket.numel()
            ready(end)
            works.append((self._start(group, bucket, tag), bucket.numel()))
            self.steps += 1
        for work, nbytes in works:
            work.wait(timedelta(seconds=self.timeout))
            self.moved += nbytes
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # before that the copy is only queued

    def _start(self, group: Any, bucket: Tensor, tag: int) -> Any:
        if self.size > 2:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            if self.backend == "gloo":  # NCCL counts from when a message is queued
                options.timeout = timedelta(seconds=min(self.timeout, STALLED))
            return group.broadcast([bucket], options)
        return group.send([bucket], 1, tag) if self.rank == 0 else group.recv([bucket], 0, tag)

    def _joined(self) -> Any:
        """Return the group. The first call makes it, together with the other members."""
        if self._group is None:
            prefix, store = f"aiosync/ranks/{self.key}", self.store()
            rendezvous = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
            self._group = self._make(rendezvous)
            token = torch.zeros(1, dtype=torch.uint8, device=device_of(self.backend))
            if self.rank == 0:
                for other in range(1, self.size):
                    self._group.recv([token], other, 0).wait()
                    self.steps += 1
                with suppress(RuntimeError):  # some stores cannot list or delete keys; a few bytes stay
                    for key in rendezvous.list_keys():
                        rendezvous.delete_key(key)
            else:
                self._group.send([token], 0, 0).wait()
        return self._group

    def _make(self, store: Any) -> Any:
        limit = timedelta(seconds=min(self.timeout, _JOIN))
        if self.backend == "gloo":
            if self.size > 2:
                limit = timedelta(seconds=min(self.timeout, STALLED))
            return dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _drop(self) -> None:
        self._group = None
