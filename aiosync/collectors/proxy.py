"""One worker, seen from its collector: what it runs on, and what it has said so far."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict

from aiosync._deadline import Deadline
from aiosync.collectors.channel import Channel, ChannelClosed
from aiosync.collectors.fields import Slot, steps_of
from aiosync.collectors.host import Host, Schemes
from aiosync.collectors.messages import Answer, Batch, Call, Collect, Cut, Failed, NewSlot, Parcel, Ready
from aiosync.collectors.worker import WorkerSpec
from aiosync.errors import SyncTimeoutError, WorkerLostError
from aiosync.transports._offload import uninterrupted
from aiosync.weights.segment import Segment

__all__ = ["Delivered", "RemoteTraceback", "WorkerProxy", "raised_by"]

_DYING = 1.0
"""Seconds that a worker which has closed its channel has to end."""

_LENT = 32
"""Batches of a worker that the trainer may have at a time in the memory where they were put; it gets copies
of further ones."""

_KILLED = 5.0
"""Seconds that one which was killed has to be gone."""


class RemoteTraceback(Exception):
    """Where a worker's error was raised: the cause of that error as it is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised_by(worker: int, failed: Failed) -> BaseException:
    """A worker's own exception, with its traceback as the cause and a note that says whose it was."""
    error: BaseException
    if failed.error is not None:
        error = pickle.loads(failed.error)
    else:
        error = RuntimeError(f"{failed.kind}: {failed.message}")
    error.__cause__ = RemoteTraceback(failed.trace)
    error.add_note(f"(raised by collector worker {worker})")
    return error


@dataclass(frozen=True, eq=False, slots=True)
class Delivered:
    """A batch where its worker put it.

    Attributes:
        worker: whose it is.
        asked: how many frames it was to have.
        message: what the worker said of it.
        slot: the memory that it is in, and how many environments a step in it is of, as a shape; None: it is
            in the message.
    """

    worker: WorkerProxy
    asked: int
    message: Batch | Parcel
    slot: tuple[Slot, tuple[int, ...]] | None = None

    @property
    def frames(self) -> int:
        """How many there are."""
        if isinstance(self.message, Parcel):
            return int(self.message.data.numel())
        width: int = math.prod(self._slot[1])
        return self.message.steps * width

    def read(self) -> TensorDict:
        """It, where it is: valid until it is taken."""
        if isinstance(self.message, Parcel):
            return self.message.data
        slot, shape = self._slot
        return slot.read(self.message.steps, len(shape), self.message.order)

    def lend(self) -> TensorDict:
        """It, and it is taken: the memory will be written over when nothing refers to these tensors."""
        if isinstance(self.message, Parcel) or self.message.order is not None:
            found = self.read()
            self.taken()
            return found
        if len(self.worker.loans.lent) >= _LENT:  # each is a descriptor, in two processes
            found = self.read().clone()
            self.taken()
            return found
        slot, shape = self._slot
        self.worker.batches.remove(self)
        given_back = self.worker.loans.lend(self.message.slot)
        return steps_of(slot.lend(given_back), slice(self.message.steps), len(shape))

    def taken(self) -> None:
        """It waits no longer, and the memory may be written over."""
        self.worker.batches.remove(self)
        if isinstance(self.message, Batch):
            self.worker.loans.free.append(self.message.slot)

    @property
    def _slot(self) -> tuple[Slot, tuple[int, ...]]:
        assert self.slot is not None
        return self.slot


class Loans:
    """Which of a worker's slots the trainer has, and which it has given back. It refers to no other object,
    since each batch keeps it alive.

    Attributes:
        free: slots that may be written over, of which the worker has not been told.
        lent: slots of batches that the trainer still has.
    """

    def __init__(self) -> None:
        self.free: list[int] = []
        self.lent: set[int] = set()

    def lend(self, slot: int) -> Callable[[], None]:
        """One is lent; what is to be called, in whatever thread, when it is given back."""
        self.lent.add(slot)
        return functools.partial(self._give_back, slot)

    def _give_back(self, slot: int) -> None:
        self.lent.discard(slot)
        self.free.append(slot)


