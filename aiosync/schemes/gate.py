"""The gate: a commit lands only while nobody is reading the model.

Readers come through ``pinned()`` (asyncio) or through a forward pass of a guarded model (the blocking
twins, where another thread applies). Whoever brings the number of readers to zero runs the commit that
waits, right there: the event loop's thread at the end of a ``pinned()`` block, the worker's thread at
the end of a forward pass. While a commit waits new readers wait too, so that it cannot starve; a reader
inside a reader passes, since it would wait for itself.

One lock serves all gates of the process, because a joint commit needs several gates at once. It is held
for bookkeeping and for the commit itself, which re-points parameters and takes microseconds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

from torch import nn

from aiosync._deadline import Deadline

__all__ = ["CommitGate", "CommitJob", "ForwardGuard", "submit"]

_lock = threading.Condition(threading.RLock())


class CommitJob:
    """One commit that waits for its gates.

    Attributes:
        done: resolves when the commit has run, with its exception if it raised; cancelled if it was
            withdrawn before.
    """

    def __init__(self, gates: Sequence[CommitGate], commit: Callable[[], None]) -> None:
        self.gates = tuple(gates)
        self.done: Future[None] = Future()
        self._commit = commit

    def withdraw(self) -> bool:
        """Take the commit back; false if it has run already."""
        with _lock:
            if self.done.done():
                return False
            self._leave()
            self.done.cancel()
            return True

    def _ready(self) -> bool:
        return all(gate._free() for gate in self.gates)

    def _run(self) -> None:
        self._leave()
        try:
            self._commit()
        except BaseException as exc:  # noqa: BLE001 - travels through the future to whoever submitted
            self.done.set_exception(exc)
        else:
            self.done.set_result(None)

    def _leave(self) -> None:
        for gate in self.gates:
            gate._waiting.remove(self)
        _lock.notify_all()


class CommitGate:
    """Counts the readers of one model."""

    def __init__(self) -> None:
        self._readers: Counter[object] = Counter()
        self._waiting: list[CommitJob] = []
        self._guard: ForwardGuard | None = None

    def try_enter(self, reader: object) -> bool:
        """Become a reader, unless a commit waits that ``reader`` is not already holding up."""
        with _lock:
            if self._waiting and not self._readers[reader]:
                return False
            self._readers[reader] += 1
            return True

    def reads(self, reader: object) -> bool:
        """Whether ``reader`` is inside."""
        with _lock:
            return self._readers[reader] > 0

    def leave(self, reader: object) -> None:
        """Stop being a reader; runs the commit that waited for this, if there is one."""
        with _lock:
            self._readers[reader] -= 1
            if self._readers[reader] <= 0:
                del self._readers[reader]
            self._run_ready()

    async def enter(self, reader: object, deadline: Deadline) -> None:
        """Become a reader on the event loop.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        while not self.try_enter(reader):
            with _lock:
                job = self._waiting[-1] if self._waiting else None
            if job is None:
                continue
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await asyncio.wait([asyncio.wrap_future(job.done)])
            except TimeoutError:
                raise deadline.error("pin", hint="a commit waits for other readers to leave") from None

    def enter_blocking(self, reader: object, seconds: float) -> None:
        """Become a reader in a thread; after ``seconds`` of waiting it enters all the same, since a
        forward pass that is held up for ever is worse than a commit that comes later."""
        if self.try_enter(reader):
            return
        with _lock:
            _lock.wait_for(lambda: not self._waiting, timeout=seconds)
            self._readers[reader] += 1

    def _free(self) -> bool:
        if self._readers and self._guard is not None:
            self._guard.drop_stale(self._readers)
        return not self._readers

    def _run_ready(self) -> None:
        for job in list(self._waiting):
            if job._ready():
                job._run()


def submit(gates: Sequence[CommitGate], commit: Callable[[], None]) -> CommitJob:
    """Run ``commit`` as soon as no gate has a reader: now, in this thread, if that is so already."""
    job = CommitJob(gates, commit)
    with _lock:
        for gate in gates:
            gate._waiting.append(job)
        if job._ready():
            job._run()
    return job


class ForwardGuard:
    """Makes every forward pass of a module a reader of its gate, by hooks on the module.

    Calls that go around the module's ``__call__`` (``model.forward(x)``, a submodule by itself) are
    not seen; put ``with scheme.pinned():`` around those.

    Args:
        gate: the gate.
        patience: seconds that a forward pass waits for a commit that other readers hold up.
    """

    def __init__(self, gate: CommitGate, model: nn.Module, patience: float) -> None:
        self._gate = gate
        self._patience = patience
        self._frames: dict[object, list[FrameType]] = {}
        self._handles = [
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        gate._guard = self

    def remove(self) -> None:
        """Take the hooks off; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._gate._guard = None

    def __deepcopy__(self, memo: object) -> _Inert:
        return _Inert()  # a copy of the model has no receiver

    def __reduce__(self) -> tuple[object, ...]:
        return (_Inert, ())

    def drop_stale(self, readers: Counter[object]) -> None:
        """Forget forward passes that are over without their hook having run.

        An interrupt (Ctrl-C) leaves a forward pass without calling its hooks. Its frame is then on
        no thread's stack any more.
        """
        running = {id(frame) for top in sys._current_frames().values() for frame in _stack(top)}
        for reader, frames in list(self._frames.items()):
            alive = [frame for frame in frames if id(frame) in running]
            if len(alive) < len(frames):
                readers[reader] -= len(frames) - len(alive)
                self._frames[reader] = alive
                if readers[reader] <= 0:
                    del readers[reader]

    def _before(self, module: nn.Module, args: Any) -> None:
        reader = threading.get_ident()
        self._gate.enter_blocking(reader, self._patience)
        # The frame of the module's call: two up, past this hook and the code that runs the hooks.
        self._frames.setdefault(reader, []).append(sys._getframe(1))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        reader = threading.get_ident()
        frames = self._frames.get(reader)
        if frames:
            frames.pop()
            self._gate.leave(reader)


class _Inert:
    """What the hooks of a copied or pickled model call: nothing happens."""

    def _before(self, module: nn.Module, args: Any) -> None:
        pass

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        pass


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
