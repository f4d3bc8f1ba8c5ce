"""``connect`` and ``send`` of a sharded trainer: rank 0 sends, the other ranks contribute their shards.

Every rank calls ``connect`` and ``send`` at the same places of its program;
:mod:`aiosync.sender.sharded.ranks` matches the calls. A call that reaches its deadline, or is cancelled,
returns at once; its thread still notifies the other ranks, and rank 0's slot stays reserved until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint
from aiosync.errors import GatherError, NotConnectedError
from aiosync.reports import SendReport
from aiosync.sender.extraction import WeightSource, is_per_worker
from aiosync.sender.sharded.ranks import ShardOffer, ShardRequest, Shards
from aiosync.transports._offload import call_when_done

__all__ = ["GatherLeader", "ShardContributor", "ShardGather", "leading"]


class ShardGather:
    """One call on rank 0.

    Args:
        shards: the connection to the other ranks.
        call: the method that they must have called: "connect" or "send".
        deadline: of the call.

    Attributes:
        work: the gathering in the thread, once it was submitted.
        concluded: whether a version was published.
    """

    def __init__(self, shards: Shards, call: str, deadline: Deadline) -> None:
        self.work: Future[None] | None = None
        self.concluded = False
        self._shards = shards
        self._call = call
        self._deadline = deadline
        self._given_up = ""

    async def gather(
        self, wanted: Sequence[ShardRequest], begin: Callable[[], object], stopped: asyncio.Future[None]
    ) -> None:
        """Gather the entries. With no entries, the other ranks take part all the same.

        Args:
            wanted: the entries.
            begin: called in another thread before the first byte is written.
            stopped: done when the sender is being closed.

        Raises:
            GatherError: a rank has failed, has given up or is gone.
            SyncTimeoutError: not all ranks made the call in time.
            NotConnectedError: the sender was closed.
        """
        work = partial(self._shards.gather, self._call, wanted, lambda: self._given_up, begin)
        self.work = self._shards.thread.submit(work)
        await _until_done(self.work, self._deadline, stopped)

    def published(self, version: int) -> None:
        """Notify the other ranks of the version. Does not wait for them."""
        self.concluded = True
        if self.work is not None:
            self._shards.thread.submit(partial(self._conclude, self.work, version, ""))

    def call_off(self, error: BaseException) -> None:
        """Notify the other ranks that nothing was published. Does not wait for them."""
        reason = str(error) or type(error).__name__
        self._given_up = f"rank 0 has given up: {reason}"
        thread = self._shards.thread
        if self.work is None:
            thread.submit(partial(self._shards.call_off, self._call, reason))
        else:
            thread.submit(partial(self._conclude, self.work, -1, reason))

    def _conclude(self, work: Future[None], version: int, reason: str) -> None:
        if work.exception() is None:  # else the gathering has notified them
            self._shards.conclude(version, reason)


class GatherLeader:
    """Runs rank 0's calls one at a time, in order, as the other ranks do.

    Args:
        shards: the connection to the other ranks.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._last: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self._shards.close()

    @asynccontextmanager
    async def calling(self, call: str, deadline: Deadline) -> AsyncIterator[ShardGather]:
        """Run one call in the body. The other ranks are notified of its result, also if it fails.

        Raises:
            SyncTimeoutError: an earlier call was not over in time.
        """
        gathering = ShardGather(self._shards, call, deadline)
        before, over = self._last, asyncio.get_running_loop().create_future()
        self._last = over
        try:
            if before is not None:
                await asyncio.wait([before], timeout=deadline.remaining())
                if not before.done():
                    raise deadline.error("stage", hint="an earlier call was not over")
            yield gathering
        except BaseException as exc:
            if not gathering.concluded:
                _in_turn(before, partial(gathering.call_off, exc))
            raise
        finally:
            _in_turn(before, partial(_follow, over, gathering.work))


