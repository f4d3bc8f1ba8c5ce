"""How the ranks of a sharded trainer bring a version together, over a process group of their own.

Rank 0 leads. Every ``connect`` and ``send`` is one *call* on each rank, and calls meet in their order:

1. the others: *here*, with what the call is, or why it has failed already;
2. rank 0: which entries it wants, or that the call is off;
3. the others: which parts of them they have, or that they have given up;
4. rank 0: go on, or off;
5. the parts themselves, entry after entry;
6. the others: whether they have stayed to the end (who gave up may have changed its weights meanwhile);
7. rank 0: the version that it has published, or why it has not;
8. the others: that they have heard it (after any word that ends a call).

All of this blocks, in a thread of each rank that skips no call. A rank whose call was given up says so at the
next occasion, so the next calls of all ranks meet again. A part is as large as what a rank has of one
tensor; nothing else is held at once.
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
from aiosync.weights.dense import to_bytes
from aiosync.weights.sharded import Block, block_of, check_blocks, local_part

__all__ = ["ShardOffer", "ShardRequest", "Shards"]

_FOR_EVER = timedelta(days=1)
_BUCKET = 64 << 20

_made: dict[tuple[int, ...], int] = {}
"""How many of these ranks there have been."""


@dataclass(frozen=True)
class ShardRequest:
    """An entry that is to be gathered.

    Attributes:
        group: the number of the group that it is for.
        names: its name, and others that it goes by.
        destination: where it goes.
        source: rank 0's part.
    """

    group: int
    names: tuple[str, ...]
    destination: Tensor
    source: Any


@dataclass
class ShardOffer:
    """A call of one of the others.

    Attributes:
        call: what it is.
        sources: number of the group -> name -> tensor.
        failed: why it has failed already.
        given_up: why no call waits for it any more.
    """

    call: str
    sources: Mapping[int, Mapping[str, Any]]
    failed: str = ""
    given_up: str = ""


class Shards:
    """One scheme's way between the ranks of a mesh.

    Made by every rank in the same order.

    Attributes:
        leads: whether this is rank 0.
        thread: where what blocks is to be done.
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
        """The others need not wait for this call."""
        self._guarded(partial(self._call_off, call, reason))

    def gather(
        self,
        call: str,
        wanted: Sequence[ShardRequest],
        given_up: Callable[[], str],
        begin: Callable[[], object],
    ) -> None:
        """Bring the entries together.

        Args:
            call: what the others are to be in.
            wanted: the entries.
            given_up: why it is of no use any more, or "".
            begin: called before the first byte is written.

        Raises:
            GatherError: a rank has failed or has given up, or is gone.
        """
        self._guarded(partial(self._gather, call, wanted, given_up, begin))

    def conclude(self, version: int, reason: str) -> None:
        """Tell the others what came of it. ``reason``: why it was not published."""
        self._guarded(partial(self._end, {"stop": reason} if reason else {"version": version}))

    def _call_off(self, call: str, reason: str) -> None:
        self._await_all(call)
        self._end({"stop": reason})

    def _await_all(self, call: str) -> str:
        """Until all are here; why that is in vain."""
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
        except Exception as exc:  # noqa: BLE001 - the others wait to hear of it
            reason = str(exc) or repr(exc)
        self._agree(given_up() or reason, {})
        begin()
        for entry, blocks in zip(wanted, parts, strict=True):
            for rank, block in blocks:
                self._place(entry, rank, block)
        for device in {entry.destination.device for entry in wanted if entry.destination.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # a copy there is only begun by now
        left = [self._hear(rank)["failed"] for rank in range(1, self._size)]
        if any(left):
            reason = next(filter(None, left))
            self._end({"stop": reason})
            raise GatherError(reason)

    def _agree(self, reason: str, word: dict[str, Any]) -> None:
        """Have all go on, or none."""
        if reason:
            self._end({"stop": reason})
            raise GatherError(reason)
        self._tell_all(word)

    def _end(self, word: dict[str, Any]) -> None:
        """The last word of a call. That it was heard is waited for: who closes a connection may take with it
        what is still under way. (The answers as well: who is gone without one, the next call finds out.)"""
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

    # -- the others; in the thread -------------------------------------------------------------------

    def lend(self, lending: ShardOffer) -> int:
        """Take part in a call; returns the version that came of it.

        Raises:
            GatherError: nothing came of it.
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
        except Exception as exc:  # noqa: BLE001 - rank 0 waits to hear of it
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
        """Answer the last word of a call. Rank 0 may hang up on having this, before torch knows it sent."""
        with suppress(RuntimeError):
            self._say(0, {})

    def _go_on(self, word: dict[str, Any]) -> dict[str, Any]:
        if "stop" in word:
            self._have_heard()
            raise GatherError(f"the trainer's rank 0 did not send: {word['stop']}")
        return word

    # -- words and bytes -----------------------------------------------------------------------------

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
            # Not from within the handler: what is raised there knows the frames that still hold the group,
            # and the others hear of this when that is gone.
            self._broken = broken
            self._group = None
        raise GatherError(self._broken)

    def close(self) -> None:
        """Let go of the connections when what was asked for has been done."""
        self.thread.submit(self._drop)
        self.thread.close()

    def _drop(self) -> None:
        self._broken = "this scheme is closed"
        self._group = None

    def _joined(self) -> Any:
        if self._group is None:
            # Registered nowhere, as those for the weights are. The store blocks other callers meanwhile.
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
