"""One worker, seen from its collector: its process, its pipe, and what it has said so far."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import signal
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import Any

import cloudpickle
from tensordict import TensorDict

from aiosync._deadline import Deadline
from aiosync.collectors.channel import Channel
from aiosync.collectors.fields import Slot
from aiosync.collectors.messages import Answer, Batch, Call, Collect, Cut, Failed, NewSlot, Ready
from aiosync.collectors.worker import WorkerSpec, run
from aiosync.errors import SyncTimeoutError, WorkerLostError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transports._offload import offloaded
from aiosync.weights.segment import Segment

__all__ = ["Delivered", "RemoteTraceback", "WorkerProcess", "raised_by"]

_DYING = 5.0
"""Seconds that a process which was killed has to be gone."""


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
    """A batch in the memory where its worker put it."""

    batch: Batch
    slot: Slot
    dims: int
    free: list[int]
    waiting: list[Delivered]

    def read(self) -> TensorDict:
        """It, in that memory."""
        return self.slot.read(self.batch.steps, self.dims, self.batch.order)

    def taken(self) -> None:
        """It waits no longer, and the memory may be written over."""
        self.waiting.remove(self)
        self.free.append(self.batch.slot)


class WorkerProcess:
    """A worker.

    Args:
        spec: what it is.
        on_change: called when anything is to be looked at anew.
        on_batch: called with each batch that it delivers.

    Attributes:
        index: which worker.
        ready, was_ready: it has all that it needs to play, or had before it failed.
        batches: what it has delivered and nobody has taken yet, oldest first.
        frames: how many frames it has delivered.
        seed: what it was seeded with last.
        error: why nothing more will come from it, or None.
        replaced: another gets its place.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        on_change: Callable[[WorkerProcess], None],
        on_batch: Callable[[Delivered], None],
    ) -> None:
        self.index = spec.index
        self.ready = self.was_ready = False
        self.batches: list[Delivered] = []
        self.frames = 0
        self.seed = spec.seed
        self.error: BaseException | None = None
        self.replaced = False
        self._requests: deque[Collect] = deque()
        self._spec = spec
        self._on_change = on_change
        self._on_batch = on_batch
        self._slots: dict[int, tuple[Slot, int]] = {}
        self._free: list[int] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._process: Any = None
        self._channel: Channel | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, ctx: BaseContext, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Start the process."""
        ours, theirs = ctx.Pipe()
        spec = cloudpickle.dumps(self._spec)
        name = f"aiosync-collector-{self.index}"
        make: Any = ctx.Process  # type: ignore[attr-defined]
        self._process = make(target=run, args=(spec, dict(schemes), theirs), name=name, daemon=True)
        try:
            await offloaded(self._process.start, "aiosync-start")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = await Channel.open(ours)
        self._listening = asyncio.create_task(self._listen(), name=name)

    async def _listen(self) -> None:
        assert self._channel is not None
        try:
            while True:
                self._take(await self._channel.receive())
        except EOFError:
            self.fail(WorkerLostError([self.index], await self._cause()))
        except Exception as exc:  # noqa: BLE001 - raised to whoever waits for this worker
            # Its memory cannot be mapped, say, because it has died since it told of it.
            cause = await self._cause()
            self.fail(exc if self._process.exitcode is None else WorkerLostError([self.index], cause))

    def _take(self, message: Any) -> None:
        match message:
            case Ready():
                self.ready = self.was_ready = True
                for request in self._requests:  # of the one whose place it has
                    self._send(request)
            case NewSlot() as new:
                segment = Segment.attach(new.handle)
                self._slots[new.slot] = Slot(segment, new.specs, new.frames), len(new.shape)
            case Batch() as batch:
                self._requests.popleft()
                self.frames += batch.steps
                slot, dims = self._slots[batch.slot]
                delivered = Delivered(batch, slot, dims, self._free, self.batches)
                self.batches.append(delivered)
                self._on_batch(delivered)
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

    async def _cause(self) -> str:
        await self._gone(Deadline.after(1.0))
        code = self._process.exitcode
        if code is None:
            return "its pipe closed, though its process still runs"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def fail(self, error: BaseException) -> None:
        """Nothing more will come from it, for this reason."""
        if self.error is None:
            self.error = error
            self.ready = False
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(error)
            self._calls.clear()
            self._on_change(self)

    # -- what it is asked for -------------------------------------------------------------------------

    @property
    def asked(self) -> int:
        """How many batches it has been asked for and has not delivered."""
        return len(self._requests)

    @property
    def frames_asked(self) -> int:
        """How many frames these have."""
        return sum(request.frames for request in self._requests)

    def collect(self, frames: int, *, at_random: bool) -> None:
        """Have it collect another batch, after those that it was asked for before."""
        request = Collect(frames, at_random, self._free.pop() if self._free else -1)
        self._requests.append(request)
        if self.ready:
            self._send(request)

    def cut(self) -> None:
        """Have it deliver what it is collecting as far as that is."""
        if self.ready:
            self._send(Cut())

    def _send(self, message: Collect | Cut | Call) -> None:
        assert self._channel is not None
        self._channel.send(message)

    def succeed(self, lost: WorkerProcess) -> None:
        """Take over what was asked of another, and what it has delivered."""
        self.batches = lost.batches
        self.frames = lost.frames
        self._requests = deque(replace(request, returned=-1) for request in lost._requests)

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
            async with asyncio.timeout(deadline.remaining()):
                return await future
        except TimeoutError as exc:
            if deadline.expired:
                raise SyncTimeoutError(
                    "receive",
                    workers=[self.index],
                    seconds=deadline.seconds,
                    hint=f"{method}() has not answered",
                ) from exc
            raise
        finally:
            self._calls.pop(number, None)

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell it to end."""
        if self._channel is not None:
            self._channel.close()

    async def close(self, deadline: Deadline) -> None:
        """Have it end, and wait for that; after the deadline it is killed. Idempotent."""
        self.leave()
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return
        if not await _ended(process, deadline):
            process.kill()
            await _ended(process, Deadline.after(_DYING))
        self._slots.clear()
        with suppress(ValueError):  # it still runs: nothing more can be done
            process.close()

    async def _gone(self, deadline: Deadline) -> None:
        if self._process is not None:
            await _ended(self._process, deadline)


async def _ended(process: Any, deadline: Deadline) -> bool:
    """Wait for a process; whether it has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    if process.exitcode is None:
        loop.add_reader(process.sentinel, ended.set)
        try:
            async with asyncio.timeout(deadline.remaining()):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(process.sentinel)
        process.join()
    return True
