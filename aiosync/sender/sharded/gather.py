"""``connect`` and ``send`` of a sharded trainer: rank 0 sends, the other ranks contribute their shards.

Every rank calls ``connect`` and ``send`` at the same places of its program;
:mod:`aiosync.sender.sharded.ranks` matches the calls, in the order in which they begin on each rank. A call
that reaches its deadline, or is cancelled, returns at once; its thread still notifies the other ranks, and
rank 0's slot stays reserved until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint, HomeLoop, OpenCalls, WorkerIds
from aiosync.errors import GatherError, SyncTimeoutError
from aiosync.reports import SendReport
from aiosync.sender.extraction import WeightSource, is_per_worker
from aiosync.sender.sharded.ranks import ShardOffer, ShardRequest, Shards
from aiosync.transports._offload import call_when_done, uninterrupted


@dataclass(eq=False, repr=False)
class ShardGather:
    """One call on rank 0."""

    shards: Shards
    call: str  # the method that the other ranks must have called: "connect" or "send"
    deadline: Deadline
    work: Future[None] | None = field(default=None, init=False)  # runs in the thread, once submitted
    # The newest version when the call ends; None: the call has not changed it.
    version: int | None = field(default=None, init=False)
    _given_up: str = field(default="", init=False)

    async def gather(self, wanted: Sequence[ShardRequest], begin: Callable[[], object]) -> None:
        """Gather the entries. Without entries, the other ranks still have to make the call.

        ``begin`` is called in another thread before the first byte is written.

        Raises:
            GatherError: a rank has failed, has given up or is gone.
            SyncTimeoutError: not all ranks made the call in time.
        """
        self.work = self.shards.submit(self.shards.gather, self.call, wanted, lambda: self._given_up, begin)
        await _until_done(self.work, self.deadline)

    def conclude(self, failure: str) -> None:
        """Notify the other ranks that the call has ended, and why it has failed, or "". Does not wait."""
        self._given_up = failure and f"rank 0 has given up: {failure}"
        self.shards.submit(self.shards.conclude, self.call, self.work, self.version, failure)


@dataclass(eq=False, repr=False)
class GatherLeader:
    """Runs rank 0's calls one at a time, in order, as the other ranks do."""

    shards: Shards
    _last: asyncio.Future[None] | None = field(default=None, init=False)  # done when the last call has ended
    _calls: OpenCalls = field(default_factory=OpenCalls, init=False)

    async def stop(self) -> None:
        """End the calls: they raise NotConnectedError."""
        await self._calls.stop()

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self.shards.close()

    @asynccontextmanager
    async def calling(self, call: str, deadline: Deadline) -> AsyncIterator[ShardGather]:
        """Run one call in the body. The other ranks are notified of its result, also if it fails.

        Raises:
            SyncTimeoutError: an earlier call had not ended in time.
            NotConnectedError: :meth:`stop` was called.
        """
        self.shards.enter()
        gather, failure = ShardGather(self.shards, call, deadline), ""
        before, over = self._last, asyncio.get_running_loop().create_future()
        self._last = over
        try:
            async with self._calls.call():
                if before is not None and not before.done():
                    await asyncio.wait([before], timeout=deadline.remaining())
                    if not before.done():
                        raise deadline.error("stage", hint="an earlier call had not ended")
                yield gather
        except BaseException as exc:
            failure = str(exc) or type(exc).__name__
            raise
        finally:
            _in_turn(before, partial(gather.conclude, failure))
            _in_turn(before, partial(_follow, over, gather.work))


def _follow(over: asyncio.Future[None], work: Future[None] | None) -> None:
    """Resolve ``over`` when the call's thread no longer uses the slot."""
    if work is None:
        over.set_result(None)
    else:
        call_when_done(work, lambda _: over.set_result(None))


def _in_turn(before: asyncio.Future[None] | None, action: Callable[[], object]) -> None:
    """Run ``action`` when the call before has ended."""
    if before is None or before.done():
        action()
    else:
        before.add_done_callback(lambda _: action())


