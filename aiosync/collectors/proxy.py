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
from aiosync.collectors.batch_buffers import BatchBuffer, select_steps
from aiosync.collectors.command_pipe import CommandPipe, CommandPipeClosed
from aiosync.collectors.host import Host, Schemes
from aiosync.collectors.messages import (
    Answer,
    Batch,
    Call,
    Collect,
    EndEarly,
    ErrorReport,
    InlineBatch,
    NewBuffer,
    Ready,
)
from aiosync.collectors.worker import WorkerSpec
from aiosync.errors import SyncTimeoutError, WorkerLostError
from aiosync.transports._offload import uninterrupted
from aiosync.weights.segment import Segment

__all__ = ["DeliveredBatch", "RemoteTraceback", "WorkerProxy", "exception_from"]

_EXIT_SECONDS = 1.0
"""Seconds that a worker which has closed its channel has to end."""

_MAX_LENT = 32
"""Batches of a worker that the trainer may have at a time in the memory where they were put; it gets copies
of further ones."""

_KILL_SECONDS = 5.0
"""Seconds that one which was killed has to be gone."""


class RemoteTraceback(Exception):
    """Where a worker's error was raised: the cause of that error as it is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def exception_from(worker: int, failed: ErrorReport) -> BaseException:
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
class DeliveredBatch:
    """A batch where its worker put it.

    Attributes:
        worker: whose it is.
        asked: how many frames it was to have.
        message: what the worker said of it.
        slot: the memory that it is in, and how many environments a step in it is of, as a shape; None: it is
            in the message.
    """

    worker: WorkerProxy
    requested: int
    message: Batch | InlineBatch
    buffer: tuple[BatchBuffer, tuple[int, ...]] | None = None

    @property
    def frames(self) -> int:
        """How many there are."""
        if isinstance(self.message, InlineBatch):
            return int(self.message.data.numel())
        width: int = math.prod(self._buffer[1])
        return self.message.steps * width

    def read(self) -> TensorDict:
        """It, where it is: valid until it is taken."""
        if isinstance(self.message, InlineBatch):
            return self.message.data
        buffer, shape = self._buffer
        return buffer.read(self.message.steps, len(shape), self.message.order)

    def lend(self) -> TensorDict:
        """It, and it is taken: the memory will be written over when nothing refers to these tensors."""
        if isinstance(self.message, InlineBatch) or self.message.order is not None:
            found = self.read()
            self.release()
            return found
        if len(self.worker.loans.lent) >= _MAX_LENT:  # each is a descriptor, in two processes
            found = self.read().clone()
            self.release()
            return found
        buffer, shape = self._buffer
        self.worker.batches.remove(self)
        on_returned = self.worker.loans.lend(self.message.buffer)
        return select_steps(buffer.lend(on_returned), slice(self.message.steps), len(shape))

    def release(self) -> None:
        """It waits no longer, and the memory may be written over."""
        self.worker.batches.remove(self)
        if isinstance(self.message, Batch):
            self.worker.loans.free.append(self.message.buffer)

    @property
    def _buffer(self) -> tuple[BatchBuffer, tuple[int, ...]]:
        assert self.buffer is not None
        return self.buffer


class BufferLoans:
    """Which of a worker's slots the trainer has, and which it has given back. It refers to no other object,
    since each batch keeps it alive.

    Attributes:
        free: slots that may be written over, of which the worker has not been told.
        lent: slots of batches that the trainer still has.
    """

    def __init__(self) -> None:
        self.free: list[int] = []
        self.lent: set[int] = set()

    def lend(self, buffer: int) -> Callable[[], None]:
        """One is lent; what is to be called, in whatever thread, when it is given back."""
        self.lent.add(buffer)
        return functools.partial(self._return, buffer)

    def _return(self, buffer: int) -> None:
        self.lent.discard(buffer)
        self.free.append(buffer)


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
        on_batch: Callable[[DeliveredBatch], None],
    ) -> None:
        self.index = spec.index
        self.ready = self.was_ready = False
        self.batches: list[DeliveredBatch] = []
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
        self.buffers: dict[int, tuple[BatchBuffer, tuple[int, ...]]] = {}
        self.loans = BufferLoans()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._pipe: CommandPipe | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def start(self, schemes: Schemes) -> None:
        """Have it begin.

        Raises:
            OSError: it cannot.
        """
        self._pipe = await self._host.start(self._spec, schemes)
        self._receiving = asyncio.create_task(self._receive_messages(), name=f"aiosync-worker-{self.index}")

    async def _receive_messages(self) -> None:
        assert self._pipe is not None
        try:
            while True:
                self._handle(await self._pipe.receive())
        except CommandPipeClosed:
            await self._host.ended(Deadline.after(_EXIT_SECONDS))
            self.fail(WorkerLostError([self.index], self._host.cause()))
        except Exception as exc:  # noqa: BLE001 - raised in the call that waits for this worker
            # Its memory cannot be mapped, say, because it has died since it announced it.
            died = await self._host.ended(Deadline.after(_EXIT_SECONDS))
            self.fail(WorkerLostError([self.index], self._host.cause()) if died else exc)

    def _handle(self, message: Any) -> None:
        match message:
            case Ready(width=width):
                self.width = width
                self.ready = self.was_ready = True
                for request in self._requests.values():  # of the one whose place it has
                    self._send(request)
            case NewBuffer() as new:
                segment = Segment.attach(new.handle)
                self.buffers[new.buffer] = BatchBuffer(segment, new.specs, new.frames), new.shape
                for index in new.replaced:
                    del self.buffers[index]
            case Batch() as batch:
                self._record_batch(batch, self.buffers[batch.buffer])
            case InlineBatch() as parcel:
                self._record_batch(parcel)
            case Answer(number=number, value=value, error=error):
                future = self._calls.pop(number, None)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(value)
                    else:
                        future.set_exception(exception_from(self.index, error))
            case ErrorReport() as failed:
                self.fail(exception_from(self.index, failed))
        self._on_change(self)

    def _record_batch(
        self, message: Batch | InlineBatch, buffer: tuple[BatchBuffer, tuple[int, ...]] | None = None
    ) -> None:
        requested = self._requests.pop(message.number).frames
        delivered = DeliveredBatch(self, requested, message, buffer)
        self.frames += delivered.frames
        self.batches.append(delivered)
        self._on_batch(delivered)

    def fail(self, error: BaseException) -> None:
        """Nothing more will come from it, for this reason."""
        if self.error is None:
            self.error = error
            self.ready = False
            self.fail_calls(error)
            self._on_change(self)

    # -- what it is asked for -------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Its process's number, where it has one on this machine."""
        return self._host.pid

    @property
    def requested(self) -> int:
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

    def end_early(self) -> None:
        """Have it deliver what it is collecting as far as that is."""
        if self.ready:
            self._send(EndEarly())

    def _send(self, message: Collect | EndEarly | Call) -> None:
        assert self._pipe is not None
        self._pipe.send(message)

    def take_over(self, lost: WorkerProxy) -> None:
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

    def fail_calls(self, error: BaseException) -> None:
        """Have its calls fail that have not been answered."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # -- the end --------------------------------------------------------------------------------------

    def close_pipe(self) -> None:
        """Tell it to end."""
        if self._pipe is not None:
            self._pipe.close()

    async def close(self, deadline: Deadline) -> None:
        """Have it end, and wait for that; after the deadline, or if this is cancelled, it is killed.
        Idempotent."""
        self.close_pipe()
        receiving, self._receiving = self._receiving, None
        ended = False
        try:
            if receiving is not None:
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
            ended = await self._host.ended(deadline)
        finally:
            if not ended:
                self._host.kill()
                # Shielded: a cancelled caller would leave the process behind. Bounded by _KILLED.
                try:
                    await uninterrupted(lambda _: self._host.ended(Deadline.after(_KILL_SECONDS)))
                finally:
                    self._release()
            else:
                self._release()

    def _release(self) -> None:
        self.buffers.clear()
        self._host.release()

    def kill(self) -> None:
        """Have it end at once."""
        self._host.kill()
