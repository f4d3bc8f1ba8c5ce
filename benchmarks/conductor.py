"""Starts the contenders of one group and has them take turns; every wait has a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from types import TracebackType
from typing import Any

import torch

from benchmarks.channel import Reply, Request, Values
from benchmarks.meters import MemoryPeak, MemorySampler
from benchmarks.models import ModelSpec
from benchmarks.trainer import TrainerSpec, trainer_main

__all__ = ["ContenderFailed", "Memcpy", "Stage"]

BUILD_TIMEOUT = 300.0
"""Seconds for a dozen processes to import torch, on two cores that others use too."""
CLOSE_TIMEOUT = 30.0
SAMPLE_EVERY = 0.01
"""Seconds between two looks at the memory, at least."""
LOOKING_SHARE = 0.2
"""How much of the time may go into looking: a look holds up who is mapping memory."""


class ContenderFailed(Exception):
    """A contender is out of the race.

    Attributes:
        status: ``failed`` (an error), ``timeout`` (no answer in time) or ``died``.
    """

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        super().__init__(message)


class Memcpy:
    """The physical limit: the same bytes from one warm buffer into another.

    Args:
        numel: how many fp32 elements.
    """

    def __init__(self, numel: int) -> None:
        self._source = torch.ones(numel)
        self._target = torch.zeros(numel)

    def round(self, value: int) -> float:
        """Change the source (not timed), copy it (timed); returns seconds."""
        self._source.fill_(float(value))
        start = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - start


class Stage:
    """One contender, live: its trainer process and that one's workers. Use as a context manager.

    Args:
        contender: its name.
        scheme: the backend name.
        model: what is sent.
        workers: how many workers.
        deadline: seconds that any one command may take, but for starting and closing.
        uvloop: whether its processes run on uvloop.
    """

    def __init__(
        self,
        contender: str,
        scheme: str,
        model: ModelSpec,
        workers: int,
        *,
        deadline: float,
        uvloop: bool,
    ) -> None:
        self.contender = contender
        self.workers = workers
        self._deadline = deadline
        self._kill_workers: Callable[[], None] = _killer([])
        ctx = get_context("spawn")
        self._conn, theirs = ctx.Pipe()
        spec = TrainerSpec(contender, scheme, model, workers, uvloop)
        self._process = ctx.Process(target=trainer_main, args=(spec, theirs), name=f"trainer-{contender}")
        self._process.start()
        theirs.close()
        self._sampler: MemorySampler | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def build(self) -> None:
        """Wait until the workers that ``post("build")`` spawns are up; note the memory in use."""
        reply = self.wait("build", deadline=BUILD_TIMEOUT)
        pids: list[int] = reply["pids"]
        self._kill_workers = _killer(pids)
        assert self._process.pid is not None
        self._sampler = MemorySampler(self._process.pid, pids)

    def post(self, verb: str, **values: object) -> None:
        """Have the trainer begin something. Raises :class:`ContenderFailed` when it is gone."""
        try:
            self._conn.send(Request(verb, values))
        except OSError as error:
            raise ContenderFailed("died", f"{verb}: the trainer's process is gone") from error

    def wait(
        self,
        verb: str,
        *,
        deadline: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Values:
        """Wait until the trainer has done what it was posted.

        Args:
            verb: what that was, for messages.
            deadline: seconds, where the usual ones are not right.
            meanwhile: called again and again while waiting.

        Raises:
            ContenderFailed: when it failed, died, or did not answer in time.
        """
        seconds = self._deadline if deadline is None else deadline
        end = time.monotonic() + seconds
        try:
            pause = SAMPLE_EVERY if meanwhile else seconds
            while not self._conn.poll(pause):
                begun = time.monotonic()
                if begun >= end:
                    raise ContenderFailed("timeout", f"{verb}: no answer within {seconds:g} s")
                if meanwhile:
                    meanwhile()
                    pause = max(SAMPLE_EVERY, (time.monotonic() - begun) / LOOKING_SHARE)
            reply: Any = self._conn.recv()
        except (EOFError, OSError) as error:
            raise ContenderFailed("died", f"{verb}: the trainer's process is gone") from error
        assert isinstance(reply, Reply)
        if reply.error:
            raise ContenderFailed("failed", f"{verb}: {reply.error}")
        return reply.values

    def call(self, verb: str, *, deadline: float | None = None, **values: object) -> Values:
        """:meth:`post` and :meth:`wait` in one."""
        self.post(verb, **values)
        return self.wait(verb, deadline=deadline)

    def memory(self, mode: str, sends: int) -> MemoryPeak | None:
        """Peak memory over ``sends`` sends."""
        assert self._sampler is not None, "build comes first"
        sampler = self._sampler
        sampler.restart()
        self.post("burst", mode=mode, sends=sends)
        self.wait("burst", meanwhile=sampler.sample)
        sampler.sample()
        return sampler.peak()

    def close(self) -> None:
        """After ``post("close")``: wait until it has ended; ContenderFailed where it does not."""
        self.wait("close", deadline=CLOSE_TIMEOUT)
        self._process.join(CLOSE_TIMEOUT)
        if self._process.is_alive():
            raise ContenderFailed("timeout", f"close: still there after {CLOSE_TIMEOUT:g} s")

    def kill(self) -> None:
        """End what is left of it, by force; harmless where nothing is."""
        self._kill_workers()
        self._process.kill()
        self._process.join()
        self._conn.close()


def _killer(pids: Sequence[int]) -> Callable[[], None]:
    """What kills these processes, once, and none that has got one of their numbers since."""
    handles = ExitStack()
    if sys.platform == "linux":
        for pid in pids:
            handles.callback(_kill_handle, os.pidfd_open(pid))
    return handles.close


def _kill_handle(handle: int) -> None:
    if sys.platform == "linux":
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
