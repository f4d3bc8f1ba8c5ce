"""Process groups of torch.distributed that only a sender and its workers are in.

They are independent of the process's other groups, and not registered: ``torch.distributed.is_initialized()``
does not change. A group of two serves one worker. So another worker's death does not break it, and a worker
that connects later gets its own group. A larger group is for broadcasts.

States: NEW → JOINED → CLOSED, or NEW → CLOSED.
The group's thread makes the group at the first use, uses it and drops it. When a member drops the group, its
connections close, and pending calls of the other members raise. So a blocked rank is released by another
rank, or by the group's timeout. A rank of gloo that waits in the store for others to join is released by
:meth:`ProcessGroupMember.stop_joining`.

NCCL moves the bytes in one of torch's streams. While it waits there for a lost or suspended rank, each wait
for all streams waits too: those of this package, and ``torch.cuda.synchronize()``. So NCCL's calls are ended
when the rank is lost (:meth:`ProcessGroupMember.interrupt`), and after :data:`STALLED` otherwise.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiosync.errors import InvalidArgumentError, WorkerLostError
from aiosync.transports._offload import DetachedThread
from aiosync.transports.torch_distributed.store import CancellableStore, first_line
from aiosync.weights.devices import using

_BUCKETS = {"gloo": 4 << 20, "nccl": 8 << 20}
"""Most bytes of one message. Small enough that copying, sending and receiving overlap, and that gloo finds
what was copied in a cache. Smaller messages cost more processor time, which counts with several workers.
All members divide a version alike, so another size here needs another PROTOCOL_VERSION.
"""

_JOIN = 30.0  # most seconds that the other member has to join a group of two

_CONNECT = 0.2
"""gloo's timeout as a share of the time to join. It waits five times its timeout for each connection between
members, which are all there by then. If one of them dies at that moment, nothing ends the others' wait.
"""

STALLED = 10.0
"""Most seconds that a message of NCCL or of a broadcast takes, and that all members have to join a group for
broadcasts. Longer means that a rank is suspended or dead. It must not keep the others' threads and devices.
"""

_AHEAD = 4
"""Most messages of NCCL that are queued. It counts a message's time from when it is queued."""


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


