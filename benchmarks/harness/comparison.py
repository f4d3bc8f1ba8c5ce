"""The driver: starts the contenders' processes and has the contenders take turns within one run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contenders import Sent, Setup
from benchmarks.harness.meters import Memcpy, MemoryPeak, memory_of, memory_peak, spread
from benchmarks.harness.process import Remote, RemoteError
from benchmarks.harness.results import Case, Key
from benchmarks.harness.tables import say
from benchmarks.harness.trainer import Trainer

BUILD_TIMEOUT = 300.0
"""Seconds for a dozen processes to import torch, on two cores that other programs use too."""
CLOSE_TIMEOUT = 30.0
SAMPLE_EVERY = 0.01  # seconds between two samples of the memory, at least
SAMPLING_SHARE = 0.2  # how much of the time may go into sampling: a sample blocks processes that map memory


class Stage:
    """One contender's processes: a trainer, and the workers that the trainer spawned.

    Any one call may take ``deadline`` seconds, except for starting and closing.
    """

    def __init__(self, setup: Setup, deadline: float) -> None:
        self.setup = setup
        self.workers: list[int] = []  # process ids, once built
        self.cases = [
            Case(Key(setup.model.name, setup.scheme, mode, setup.workers), setup.contender)
            for mode in setup.modes
        ]
        self._deadline = deadline
        self.trainer = Remote(Trainer, setup, uvloop=setup.uvloop, parent=True)

    async def call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call the trainer within the deadline, or ``timeout``. Raises :class:`RemoteError`."""
        return await self.trainer.call(method, timeout=timeout or self._deadline, **arguments)

    async def build(self) -> None:
        """Wait until the workers are up; memory is counted from here."""
        self.workers = await self.call("build", timeout=BUILD_TIMEOUT)
        self._base = memory_of([self.trainer.pid, *self.workers])

    async def memory(self, **arguments: Any) -> MemoryPeak | None:
        """The peak memory of the trainer and the workers during some sends."""
        pids, samples = [self.trainer.pid, *self.workers], []
        burst = asyncio.create_task(self.call("burst", **arguments))
        pause = SAMPLE_EVERY
        while not (await asyncio.wait({burst}, timeout=pause))[0]:
            begun = time.monotonic()
            samples.append(memory_of(pids))
            pause = max(SAMPLE_EVERY, (time.monotonic() - begun) / SAMPLING_SHARE)
        await burst
        return memory_peak(self._base, [*samples, memory_of(pids)])

    async def attempt(self, action: Awaitable[Any]) -> Any:
        """Await ``action`` and return its result; None if this contender fails, which its cases note."""
        try:
            return await action
        except RemoteError as failure:
            say(f"{self.setup.contender}: {failure.status}")
            self.trainer.kill()
            for case in self.cases:
                case.status, case.error = failure.status, str(failure)

    @property
    def alive(self) -> bool:
        """Whether the contender has not failed."""
        return self.cases[0].status == "ok"


@dataclass(slots=True)
class Entry:
    """One contender in one mode. ``turns`` has the seconds and the report of each send, turn by turn."""

    stage: Stage
    case: Case
    turns: list[list[tuple[float, Sent]]] = field(default_factory=list)

    def finish(self) -> Case:
        """The case, with the sends summed up."""
        case = self.case
        sends = [send for turn in self.turns for send in turn]
        case.send = spread([seconds for seconds, _ in sends])
        case.samples = [seconds * 1e3 for seconds, _ in sends]
        case.first = spread([turn[0][0] for turn in self.turns])
        case.commit = spread([seconds for _, sent in sends for seconds in sent.commit.values()])
        phases: dict[str, list[float]] = {}
        for _, sent in sends:
            for name, seconds in sent.phases.items():
                phases.setdefault(name, []).append(seconds)
        case.phases = {name: found.median for name, each in phases.items() if (found := spread(each))}
        return case


class Comparison:
    """Contenders that take turns, with an entry for each mode of each. A contender that fails is a result,
    and the others continue."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.entries = [Entry(stage, case) for stage in stages for case in stage.cases]

    async def take_turns(
        self, rounds: int, *, warm_up: int, limit: Memcpy | None = None, alone: bool = False
    ) -> list[float]:
        """A B C, B C A, C A B: which contender comes first changes from round to round.

        Args:
            rounds: turns of each that count.
            warm_up: turns of each before those.
            limit: taken before each round, as often as a turn has sends.
            alone: stop the other contenders' workers (SIGSTOP) during a turn.

        Returns:
            Seconds of each copy of the limit.
        """
        copies: list[float] = []
        for number in range(warm_up + rounds):
            if number in (0, warm_up):
                say(f"{rounds} rounds" if number == warm_up else "warming up")
                copies.clear()
                for entry in self.entries:
                    entry.turns.clear()
            alive = [entry for entry in self.entries if entry.stage.alive]
            cut = number % max(1, len(alive))
            if limit is not None:
                copies.extend(limit.take(number) for _ in range(self.entries[0].stage.setup.model.turn))
            for entry in alive[cut:] + alive[:cut]:
                stage = entry.stage
                others = {other.stage for other in alive if alone and other.stage is not stage}
                with _suspended([pid for other in others for pid in other.workers]):
                    if stage.alive and (
                        turn := await stage.attempt(stage.call("turn", mode=entry.case.key.mode))
                    ):
                        entry.turns.append(turn)
        return copies

    async def each(
        self, name: str, entries: Sequence[Entry], *, timeout: float | None = None, **arguments: Any
    ) -> None:
        """Measure one thing of each of these entries, one after the other.

        Args:
            name: of a field of :class:`Case`: ``memory``, or that of a method of :class:`Trainer`.
            entries: of this comparison.
            timeout: seconds, if the deadline does not suit.
            arguments: of the method, besides the mode.
        """
        for case, stage in ((entry.case, entry.stage) for entry in entries if entry.stage.alive):
            say(f"{name}: {case.contender}, {case.key.mode}")
            arguments |= {"mode": case.key.mode, "timeout": timeout}
            call = stage.memory(**arguments) if name == "memory" else stage.call(name, **arguments)
            found = await stage.attempt(call)
            if stage.alive:
                setattr(case, name, found)


@contextlib.asynccontextmanager
async def compare(deadline: float, *setups: Setup) -> AsyncIterator[Comparison]:
    """Build and connect contenders, whose steps may take ``deadline`` seconds each; close them at the end.

    No process is left afterwards. A case notes a failure of its contender's end, too.
    """
    stages: list[Stage] = []
    try:
        say("starting the workers")
        stages.extend(Stage(setup, deadline) for setup in setups)
        # At the same time: most of it is importing, and none of it is measured.
        await asyncio.gather(*(stage.attempt(stage.build()) for stage in stages))
        for stage in stages:
            if stage.alive:
                await stage.attempt(stage.call("connect"))
        yield Comparison(stages)
        await asyncio.gather(
            *(stage.attempt(stage.trainer.close(CLOSE_TIMEOUT)) for stage in stages if stage.alive)
        )
    finally:
        for stage in stages:
            stage.trainer.kill()


@contextlib.contextmanager
def _suspended(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
