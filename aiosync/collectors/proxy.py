"""The collector's side of one worker: its host, its requests, and the batches that it has delivered."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict

from aiosync._deadline import Deadline
from aiosync.collectors.batch_buffers import BatchBuffer, BufferLoans, select_steps
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
"""Seconds that a worker has to end after it closed its pipe."""

_MAX_LENT = 32
"""Batches of one worker that the trainer may hold in their original memory at a time. Further ones are
copied."""

_KILL_SECONDS = 5.0
"""Seconds to wait for the end of a killed worker."""


class RemoteTraceback(Exception):
    """The worker's traceback, as the cause of the worker's exception that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def exception_from(worker: int, failed: ErrorReport) -> BaseException:
    """Return a worker's exception, with its traceback as the cause and a note that names the worker."""
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
    """A batch in the memory that its worker wrote it to.

    Attributes:
        worker: the worker.
        requested: how many frames were requested.
        message: the worker's message about the batch.
        buffer: the memory, and the batch shape of a frame in it; None: the message has the frames.
    """

    worker: WorkerProxy
    requested: int
    message: Batch | InlineBatch
    buffer: tuple[BatchBuffer, tuple[int, ...]] | None = None

    @property
    def frames(self) -> int:
        """How many frames the batch has."""
        if isinstance(self.message, InlineBatch):
            return int(self.message.data.numel())
        width: int = math.prod(self._buffer[1])
        return self.message.steps * width

    def read(self) -> TensorDict:
        """Return the frames without a copy: valid until :meth:`release`."""
        if isinstance(self.message, InlineBatch):
            return self.message.data
        buffer, shape = self._buffer
        return buffer.read(self.message.steps, len(shape), self.message.order)

    def lend(self) -> TensorDict:
        """Return the frames and release the batch. Its memory is reused once the last reference to these
        tensors is dropped."""
        if isinstance(self.message, InlineBatch) or self.message.order is not None:
            found = self.read()
            self.release()
            return found
        if len(self.worker.loans.lent) >= _MAX_LENT:  # each keeps a file descriptor open in two processes
            found = self.read().clone()
            self.release()
            return found
        buffer, shape = self._buffer
        self.worker.discard(self)
        on_returned = self.worker.loans.lend(self.message.buffer)
        return select_steps(buffer.lend(on_returned), slice(self.message.steps), len(shape))

    def release(self) -> None:
        """Remove the batch from the worker's delivered ones. Its memory may be reused."""
        self.worker.discard(self)
        if isinstance(self.message, Batch):
            self.worker.loans.release(self.message.buffer)

    @property
    def _buffer(self) -> tuple[BatchBuffer, tuple[int, ...]]:
        assert self.buffer is not None
        return self.buffer


class WorkerProxy:
    """One worker, as the collector sees it.

    Args:
        spec: the worker's spec.
        host: runs the worker.
        on_change: called after each message and each failure of the worker.
        on_batch: called with each batch that the worker delivers.

    Attributes:
        index: the worker's index.
        ready: the worker can collect.
        was_ready: the worker could collect at some time; stays true when it fails.
        batches: delivered batches that the trainer has not taken, oldest first.
        buffers: number -> (memory, batch shape of a frame in it).
        loans: which buffers the trainer holds.
        frames: how many frames the worker has delivered.
        width: frames per step of each of its environments.
        seed: its last seed; None: unseeded.
        error: why the worker failed; None: it has not.
        replaced: another worker takes its place.
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
        # Number -> a requested batch that the worker has not delivered.
        self._requests: dict[int, Collect] = {}
        self._spec = spec
        self._host = host
        self._on_change = on_change
        self._on_batch = on_batch
        self.buffers: dict[int, tuple[BatchBuffer, tuple[int, ...]]] = {}
        self.loans = BufferLoans()
        # Number -> the answer of a call.
        self._calls: dict[int, asyncio.Future[Any]] = {}
        # Numbers of requests and calls.
        self._numbers = itertools.count()
        self._pipe: CommandPipe | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def start(self, schemes: Schemes) -> None:
        """Start the worker.

        Args:
            schemes: model id -> the scheme that delivers its weights.

        Raises:
            OSError: the worker cannot be started.
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
            # For example: the worker announced a buffer and died, so its memory cannot be mapped.
            died = await self._host.ended(Deadline.after(_EXIT_SECONDS))
            self.fail(WorkerLostError([self.index], self._host.cause()) if died else exc)

    def _handle(self, message: Any) -> None:
        match message:
            case Ready(width=width):
                self.width = width
                self.ready = self.was_ready = True
                for request in self._requests.values():  # those of the worker that this one replaces
                    self._send(request)
            case NewBuffer() as new:
                segment = Segment.attach(new.handle)
                self.buffers[new.buffer] = BatchBuffer(segment, new.specs, new.frames), new.shape
                for index in new.replaced:
                    del self.buffers[index]
            case Batch() as batch:
                self._record_batch(batch, self.buffers[batch.buffer])
            case InlineBatch() as inline:
                self._record_batch(inline)
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

    def discard(self, batch: DeliveredBatch) -> None:
        """Remove a batch from the delivered ones."""
        self.batches.remove(batch)

    def fail(self, error: BaseException) -> None:
        """Record that the worker has failed. Its open calls raise ``error``. Only the first error is kept."""
        if self.error is None:
            self.error = error
            self.ready = False
            self.fail_calls(error)
            self._on_change(self)

    # -- requests and calls ---------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The worker's process id, if it has a process on this machine."""
        return self._host.pid

    @property
    def requested(self) -> int:
        """How many requested batches the worker has not delivered yet."""
        return len(self._requests)

    def collect(self, frames: int, *, at_random: bool) -> None:
        """Request a batch, to be collected after the ones requested before.

        Args:
            frames: how many frames.
            at_random: take random actions.
        """
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
            request = replace(old, number=next(self._numbers), returned=())
            self._requests[request.number] = request

    async def call(self, method: str, *arguments: Any, deadline: Deadline) -> Any:
        """Call one of the worker's methods.

        Args:
            method: its name.
            arguments: its arguments.
            deadline: of the answer.

        Raises:
            Exception: what the method raises, or why the worker failed.
            SyncTimeoutError: no answer arrived in time.
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
        """Make all calls without an answer raise ``error``."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # -- the end --------------------------------------------------------------------------------------

    def close_pipe(self) -> None:
        """Close the pipe, which makes the worker end."""
        if self._pipe is not None:
            self._pipe.close()

    async def close(self, deadline: Deadline) -> None:
        """End the worker and wait for its end. It is killed after the deadline, or if this call is cancelled.
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
                # Shielded: a cancelled caller would leave the process running. Bounded by _KILL_SECONDS.
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
        """Kill the worker."""
        self._host.kill()