_environment = threading.Lock()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """In the body, make NCCL groups that no thread of torch's watches.

    That thread may end the whole process when a rank is lost or takes too long. Without it the wait for a
    message raises. torch takes this from the environment only, so a group that another thread makes meanwhile
    has none either.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


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
    _interrupted: bool = field(default=False, init=False)
    _stream: torch.cuda.Stream | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._thread = DetachedThread("aiosync-ranks")
        most = STALLED if self.backend == "gloo" and self.size > 2 else _JOIN
        self._joining = timedelta(seconds=min(self.timeout, most))  # that the members have to join
        self._rendezvous = CancellableStore(partial(_part_of, self.key, self.store), self._joining)

    def send(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> Future[None]:
        """Send a 1-D uint8 buffer, on rank 0. The other side receives with the same tag.

        ``ready(n)``, called in the thread, returns when the first ``n`` bytes of the buffer are written.
        """
        return self._thread.submit(lambda: self._move(buffer, tag, ready))

    def receive(self, buffer: Tensor, tag: int) -> Future[None]:
        """Receive into a 1-D uint8 buffer what rank 0 sends."""
        return self._thread.submit(lambda: self._move(buffer, tag, lambda _: None))

    def interrupt(self) -> None:
        """End the calls of NCCL, and gloo's wait for members that have not joined: they raise. A message of
        gloo ends by its timeout. Idempotent; does not wait.

        The member cannot be used any more.
        """
        if not self._interrupted:
            self._interrupted = True
            self._rendezvous.cancel()
            if self.backend == "nccl":
                thread = DetachedThread("aiosync-ranks")  # the other one waits in the call
                thread.submit(partial(_abort, self._group))
                thread.close()

    def stop_joining(self) -> None:
        """End gloo's wait for members that have not joined: it raises. Idempotent; does not wait."""
        self._rendezvous.cancel()

    def close(self) -> None:
        """Drop the group after the queued messages; idempotent. Does not wait."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._leave)
            self._thread.close()

    # -- in the thread -------------------------------------------------------------------------------

    def _move(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> None:
        broken = ""
        try:
            with self._in_own_stream(buffer.device):
                self._move_all(buffer, tag, ready)
            self._check()  # an interrupted call of NCCL may end without an error
        except RuntimeError as exc:
            broken = first_line(exc)
        if broken:
            # Not within the handler: there the exception refers to frames that hold the group, which would
            # not be destroyed, and the other members would go on waiting. Queued messages must not be moved
            # either.
            self._drop()
            raise WorkerLostError((), f"its process group ({self.backend}) broke: {broken}")

    @contextmanager
    def _in_own_stream(self, device: torch.device) -> Iterator[None]:
        """In the body, NCCL's calls wait for no work of the user's, and no work of the user's for them."""
        if device.type != "cuda":
            yield
            return
        with using(device):  # not while a CUDA graph is captured
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                yield

    def _move_all(self, buffer: Tensor, tag: int, ready: Callable[[int], object]) -> None:
        group, limit = self._joined(buffer.device), self.timeout
        if self.backend == "nccl":
            # In a broadcast, the sender notices by itself that nothing moves, and that is to come first.
            limit = min(limit, STALLED if self.size == 2 else 1.5 * STALLED)
        started: deque[tuple[Any, int]] = deque()

        def finish_oldest() -> None:
            work, nbytes = started.popleft()
            work.wait(timedelta(seconds=limit))
            self.moved += nbytes

        end = 0
        for bucket in buffer.split(_BUCKETS[self.backend]):
            end += bucket.numel()
            ready(end)
            if self.backend == "nccl" and len(started) == _AHEAD:
                finish_oldest()
            started.append((self._start(group, bucket, tag), bucket.numel()))
            self.steps += 1
        while started:
            finish_oldest()

    def _check(self) -> None:
        if self._interrupted:
            raise RuntimeError("it was interrupted")

    def _start(self, group: Any, bucket: Tensor, tag: int) -> Any:
        self._check()
        if self.size > 2:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            if self.backend == "gloo":  # NCCL counts from when a message is queued
                options.timeout = timedelta(seconds=min(self.timeout, STALLED))
            return group.broadcast([bucket], options)
        return group.send([bucket], 1, tag) if self.rank == 0 else group.recv([bucket], 0, tag)

    def _joined(self, device: torch.device) -> Any:
        """Return the group. The first call makes it, together with the other members."""
        if self._group is None:
            self._check()
            with self._rendezvous.opened() as store:
                self._check()
                self._group = self._make(store)
                self._meet(torch.zeros(1, dtype=torch.uint8, device=device), store)
        return self._group

    def _meet(self, token: Tensor, store: Any) -> None:
        """Exchange a token with the other members: all have joined then."""
        if self.rank != 0:
            self._check()
            self._group.send([token], 0, 0).wait(self._joining)
            return
        for other in range(1, self.size):
            self._check()
            self._group.recv([token], other, 0).wait(self._joining)
            self.steps += 1
        with suppress(RuntimeError):  # some stores cannot list or delete keys; a few bytes stay
            for key in store.list_keys():
                store.delete_key(key)

    def _make(self, store: Any) -> Any:
        if self.backend == "gloo":
            limit = _CONNECT * self._joining
            return dist.ProcessGroupGloo(self._rendezvous, self.rank, self.size, limit)
        store.set_timeout(self._joining)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._joining
        with _without_watchdog():
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _leave(self) -> None:
        if self.backend == "nccl" and self._group is not None and not self._interrupted:
            with suppress(RuntimeError):
                self._group.shutdown()  # what NCCL has taken is sent first
                self._group = None
        self._drop()

    def _drop(self) -> None:
        group, self._group = self._group, None
        if self.backend == "nccl":
            _abort(group)


def _part_of(key: str, connect: Callable[[], Any]) -> Any:
    """Connect to the store, and return the part of it that belongs to the group ``key``. Blocking."""
    return dist.PrefixStore(f"aiosync/ranks/{key}", connect())  # type: ignore[attr-defined]


def _abort(group: Any) -> None:
    if group is not None:
        with suppress(RuntimeError):
            group.abort()
