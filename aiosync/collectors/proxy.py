"""The collector's side of one worker: its host, its requests, and the batches that it has delivered."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDictBase

from aiosync._deadline import Deadline
from aiosync.collectors.batch_buffers import BatchBuffer, Part
from aiosync.collectors.command_pipe import (
    Answer,
    Batch,
    Call,
    Collect,
    CommandPipe,
    CommandPipeClosed,
    EndEarly,
    ErrorReport,
    NewBuffer,
    Payload,
    Ready,
)
from aiosync.collectors.env import Fields, Nested, assemble
from aiosync.collectors.host import Host
from aiosync.collectors.worker import cancel_all
from aiosync.collectors.worker_spec import Schemes, WorkerSpec
from aiosync.errors import NotConnectedError, SyncTimeoutError, WorkerLostError
from aiosync.transports._offload import uninterrupted
from aiosync.weights.segment import Segment

_EXIT_SECONDS = 1.0
"""Seconds that a worker has to end after it closed its pipe."""

_MAX_LENT = 32
"""Batches of one worker that the trainer may hold in their original memory at a time. Further ones are
copied: each loan keeps a file descriptor open in two processes."""

_KILL_SECONDS = 5.0
"""Seconds to wait for the end of a killed worker."""


class BufferLoans:
    """Which of a worker's buffers the trainer holds, and which of them the worker may reuse."""

    def __init__(self) -> None:
        self.lent: dict[int, BatchBuffer] = {}  # number -> a buffer that the trainer may hold
        self._released: list[int] = []  # buffers that the worker may reuse and has not been notified of

    def lend(self, number: int, buffer: BatchBuffer, steps: int) -> Fields:
        """Lend a buffer's first ``steps`` frames. It is released once the last reference to these tensors is
        dropped."""
        self.lent[number] = buffer
        return buffer.lend(steps)

    def release(self, number: int) -> None:
        """Let the worker reuse a buffer."""
        self._released.append(number)

    @property
    def is_full(self) -> bool:
        """Whether the trainer holds so many buffers that it gets no further one."""
        if len(self.lent) >= _MAX_LENT:
            self._end_loans()
        return len(self.lent) >= _MAX_LENT

    def _end_loans(self) -> None:
        for number in [number for number, buffer in self.lent.items() if not buffer.is_lent]:
            del self.lent[number]
            self.release(number)

    def take_released(self) -> tuple[int, ...]:
        """Return the released buffers for the next request, and forget them."""
        self._end_loans()
        released, self._released = tuple(self._released), []
        return released


@dataclass(frozen=True, eq=False, slots=True)
class DeliveredBatch:
    """A batch in the memory that its worker wrote it to."""

    worker: WorkerProxy
    requested: int  # how many frames were requested
    message: Batch
    data: TensorDictBase | BatchBuffer  # the frames, or the shared memory that has them

    @property
    def frames(self) -> int:
        """How many frames the batch has."""
        return self.message.steps * self.worker.width

    def read(self) -> TensorDictBase:
        """Return the frames without a copy: valid until :meth:`release`."""
        if isinstance(self.data, TensorDictBase):
            return self.data
        return self.data.read(self.message.steps, self.worker.shape, self.message.order)

    def part(self) -> Part:
        """Return the frames as :meth:`read`. They may not be changed."""
        if isinstance(self.data, TensorDictBase) or self.message.order is not None:
            return Part.of(self.read())
        return self.data.part(self.message.steps, self.worker.shape)

    def lend(self) -> TensorDictBase:
        """Return the frames and release the batch. Its memory is reused once the last reference to these
        tensors is dropped."""
        loans, buffer, steps = self.worker.loans, self.message.buffer, self.message.steps
        if isinstance(self.data, TensorDictBase) or self.message.order is not None:
            found = self.read()  # which are no views of a buffer
        elif loans.is_full:
            found = self.read().clone()
        else:
            self.worker.batches.remove(self)
            views = loans.lend(buffer, self.data, steps)
            return assemble(views, (*self.worker.shape, steps), self.worker.nested)
        self.release()
        return found

    def release(self) -> None:
        """Remove the batch from the worker's delivered ones. Its memory may be reused."""
        self.worker.batches.remove(self)
        if isinstance(self.data, BatchBuffer):
            self.worker.loans.release(self.message.buffer)


