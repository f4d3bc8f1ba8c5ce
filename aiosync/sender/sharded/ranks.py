"""Gathers a version from the ranks of a sharded trainer, over a separate process group.

Rank 0 leads. Every ``connect`` and ``send`` is one *call* on each rank. Calls match in their order:

1. other ranks: the name of the call, or why it has failed already;
2. rank 0: the entries that it wants, or that the call is cancelled;
3. other ranks: the parts of them that they have, or that they have given up;
4. rank 0: continue, or cancelled;
5. other ranks: the parts, entry by entry;
6. other ranks: whether they gave up meanwhile (the caller may then have changed the weights);
7. rank 0: the version that it has published, or why it has not;
8. other ranks: an acknowledgement (after any message that ends a call).

All of this blocks, in one thread per rank, which skips no call. A rank whose call was given up reports it in
its next message, so the next calls of all ranks match again. One part, a rank's shard of one tensor, is in
memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from aiosync.errors import GatherError
from aiosync.transports._offload import DetachedThread
from aiosync.transports.torch_distributed.store import first_line
from aiosync.weights.sharded import Block, block_of, check_blocks, local_part
from aiosync.weights.tensors import to_bytes

__all__ = ["ShardOffer", "ShardRequest", "Shards"]

_FOR_EVER = timedelta(days=1)
_BUCKET = 64 << 20

_made: dict[tuple[int, ...], int] = {}
"""Ranks of a mesh -> the number of its last Shards object."""


@dataclass(frozen=True)
class ShardRequest:
    """An entry to gather.

    Attributes:
        group: the number of the worker group that needs it.
        names: its name and its aliases.
        destination: the tensor that it is copied into.
        source: rank 0's part.
    """

    group: int
    names: tuple[str, ...]
    destination: Tensor
    source: Any


@dataclass
class ShardOffer:
    """A call on a rank other than 0.

    Attributes:
        call: "connect" or "send".
        sources: number of the group -> name -> tensor.
        failed: why the call has failed before it began; "": it has not.
        given_up: why the caller no longer waits; "": it waits.
    """

    call: str
    sources: Mapping[int, Mapping[str, Any]]
    failed: str = ""
    given_up: str = ""


class Shards:
    """One scheme's connection between the ranks of a mesh. Every rank creates these in the same order.

    Attributes:
        leads: whether this is rank 0.
        thread: the thread that runs the blocking methods.
    """

    def __init__(self, mesh: Any) -> None:
        ranks = tuple(mesh.mesh.flatten().tolist())
        number = _made[ranks] = _made.get(ranks, -1) + 1
        name = hashlib.sha256(repr((ranks, number)).encode()).hexdigest()[:16]
        self._key = f"aiosync/shards/{name}"
        self._rank = ranks.index(dist.get_rank())
        self._size = len(ranks)
        self._group: Any = None
        self._broken = ""
        self.leads = self._rank == 0
        self.thread = DetachedThread("aiosync-shards")

    # -- rank 0; in the thread -----------------------------------------------------------------------

    def call_off(self, call: str, reason: str) -> None:
        """Cancel a call on the other ranks."""
        self._guarded(partial(self._call_off, call, reason))

    def gather(
        self,
        call: str,
        wanted: Sequence[ShardRequest],
        given_up: Callable[[], str],
        begin: Callable[[], object],
    ) -> None:
        """Gather the entries.

        Args:
            call: the method that the other ranks must have called.
            wanted: the entries.
            given_up: returns why the call was given up, or "".
            begin: called before the first byte is written.

        Raises:
            GatherError: a rank has failed, has given up or is gone.
        """
        self._guarded(partial(self._gather, call, wanted, given_up, begin))

    def conclude(self, version: int, reason: str) -> None:
        """Notify the other ranks of the version, or of the ``reason`` why it was not published."""
        self._guarded(partial(self._end, {"stop": reason} if reason else {"version": version}))

    def _call_off(self, call: str, reason: str) -> None:
        self._await_all(call)
        self._end({"stop": reason})

    def _await_all(self, call: str) -> str:
        """Wait until all ranks have made a call. Return why the calls cannot go on, or ""."""
        reason = ""
        for rank in range(1, self._size):
            here = self._hear(rank)
            if here["failed"]:
                reason = reason or f"rank {rank} has failed: {here['failed']}"
            elif here["call"] != call:
                reason = reason or f"rank {rank} is in {here['call']}(), rank 0 in {call}()"
        return reason

    def _gather(
        self,
        call: str,
        wanted: Sequence[ShardRequest],
        given_up: Callable[[], str],
        begin: Callable[[], object],
    ) -> None:
        reason = self._await_all(call)
        self._agree(given_up() or reason, {"wanted": [(entry.group, entry.names) for entry in wanted]})
        parts: list[list[tuple[int, Block]]] = []
        answers = [self._hear(rank) for rank in range(1, self._size)]
        reason = next((answer["failed"] for answer in answers if answer["failed"]), "")
        try:
            if not reason:
                parts = [self._parts_of(entry, index, answers) for index, entry in enumerate(wanted)]
        except Exception as exc:  # noqa: BLE001 - the other ranks are notified of it
            reason = str(exc) or repr(exc)
        self._agree(given_up() or reason, {})
        begin()
        for entry, blocks in zip(wanted, parts, strict=True):
            for rank, block in blocks:
                self._place(entry, rank, block)
        for device in {entry.destination.device for entry in wanted if entry.destination.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # copies to the device are asynchronous
        left = [self._hear(rank)["failed"] for rank in range(1, self._size)]
        if any(left):
            reason = next(filter(None, left))
            self._end({"stop": reason})
            raise GatherError(reason)

    def _agree(self, reason: str, word: dict[str, Any]) -> None:
        """Tell all ranks to continue, or to stop for a reason."""
        if reason:
            self._end({"stop": reason})
            raise GatherError(reason)
        self._tell_all(word)

    def _end(self, word: dict[str, Any]) -> None:
        """Send the last message of a call and wait for the acknowledgements.

        Without them a rank could close its connection while the message is in flight. A rank that is gone
        without an acknowledgement makes the next call fail.
        """
        self._tell_all(word)
        for rank in range(1, self._size):
            with suppress(RuntimeError):
                self._hear(rank)

    def _parts_of(self, entry: ShardRequest, index: int, answers: Sequence[Any]) -> list[tuple[int, Block]]:
        own = block_of(entry.source)
        parts = [(0, own)] if own is not None else []
        for rank, answer in enumerate(answers, start=1):
            if answer["blocks"][index] is not None:
                parts.append((rank, msgspec.convert(answer["blocks"][index], Block)))
        check_blocks(entry.names[0], entry.source, [block for _, block in parts])
        return parts

    def _place(self, entry: ShardRequest, rank: int, block: Block) -> None:
        place = entry.destination[block.slices]
        if rank == 0:
            place.copy_(local_part(entry.source).detach())
        elif place.is_contiguous() and place.is_cpu and place.dtype is entry.source.dtype:
            self._take(rank, to_bytes(place))
        else:
            part = torch.empty(block.shape, dtype=entry.source.dtype, device="cpu")
            self._take(rank, to_bytes(part))
            place.copy_(part)

    # -- the other ranks; in the thread --------------------------------------------------------------

    def lend(self, lending: ShardOffer) -> int:
        """Contribute to a call; return the version that was published.

        Raises:
            GatherError: nothing was published.
        """
        return int(self._guarded(partial(self._lend, lending)))

    def _lend(self, lending: ShardOffer) -> int:
        self._say(0, {"call": lending.call, "failed": lending.failed})
        wanted = self._go_on(self._hear(0))["wanted"]
        blocks: list[Block | None] = []
        tensors: list[Any] = []
        failed = ""
        try:
            tensors = [_first(lending.sources[group], names) for group, names in wanted]
            blocks = [block_of(tensor) for tensor in tensors]
        except Exception as exc:  # noqa: BLE001 - rank 0 is notified of it
            failed = f"rank {self._rank} does not have what rank 0 sends: {exc!r}"
        self._say(0, {"blocks": blocks, "failed": failed or lending.given_up})
        self._go_on(self._hear(0))
        for tensor, block in zip(tensors, blocks, strict=True):
            if block is not None:
                self._give(to_bytes(local_part(tensor).cpu()))
        self._say(0, {"failed": lending.given_up})
        version = int(self._go_on(self._hear(0))["version"])
        self._have_heard()
        return version

    def _have_heard(self) -> None:
        """Acknowledge the last message of a call. Rank 0 may then close before torch completes the send."""
        with suppress(RuntimeError):
            self._say(0, {})

    def _go_on(self, word: dict[str, Any]) -> dict[str, Any]:
        if "stop" in word:
            self._have_heard()
            raise GatherError(f"the trainer's rank 0 did not send: {word['stop']}")
        return word

    # -- messages and bytes --------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], Any]) -> Any:
        broken = ""
        try:
            if not self._broken:
                return work()
        except GatherError:
            raise
        except RuntimeError as exc:
            broken = f"a rank of the trainer is gone, or has closed its scheme: {first_line(exc)}"
        except Exception as exc:  # noqa: BLE001 - the ranks are in the middle of a call and cannot go on from here
            broken = repr(exc)
        if broken:
            # Not inside the handler: the traceback's frames would keep the group alive, and the other ranks
            # notice the failure only when the group is freed.
            self._broken = broken
            self._group = None
        raise GatherError(self._broken)

    def close(self) -> None:
        """Close the connections when the submitted calls are done."""
        self.thread.submit(self._drop)
        self.thread.close()

    def _drop(self) -> None:
        self._broken = "this scheme is closed"
        self._group = None

    def _joined(self) -> Any:
        if self._group is None:
            # Not registered with torch.distributed, like the groups for the weights. The cloned store is
            # separate, because a blocking call to a store blocks its other callers.
            store: Any = dist.distributed_c10d._get_default_store()
            own = dist.PrefixStore(self._key, store.clone())  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(own, self._rank, self._size, _FOR_EVER)
        return self._group

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in range(1, self._size):
            self._say(rank, message)

    def _say(self, rank: int, message: dict[str, Any]) -> None:
        data = bytearray(msgspec.msgpack.encode(message))
        group = self._joined()
        group.send([torch.tensor([len(data)], device="cpu")], rank, 0).wait()
        group.send([torch.frombuffer(data, dtype=torch.uint8)], rank, 0).wait()

    def _hear(self, rank: int) -> dict[str, Any]:
        group, length = self._joined(), torch.zeros(1, dtype=torch.int64, device="cpu")
        group.recv([length], rank, 0).wait()
        data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        group.recv([data], rank, 0).wait()
        message: dict[str, Any] = msgspec.msgpack.decode(data.numpy().tobytes())
        return message

    def _give(self, data: Tensor) -> None:
        for piece in data.split(_BUCKET):
            self._group.send([piece], 0, 1).wait()

    def _take(self, rank: int, data: Tensor) -> None:
        for piece in data.split(_BUCKET):
            self._group.recv([piece], rank, 1).wait()


def _first(tensors: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise KeyError(names[0])
