"""Gathers a version from the ranks of a sharded trainer, over a separate process group.

Rank 0 leads. Every ``connect`` and ``send`` is one *call* on each rank. Calls match in their order:

1. other ranks: the name of the call, or why it has failed already;
2. rank 0: the entries that it wants, or that the call is cancelled;
3. other ranks: the parts of them that they have, or that they have given up;
4. rank 0: continue, or cancelled;
5. other ranks: the parts, entry by entry;
6. other ranks: whether they gave up meanwhile (the caller may then have changed the weights);
7. rank 0, once the workers have answered: its newest version, and why its call has failed, if it has;
8. other ranks: an acknowledgement (after any message that ends a call).

All of this blocks, in one thread per rank, which skips no call, except a ``connect`` after one that has
succeeded. A rank whose call was given up reports it in its next message, so the next calls of all ranks match
again. One part, a rank's shard of one tensor, is in
memory at a time.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from aiosync.errors import GatherError
from aiosync.transports._offload import DetachedThread
from aiosync.transports.torch_distributed.store import first_line
from aiosync.weights.devices import cuda_devices, wait_for_devices
from aiosync.weights.sharded import Block, block_of, check_blocks, local_part
from aiosync.weights.tensors import to_bytes

T = TypeVar("T")

_NO_LIMIT = timedelta(days=1)
_BUCKET = 64 << 20

_numbers: dict[str, int] = {}
"""Ranks of a mesh and id of a model -> the number of the last Shards object that was used."""


@dataclass(frozen=True)
class ShardRequest:
    """An entry to gather."""

    group: int  # the number of the worker group that needs it
    names: tuple[str, ...]  # its name and its aliases
    destination: Tensor
    source: Any  # rank 0's part


@dataclass
class ShardOffer:
    """A call on a rank other than 0. Its caller and the thread use it at the same time."""

    call: str  # "connect" or "send"
    # Number of the group -> name -> tensor.
    sources: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    failed: str = ""  # why there are no sources
    ready: threading.Event = field(default_factory=threading.Event)  # set once one of these is known
    given_up: str = ""  # why the caller no longer waits
    _handed_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def give_up(self) -> bool:
        """The caller no longer waits. Return whether rank 0 is notified: not if it has all parts already."""
        with self._lock:
            if not self._handed_over:
                self.given_up = f"a rank has given up its {self.call}()"
            return not self._handed_over

    def hand_over(self) -> str:
        """Rank 0 has all parts. Return why the call was given up before, or ""."""
        with self._lock:
            self._handed_over = True
            return self.given_up


def _ranks_of(mesh: Any) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def leads_ranks(mesh: Any) -> bool:
    """Return whether this process is the first rank of the mesh, which sends."""
    return _ranks_of(mesh)[0] == dist.get_rank()


class Shards:
    """One scheme's connection between the ranks of a mesh.

    The schemes of one model id make their first calls in the same order on every rank.

    The methods that exchange messages block: :meth:`submit` runs them in a thread.
    """

    def __init__(self, mesh: Any, model_id: str | None) -> None:
        ranks = _ranks_of(mesh)
        self._name = repr((ranks, model_id))
        self._key = ""  # where the ranks meet in the store
        self._rank = ranks.index(dist.get_rank())
        self._others = range(1, len(ranks))
        self._group: Any = None
        self._broken = ""  # why no call can succeed any more
        # Rank 0's newest version when the last call ended; -1 before the first.
        self.version = -1
        self._thread = DetachedThread("aiosync-shards")

    def enter(self) -> None:
        """Begin a call. The first one numbers this connection, as it does on the other ranks."""
        if not self._key:
            number = _numbers[self._name] = _numbers.get(self._name, -1) + 1
            self._key = f"aiosync/shards/{hashlib.sha256(self._name.encode()).hexdigest()[:16]}/{number}"

    def submit(self, work: Callable[..., T], *args: object) -> Future[T]:
        """Run ``work(*args)`` in the thread, after earlier work. Any failure becomes a GatherError."""
        return self._thread.submit(partial(self._run, work, *args))

    def _run(self, work: Callable[..., T], *args: object) -> T:
        broken = ""
        try:
            if not self._broken:
                return work(*args)
        except GatherError:
            raise
        except RuntimeError as exc:
            broken = f"a rank of the trainer is gone, or has closed its scheme: {first_line(exc)}"
        except Exception as exc:  # noqa: BLE001 - the ranks are in the middle of a call and cannot continue
            broken = repr(exc)
        if broken:
            # Not inside the handler: the traceback's frames would keep the group alive, and the other ranks
            # notice the failure only when the group is freed.
            self._disconnect(broken)
        raise GatherError(self._broken)

    def close(self) -> None:
        """Close the connections when the submitted work has ended."""
        self.enter()  # other ranks may have made a call
        self._thread.submit(partial(self._disconnect, "this scheme is closed"))
        self._thread.close()

    def _disconnect(self, reason: str) -> None:
        self._broken = reason
        self._group = None

    # -- rank 0; in the thread -----------------------------------------------------------------------

    def gather(
        self,
        call: str,
        wanted: Sequence[ShardRequest],
        given_up: Callable[[], str],
        begin: Callable[[], object],
    ) -> None:
        """Gather entries. Raises GatherError. ``given_up`` returns why the call was given up, or ""."""
        reason = self._receive_calls(call)
        self._continue(given_up() or reason, {"wanted": [(entry.group, entry.names) for entry in wanted]})
        parts: list[list[tuple[int, Block]]] = []
        answers = [self._receive(rank) for rank in self._others]
        reason = next((answer["failed"] for answer in answers if answer["failed"]), "")
        try:
            if not reason:
                parts = [_parts_of(entry, index, answers) for index, entry in enumerate(wanted)]
        except Exception as exc:  # noqa: BLE001 - the other ranks are notified of it
            reason = str(exc) or repr(exc)
        self._continue(given_up() or reason, {})
        wait_for_devices(cuda_devices(local_part(entry.source) for entry in wanted))
        begin()
        for entry, blocks in zip(wanted, parts, strict=True):
            for rank, block in blocks:
                self._receive_part(entry, rank, block)
        for device in {entry.destination.device for entry in wanted if entry.destination.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # copies to the device are asynchronous
        reason = next(filter(None, [self._receive(rank)["failed"] for rank in self._others]), "")
        if reason:
            self._stop(reason)

    def conclude(self, call: str, gathered: Future[None] | None, version: int | None, reason: str) -> None:
        """End a call on the other ranks.

        Args:
            call: "connect" or "send".
            gathered: what :meth:`gather` has returned or raised; None: it was not called.
            version: rank 0's newest version; None: the call has not changed it.
            reason: why the call has failed, or "".
        """
        if self._is_over(call):
            return
        if gathered is None:
            self._receive_calls(call)  # gather() was not run
        elif gathered.exception() is not None:
            return  # gather() has ended the call
        if version is not None:
            self.version = version
        self._end({"stop": reason, "version": self.version})

    def _is_over(self, call: str) -> bool:
        """Return whether this call has nothing to do: it is a connect(), and an earlier one has succeeded.

        Every rank asks this in its thread, after all its earlier calls. So all ranks find the same, also one
        whose earlier connect() had reached its deadline before the version was published.
        """
        return call == "connect" and self.version >= 0

    def _receive_calls(self, call: str) -> str:
        """Wait until all ranks have made a call. Return why the calls cannot continue, or ""."""
        reason = ""
        for rank in self._others:
            other = self._receive(rank)
            if other["failed"]:
                reason = reason or f"rank {rank} has failed: {other['failed']}"
            elif other["call"] != call:
                reason = reason or f"rank {rank} is in {other['call']}(), rank 0 in {call}()"
        return reason

    def _continue(self, reason: str, message: dict[str, Any]) -> None:
        """Send all ranks the message to continue; or end the call, if there is a reason to."""
        if reason:
            self._stop(reason)
        self._send_all(message)

    def _stop(self, reason: str) -> NoReturn:
        self._end({"stop": reason})
        raise GatherError(reason)

    def _end(self, message: dict[str, Any]) -> None:
        """Send the last message of a call and wait for the acknowledgements.

        Without them a rank could close its connection while the message is in flight. A rank that is gone
        without an acknowledgement makes the next call fail.
        """
        self._send_all(message)
        for rank in self._others:
            with suppress(RuntimeError):
                self._receive(rank)

    def _receive_part(self, entry: ShardRequest, rank: int, block: Block) -> None:
        place = entry.destination[block.slices]
        if rank == 0:
            place.copy_(local_part(entry.source).detach())
        elif place.is_contiguous() and place.is_cpu and place.dtype is entry.source.dtype:
            self._receive_into(rank, place)
        else:
            part = torch.empty(block.shape, dtype=entry.source.dtype, device="cpu")
            self._receive_into(rank, part)
            place.copy_(part)

    # -- the other ranks; in the thread --------------------------------------------------------------

    def contribute(self, offer: ShardOffer) -> int:
        """Contribute to a call; return the version that was published. Raises GatherError if it fails."""
        if self._is_over(offer.call):
            return self.version
        offer.ready.wait()
        self._send(0, {"call": offer.call, "failed": offer.failed})
        wanted = self._receive_from_leader()["wanted"]
        blocks: list[Block | None] = []
        tensors: list[Any] = []
        failed = ""
        try:
            tensors = [_first(offer.sources[group], names) for group, names in wanted]
            blocks = [block_of(tensor) for tensor in tensors]
        except Exception as exc:  # noqa: BLE001 - rank 0 is notified of it
            failed = f"rank {self._rank} does not have what rank 0 sends: {exc!r}"
        self._send(0, {"blocks": blocks, "failed": failed or offer.given_up})
        self._receive_from_leader()
        wait_for_devices(cuda_devices(local_part(tensor) for tensor in tensors))
        for tensor, block in zip(tensors, blocks, strict=True):
            if block is not None:
                for piece in to_bytes(local_part(tensor).cpu()).split(_BUCKET):
                    self._group.send([piece], 0, 1).wait()
        self._send(0, {"failed": offer.hand_over()})
        self._receive_from_leader()
        return self.version

    def _receive_from_leader(self) -> dict[str, Any]:
        """Receive a message, and acknowledge it if it ends the call. Raises GatherError if the call fails."""
        message = self._receive(0)
        if "stop" in message:
            with suppress(RuntimeError):  # rank 0 may close before torch completes the send
                self._send(0, {})
            self.version = message.get("version", self.version)
            if message["stop"]:
                raise GatherError(f"{message['stop']} (on rank 0 of the trainer)")
        return message

    # -- messages and bytes --------------------------------------------------------------------------

    def _joined(self) -> Any:
        if self._group is None:
            # Not registered with torch.distributed, like the groups for the weights. The cloned store is
            # separate, because a blocking call to a store blocks its other callers.
            store: Any = dist.distributed_c10d._get_default_store()
            own = dist.PrefixStore(self._key, store.clone())  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(own, self._rank, 1 + len(self._others), _NO_LIMIT)
        return self._group

    def _send_all(self, message: dict[str, Any]) -> None:
        for rank in self._others:
            self._send(rank, message)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        data = bytearray(msgspec.msgpack.encode(message))
        group = self._joined()
        group.send([torch.tensor([len(data)], device="cpu")], rank, 0).wait()
        group.send([torch.frombuffer(data, dtype=torch.uint8)], rank, 0).wait()

    def _receive(self, rank: int) -> dict[str, Any]:
        group, length = self._joined(), torch.zeros(1, dtype=torch.int64, device="cpu")
        group.recv([length], rank, 0).wait()
        data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        group.recv([data], rank, 0).wait()
        return msgspec.msgpack.decode(data.numpy().tobytes(), type=dict[str, Any])

    def _receive_into(self, rank: int, part: Tensor) -> None:
        for piece in to_bytes(part).split(_BUCKET):
            self._group.recv([piece], rank, 1).wait()


def _parts_of(entry: ShardRequest, index: int, answers: Sequence[Any]) -> list[tuple[int, Block]]:
    """(rank, block) of all parts of an entry, the ``index``-th of the answers."""
    own = block_of(entry.source)
    parts = [(0, own)] if own is not None else []
    for rank, answer in enumerate(answers, start=1):
        if answer["blocks"][index] is not None:
            parts.append((rank, msgspec.convert(answer["blocks"][index], Block)))
    check_blocks(entry.names[0], entry.source, [block for _, block in parts])
    return parts


def _first(tensors: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise KeyError(names[0])