def _follow(over: asyncio.Future[None], work: Future[None] | None) -> None:
    """Resolve ``over`` when the call's thread no longer uses the slot."""
    if work is None:
        over.set_result(None)
    else:
        call_when_done(work, lambda _: over.set_result(None))


def _in_turn(before: asyncio.Future[None] | None, action: Callable[[], object]) -> None:
    """Run ``action`` when the call before is over."""
    if before is None or before.done():
        action()
    else:
        before.add_done_callback(lambda _: action())


def leading(
    leader: GatherLeader | None, call: str, deadline: Deadline
) -> AbstractAsyncContextManager[ShardGather | None]:
    """Run one call of the sender in the body. Yields None if the model is not sharded."""
    return nullcontext() if leader is None else leader.calling(call, deadline)


class ShardContributor(Endpoint):
    """The endpoint of the other ranks: it contributes this rank's shards to rank 0, which sends.

    Args:
        shards: the connection to rank 0.
        source: finds this rank's shards.
    """

    def __init__(self, shards: Shards, source: WeightSource) -> None:
        self._version = -1
        self._shards = shards
        self._source = source

    @property
    def version(self) -> int:
        """The last version that rank 0 has published with this rank's shards; -1 before the first."""
        return self._version

    async def connect(self, weights: Any, deadline: Deadline) -> None:
        """Contribute to version 0. Raises as :meth:`take_part`."""
        if self._version < 0:
            await self.take_part("connect", lambda: self._source.extract(weights, set()), deadline)

    async def send(
        self, weights: Any, worker_ids: Any, *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        """Contribute to the next version. The report lists no workers.

        Raises as :meth:`take_part`.
        """
        targets = set(weights) if is_per_worker(weights) else set[int]()
        return await self.take_part("send", lambda: self._source.extract(weights, targets), deadline)

    async def wait_ack(self, worker_ids: Any, deadline: Deadline) -> SendReport:
        """Return the report of the last version."""
        return self.report()

    async def aclose(self) -> None:
        """Disconnect from the other ranks."""
        self._shards.close()

    async def take_part(
        self,
        call: str,
        sources: Callable[[], Awaitable[Mapping[int, Mapping[str, Tensor]]]],
        deadline: Deadline,
    ) -> SendReport:
        """Contribute this rank's shards to one call.

        Raises:
            GatherError: nothing was sent; the message has the reason.
            SyncTimeoutError: the other ranks did not make the call in time.
            Exception: what ``sources`` raises.
        """
        lending, failure = ShardOffer(call, {}), None
        try:
            lending.sources = await sources()
        except Exception as exc:  # noqa: BLE001 - raised after the other ranks were notified
            failure, lending.failed = exc, str(exc) or repr(exc)
        except BaseException:
            lending.failed = f"its {call}() was cancelled"
            self._shards.thread.submit(partial(self._lend, lending))
            raise
        work = self._shards.thread.submit(partial(self._lend, lending))
        try:
            await _until_done(work, deadline)
        except GatherError:
            if failure is not None:
                raise failure from None
            raise
        except BaseException:
            lending.given_up = f"a rank has given up its {call}()"
            raise
        return self.report(work.result())

    def _lend(self, lending: ShardOffer) -> int:
        self._version = self._shards.lend(lending)
        return self._version

    def report(self, version: int | None = None) -> SendReport:
        """Return the report of a version; None: the last one."""
        return SendReport(self._version if version is None else version, 0, {}, {}, ())


async def _until_done(
    work: Future[Any], deadline: Deadline, stopped: asyncio.Future[None] | None = None
) -> None:
    done: asyncio.Future[Any] = asyncio.wrap_future(work)
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # no warning
    awaited = [done] if stopped is None else [done, stopped]
    await asyncio.wait(awaited, timeout=deadline.remaining(), return_when=asyncio.FIRST_COMPLETED)
    if stopped is not None and stopped.done() and not done.done():
        raise NotConnectedError("the sender was closed before the ranks of the trainer had come together")
    if not done.done():
        raise deadline.error("stage", hint="not every rank of the trainer came to it")
    done.result()