def leading(
    leader: GatherLeader | None, call: str, deadline: Deadline
) -> AbstractAsyncContextManager[ShardGather | None]:
    """Run one call of the sender in the body. Yields None if the model is not sharded."""
    return nullcontext() if leader is None else leader.calling(call, deadline)


@dataclass(eq=False, repr=False)
class ShardContributor(Endpoint):
    """The endpoint of the other ranks: it contributes this rank's shards to rank 0, which sends."""

    shards: Shards
    source: WeightSource  # finds this rank's shards
    home: HomeLoop = field(default_factory=lambda: HomeLoop("this sender"), init=False)
    _calls: OpenCalls = field(default_factory=OpenCalls, init=False)

    @property
    def version(self) -> int:
        """Rank 0's newest version when the last call ended; -1 before the first."""
        return self.shards.version

    async def connect(self, weights: Any, deadline: Deadline) -> None:
        """Contribute to version 0. Raises as :meth:`_contribute`."""
        self.home.enter()
        self.is_matched = True
        if self.version < 0:
            await self._contribute("connect", self.source.extract(weights, set(), deadline), deadline)

    async def send_until(
        self, weights: Any, worker_ids: WorkerIds, *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        """Contribute to the next version. The report lists no workers. Raises as :meth:`_contribute`."""
        self.home.check()
        targets = set(weights) if is_per_worker(weights) else set[int]()
        return await self._contribute("send", self.source.extract(weights, targets, deadline), deadline)

    async def wait_ack_until(self, worker_ids: WorkerIds, deadline: Deadline) -> SendReport:
        """Return the report of the last version."""
        return SendReport(self.version, 0, {}, {}, ())

    def check_alive(self) -> None:
        self.home.check_alive()

    async def aclose(self) -> None:
        try:
            if not self.home.closed:
                await uninterrupted(lambda _: self._calls.stop())
        finally:
            self.shards.close()

    async def _contribute(
        self, call: str, sources: Awaitable[Mapping[int, Mapping[str, Tensor]]], deadline: Deadline
    ) -> SendReport:
        """Contribute this rank's shards to one call.

        Raises:
            GatherError: the call has failed on another rank; the message has the reason.
            SyncTimeoutError: the other ranks did not make the call in time. Once rank 0 has the shards, it
                has as long again: its workers may answer as late as its own deadline.
            NotConnectedError: the scheme was closed.
            WrongEventLoopError: it was connected on another event loop.
            Exception: what ``sources`` raises.
        """
        self.shards.enter()
        offer, failure = ShardOffer(call), None
        # Before anything is awaited: the calls of all ranks match in the order in which they begin.
        work = self.shards.submit(self.shards.contribute, offer)
        try:
            async with self._calls.call():
                failure = await _fill(offer, sources)
                try:
                    await _until_done(work, deadline)
                except SyncTimeoutError:
                    if offer.give_up():
                        raise
                    await _until_done(work, Deadline.after(deadline.seconds), hint="rank 0 has not ended it")
        except GatherError:
            if failure is not None:
                raise failure from None
            raise
        except BaseException:
            offer.give_up()
            raise
        return SendReport(work.result(), 0, {}, {}, ())


async def _fill(
    offer: ShardOffer, sources: Awaitable[Mapping[int, Mapping[str, Tensor]]]
) -> Exception | None:
    """Fill in the offer. Return what ``sources`` raises: the other ranks are notified first."""
    try:
        offer.sources = await sources
    except Exception as exc:  # noqa: BLE001 - raised by the caller
        offer.failed = str(exc) or repr(exc)
        return exc
    except BaseException:
        offer.failed = f"its {offer.call}() was cancelled"
        raise
    finally:
        offer.ready.set()
    return None


async def _until_done(
    work: Future[Any], deadline: Deadline, *, hint: str = "not every rank of the trainer made the call"
) -> None:
    done: asyncio.Future[Any] = asyncio.wrap_future(work)
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # no warning
    await asyncio.wait([done], timeout=deadline.remaining())
    if not done.done():
        raise deadline.error("stage", hint=hint)
    done.result()