async def _last_report(pipe: CommandPipe) -> ErrorReport | None:
    """Return the error that a worker has reported before it ended, if the pipe still has it."""
    # With a deadline, since a process that the worker has left behind may hold the pipe open.
    with suppress(CommandPipeClosed, TimeoutError):
        async with asyncio.timeout(_EXIT_SECONDS):
            return await _next_report(pipe)
    return None


async def _next_report(pipe: CommandPipe) -> ErrorReport:
    while not isinstance(message := await pipe.receive(), ErrorReport):
        pass
    return message


@dataclass(eq=False, repr=False)
class WorkerProxy:
    """One worker, as the collector sees it."""

    spec: WorkerSpec
    host: Host
    on_change: Callable[[WorkerProxy], None]  # called after each message and each failure
    on_batch: Callable[[DeliveredBatch], None]  # called with each batch that the worker delivers
    ready: bool = False  # whether the worker can collect, and whether it ever could
    was_ready: bool = False
    batches: list[DeliveredBatch] = field(default_factory=list)  # not taken by the trainer, oldest first
    frames: int = 0  # how many frames the worker has delivered
    shape: tuple[int, ...] = ()  # batch shape of a frame: the environments that step together
    nested: Nested = field(default_factory=dict)  # the batch dimensions of nested entries beside these
    whole: bool = False  # whether a replay buffer gets batches instead of single frames
    seed: int | None = None  # the last one given since its start
    error: BaseException | None = None  # why the worker failed; None: it has not
    replaced: bool = False  # whether another worker takes its place
    loans: BufferLoans = field(default_factory=BufferLoans)
    buffers: dict[int, BatchBuffer] = field(default_factory=dict)
    # Number -> a requested batch that the worker has not delivered; number -> the answer of a call.
    _requests: dict[int, Collect] = field(default_factory=dict)
    _calls: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _pipe: CommandPipe | None = None
    _receiving: asyncio.Task[None] | None = None

    @property
    def index(self) -> int:
        """Its place among the workers."""
        return self.spec.index

    @property
    def width(self) -> int:
        """Frames per step of each of its environments."""
        return math.prod(self.shape)

    @property
    def requested(self) -> int:
        """How many requested batches the worker has not delivered yet."""
        return len(self._requests)

    async def start(self, schemes: Schemes) -> None:
        """Start the worker. ``schemes`` deliver its weights. OSError: it cannot be started."""
        self._pipe = await self.host.start(self.spec, schemes)
        work = self._receive_messages(self._pipe)
        self._receiving = asyncio.create_task(work, name=f"aiosync-worker-{self.index}")

    async def _receive_messages(self, pipe: CommandPipe) -> None:
        try:
            while True:
                self._handle(await pipe.receive())
        except Exception as exc:  # noqa: BLE001 - raised in the call that waits for this worker
            # The pipe is closed; or the worker announced a buffer and died, so its memory cannot be mapped.
            closed = isinstance(exc, CommandPipeClosed)
            died = await self.host.ended(Deadline.after(_EXIT_SECONDS))
            report = await _last_report(pipe) if died and not closed else None
            error = WorkerLostError([self.index], self.host.cause()) if died or closed else exc
            self.fail(error if report is None else report.exception(self.index))

    def _handle(self, message: Any) -> None:
        match message:
            case Ready():
                self.shape, self.nested, self.whole = message
                self.ready = self.was_ready = True
                for request in self._requests.values():  # those of the worker that this one replaces
                    self._send(request)
            case NewBuffer() as new:
                buffer = BatchBuffer(
                    new.specs, new.frames, lambda _: Segment.attach(new.handle), len(self.shape), self.nested
                )
                self.buffers[new.buffer] = buffer
                for index in new.replaced:
                    del self.buffers[index]
            case Batch(number=number, data=data):
                requested = self._requests.pop(number).frames
                where = self.buffers[message.buffer] if data is None else data
                delivered = DeliveredBatch(self, requested, message, where)
                self.frames += delivered.frames
                self.batches.append(delivered)
                self.on_batch(delivered)
            case Answer(number=number) if number in self._calls:  # else its call has timed out
                self._calls.pop(number).set_result(message)
            case ErrorReport() as failed:
                self.fail(failed.exception(self.index))
        self.on_change(self)

    def fail(self, error: BaseException) -> None:
        """Record that the worker has failed. Its open calls raise ``error``. Only the first error is kept."""
        if self.error is None:
            self.error = error
            self.ready = False
            self._fail_calls(error)
            self.on_change(self)

    def _fail_calls(self, error: BaseException) -> None:
        while self._calls:
            self._calls.popitem()[1].set_exception(error)

    # -- requests and calls ---------------------------------------------------------------------------

    def collect(self, frames: int, *, at_random: bool) -> None:
        """Request a batch, to be collected after the ones requested before, with random actions or not."""
        request = Collect(next(self._numbers), frames, at_random, self.loans.take_released())
        self._requests[request.number] = request
        if self.ready:
            self._send(request)

    def end_early(self) -> None:
        """Make the worker deliver the batches in progress with the frames that they have."""
        if self.ready:
            self._send(EndEarly())

    def _send(self, message: Collect | EndEarly | Call) -> None:
        assert self._pipe is not None
        self._pipe.send(message)

    def take_over(self, lost: WorkerProxy) -> None:
        """Take over the requests and the delivered batches of a lost worker."""
        self.batches = lost.batches
        self.frames = lost.frames
        for old in lost._requests.values():
            request = old._replace(number=next(self._numbers), returned=())
            self._requests[request.number] = request

    async def call(self, method: str, arguments: Sequence[Any], deadline: Deadline) -> Any:
        """Call one of the worker's methods. Raises what the method raises, or why the worker failed.
        UnpicklableError: the arguments or the result cannot be unpickled in the other process."""
        if self.error is not None:
            raise self.error
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(number, method, Payload(tuple(arguments))))
            await asyncio.wait([future], timeout=deadline.remaining())
            if not future.done():
                hint = f"{method}() has not answered"
                raise SyncTimeoutError("receive", workers=[self.index], seconds=deadline.seconds, hint=hint)
            answer = future.result()
        finally:
            self._calls.pop(number, None)
        if answer.error is not None:
            raise answer.error.exception(self.index)
        assert answer.value is not None
        return answer.value.load(f"what {method}() of worker {self.index} returned")

    # -- the end --------------------------------------------------------------------------------------

    async def close(self, deadline: Deadline) -> None:
        """End the worker and wait for its end. It is killed after the deadline, or if this call is cancelled.
        Idempotent."""
        self._fail_calls(NotConnectedError("this collector was closed during the call"))
        if self._pipe is not None:
            self._pipe.close()  # which makes the worker end
        receiving, self._receiving = self._receiving, None
        ended = False
        try:
            if receiving is not None:
                await cancel_all(receiving)
            ended = await self.host.ended(deadline)
        finally:
            try:
                if not ended:
                    self.host.kill()
                    # Shielded: a cancelled caller would leave the process running. Bounded by _KILL_SECONDS.
                    await uninterrupted(lambda _: self.host.ended(Deadline.after(_KILL_SECONDS)))
            finally:
                self.buffers.clear()
                self.loans.lent.clear()  # tensors keep their memory by themselves
                self.host.release()