class WorkerProxy:
    """A worker.

    Args:
        spec: what it is.
        host: what it runs on.
        on_change: called when anything is to be looked at anew.
        on_batch: called with each batch that it delivers.

    Attributes:
        index: which worker.
        ready, was_ready: it has all that it needs to play, or had before it failed.
        batches: what it has delivered and the trainer has not taken yet, oldest first.
        loans: where its slots are.
        frames: how many frames it has delivered.
        width: how many each of its environments gives at a time.
        seed: what it was seeded with last.
        error: why nothing more will come from it, or None.
        replaced: another gets its place.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        host: Host,
        on_change: Callable[[WorkerProxy], None],
        on_batch: Callable[[Delivered], None],
    ) -> None:
        self.index = spec.index
        self.ready = self.was_ready = False
        self.batches: list[Delivered] = []
        self.frames = 0
        self.width = 1
        self.seed = spec.seed
        self.error: BaseException | None = None
        self.replaced = False
        self._requests: dict[int, Collect] = {}
        self._spec = spec
        self._host = host
        self._on_change = on_change
        self._on_batch = on_batch
        self._slots: dict[int, tuple[Slot, tuple[int, ...]]] = {}
        self.loans = Loans()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._channel: Channel | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, schemes: Schemes) -> None:
        """Have it begin.

        Raises:
            OSError: it cannot.
        """
        self._channel = await self._host.start(self._spec, schemes)
        self._listening = asyncio.create_task(self._listen(), name=f"aiosync-worker-{self.index}")

    async def _listen(self) -> None:
        assert self._channel is not None
        try:
            while True:
                self._take(await self._channel.receive())
        except ChannelClosed:
            await self._host.ended(Deadline.after(_DYING))
            self.fail(WorkerLostError([self.index], self._host.cause()))
        except Exception as exc:  # noqa: BLE001 - raised in the call that waits for this worker
            # Its memory cannot be mapped, say, because it has died since it announced it.
            died = await self._host.ended(Deadline.after(_DYING))
            self.fail(WorkerLostError([self.index], self._host.cause()) if died else exc)

    def _take(self, message: Any) -> None:
        match message:
            case Ready(width=width):
                self.width = width
                self.ready = self.was_ready = True
                for request in self._requests.values():  # of the one whose place it has
                    self._send(request)
            case NewSlot() as new:
                segment = Segment.attach(new.handle)
                self._slots[new.slot] = Slot(segment, new.specs, new.frames), new.shape
                for index in new.replaced:
                    del self._slots[index]
            case Batch() as batch:
                self._deliver(batch, self._slots[batch.slot])
            case Parcel() as parcel:
                self._deliver(parcel)
            case Answer(number=number, value=value, error=error):
                future = self._calls.pop(number, None)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(value)
                    else:
                        future.set_exception(raised_by(self.index, error))
            case Failed() as failed:
                self.fail(raised_by(self.index, failed))
        self._on_change(self)

    def _deliver(self, message: Batch | Parcel, slot: tuple[Slot, tuple[int, ...]] | None = None) -> None:
        asked = self._requests.pop(message.number).frames
        delivered = Delivered(self, asked, message, slot)
        self.frames += delivered.frames
        self.batches.append(delivered)
        self._on_batch(delivered)

    def fail(self, error: BaseException) -> None:
        """Nothing more will come from it, for this reason."""
        if self.error is None:
            self.error = error
            self.ready = False
            self.call_off(error)
            self._on_change(self)

    # -- what it is asked for -------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Its process's number, where it has one on this machine."""
        return self._host.pid

    @property
    def asked(self) -> int:
        """How many batches it has been asked for and has not delivered."""
        return len(self._requests)

    def collect(self, frames: int, *, at_random: bool) -> None:
        """Have it collect another batch, after those that it was asked for before."""
        returned = []
        while self.loans.free:  # slots may be given back meanwhile, in another thread
            returned.append(self.loans.free.pop())
        request = Collect(next(self._numbers), frames, at_random, tuple(returned))
        self._requests[request.number] = request
        if self.ready:
            self._send(request)

    def cut(self) -> None:
        """Have it deliver what it is collecting as far as that is."""
        if self.ready:
            self._send(Cut())

    def _send(self, message: Collect | Cut | Call) -> None:
        assert self._channel is not None
        self._channel.send(message)

    def succeed(self, lost: WorkerProxy) -> None:
        """Take over what was asked of another, and what it has delivered."""
        self.batches = lost.batches
        self.frames = lost.frames
        for old in lost._requests.values():
            request = replace(old, number=next(self._numbers), returned=())
            self._requests[request.number] = request

    async def call(self, method: str, *arguments: Any, deadline: Deadline) -> Any:
        """Call one of the worker's methods.

        Raises:
            Exception: what that raises, or why the worker is gone.
            SyncTimeoutError: no answer has come in time.
        """
        if self.error is not None:
            raise self.error
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(Call(number, method, arguments))
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                return await future
        except TimeoutError as exc:
            if limit.expired():
                raise SyncTimeoutError(
                    "receive",
                    workers=[self.index],
                    seconds=deadline.seconds,
                    hint=f"{method}() has not answered",
                ) from exc
            raise
        finally:
            self._calls.pop(number, None)

    def call_off(self, error: BaseException) -> None:
        """Have its calls fail that have not been answered."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell it to end."""
        if self._channel is not None:
            self._channel.close()

    async def close(self, deadline: Deadline) -> None:
        """Have it end, and wait for that; after the deadline, or if this is cancelled, it is killed.
        Idempotent."""
        self.leave()
        listening, self._listening = self._listening, None
        ended = False
        try:
            if listening is not None:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            ended = await self._host.ended(deadline)
        finally:
            if not ended:
                self._host.kill()
                # Shielded: a cancelled caller would leave the process behind. Bounded by _KILLED.
                try:
                    await uninterrupted(lambda _: self._host.ended(Deadline.after(_KILLED)))
                finally:
                    self._release()
            else:
                self._release()

    def _release(self) -> None:
        self._slots.clear()
        self._host.release()

    def kill(self) -> None:
        """Have it end at once."""
        self._host.kill()
