"""The driver: starts the contenders' processes and has the contenders take turns within one run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.contenders import Sent, Setup
from benchmarks.harness.meters import Memcpy, MemorySampler, spread
from benchmarks.harness.process import Remote, RemoteError, killer
from benchmarks.harness.results import Case, Key
from benchmarks.harness.trainer import Mode, Trainer

__all__ = ["Comparison", "Entry", "Stage"]

BUILD_TIMEOUT = 300.0
"""Seconds for a dozen processes to import torch, on two cores that other programs use too."""
CLOSE_TIMEOUT = 30.0
SAMPLE_EVERY = 0.01
"""Seconds between two samples of the memory, at least."""
SAMPLING_SHARE = 0.2
"""How much of the time may go into sampling: a sample blocks processes that map memory."""


class Stage:
    """One contender's processes: a trainer, and the workers that the trainer spawned.

    Args:
        setup: the contender.
        deadline: seconds that any one call may take, except for starting and closing.
    """

    def __init__(self, setup: Setup, deadline: float) -> None:
        self.setup = setup
        self.workers: list[int] = []  # process ids, once built
        self._deadline = deadline
        self._kill_workers = killer([])
        self._trainer = Remote(Trainer, setup, uvloop=setup.uvloop, parent=True)
        self._sampler: MemorySampler | None = None

    async def call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call the trainer within the deadline, or ``timeout``. Raises :class:`RemoteError`."""
        return await self._trainer.call(method, timeout=timeout or self._deadline, **arguments)

    async def build(self) -> None:
        """Wait until the workers are up; memory is counted from here."""
        self.workers = await self.call("build", timeout=BUILD_TIMEOUT)
        self._kill_workers = killer(self.workers)
        self._sampler = MemorySampler(self._trainer.pid, self.workers)

    async def sampled(self, method: str, **arguments: Any) -> MemorySampler:
        """Call the trainer, and sample its memory and the workers' until the call has returned."""
        sampler = self._sampler
        assert sampler is not None, "build comes first"
        sampler.restart()
        call = asyncio.create_task(self.call(method, **arguments))
        pause = SAMPLE_EVERY
        while not (await asyncio.wait({call}, timeout=pause))[0]:
            begun = time.monotonic()
            sampler.sample()
            pause = max(SAMPLE_EVERY, (time.monotonic() - begun) / SAMPLING_SHARE)
        await call
        sampler.sample()
        return sampler

    async def close(self) -> None:
        """Close the contender; its processes end."""
        await self._trainer.close(CLOSE_TIMEOUT)

    def kill(self) -> None:
        """End the processes that are left, by force."""
        self._kill_workers()
        self._trainer.kill()


@dataclass(slots=True)
class Entry:
    """One contender in one mode: what was measured so far.

    Attributes:
        turns: seconds and report of each send, turn by turn.
    """

    stage: Stage
    case: Case
    mode: Mode
    turns: list[list[tuple[float, Sent]]] = field(default_factory=list)

    async def turn(self) -> None:
        """Take one turn."""
        self.turns.append(await self.stage.call("turn", mode=self.mode))

    def finish(self) -> Case:
        """The case, with the sends summed up."""
        case = self.case
        sends = [send for turn in self.turns for send in turn]
        case.send = spread([seconds for seconds, _ in sends])
        case.samples = [seconds * 1e3 for seconds, _ in sends]
        case.first = spread([turn[0][0] for turn in self.turns])
        case.commit = spread([seconds for _, sent in sends for seconds in sent.commit.values()])
        names = dict.fromkeys(name for _, sent in sends for name in sent.phases)
        phases = {
            name: spread([sent.phases[name] for _, sent in sends if name in sent.phases]) for name in names
        }
        case.phases = {name: found.median for name, found in phases.items() if found is not None}
        return case


class Comparison:
    """Contenders that take turns. Use as an async context manager: no process is left at its end.

    A contender that fails is a result, and the others go on.

    Args:
        say: gets a line for each step.
        deadline: seconds that one step may take.
    """

    def __init__(self, say: Callable[[str], None], deadline: float) -> None:
        self.entries: list[Entry] = []
        self._stages: list[Stage] = []
        self._say = say
        self._deadline = deadline

    async def __aenter__(self) -> Comparison:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for stage in self._stages:
            stage.kill()

    def add(self, setup: Setup, *modes: Mode, turns: str = "all") -> Entry:
        """Start a contender's processes; returns its entry, the first of one for each mode."""
        stage = Stage(setup, self._deadline)
        self._stages.append(stage)
        entries = [
            Entry(
                stage,
                Case(Key(setup.model.name, setup.scheme, mode, setup.workers), setup.contender, turns=turns),
                mode,
            )
            for mode in modes
        ]
        self.entries.extend(entries)
        return entries[0]

    async def start(self) -> None:
        """Have all contenders built and connected."""
        self._say("starting the workers")
        # At the same time: most of it is importing, and none of it is measured.
        await asyncio.gather(*(self.guard(stage, stage.build) for stage in self._stages))
        for stage in self._stages:
            await self.guard(stage, partial(stage.call, "connect"))

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
                self._say(f"{rounds} rounds" if number == warm_up else "warming up")
                copies.clear()
                for entry in self.entries:
                    entry.turns.clear()
            alive = self._alive()
            cut = number % max(1, len(alive))
            if limit is not None:
                copies.extend(limit.take(number) for _ in range(self.entries[0].stage.setup.model.turn))
            for entry in alive[cut:] + alive[:cut]:
                others = {other.stage for other in alive if alone and other.stage is not entry.stage}
                with _suspended([pid for stage in others for pid in stage.workers]):
                    await self.guard(entry.stage, entry.turn)
        return copies

    async def each(
        self, name: str, entries: Sequence[Entry], *, timeout: float | None = None, **arguments: Any
    ) -> None:
        """Measure one thing of each of these entries, one after the other.

        Args:
            name: of a method of :class:`Trainer`, and of the field of :class:`Case` that gets its result.
            entries: of this comparison.
            timeout: seconds, if the deadline does not suit.
            arguments: of the method, besides the mode.
        """

        async def measure(entry: Entry) -> None:
            found = await entry.stage.call(name, timeout=timeout, mode=entry.mode, **arguments)
            setattr(entry.case, name, found)

        for entry in entries:
            self._say(f"{name}: {entry.case.contender}, {entry.mode}")
            await self.guard(entry.stage, partial(measure, entry))

    async def each_memory(self, entries: Sequence[Entry], *, sends: int) -> None:
        """Note the peak memory of some sends of each, one after the other."""

        async def measure(entry: Entry) -> None:
            sampler = await entry.stage.sampled("burst", mode=entry.mode, sends=sends)
            entry.case.memory = sampler.peak()

        for entry in entries:
            self._say(f"memory: {entry.case.contender}, {entry.mode}")
            await self.guard(entry.stage, partial(measure, entry))

    async def end(self) -> None:
        """Close every contender."""
        await asyncio.gather(*(self.guard(stage, stage.close) for stage in self._stages))

    def _alive(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.case.status == "ok"]

    async def guard(self, stage: Stage, action: Callable[[], Awaitable[object]]) -> None:
        """Await ``action`` unless this contender has failed; note its failure."""
        mine = [entry for entry in self.entries if entry.stage is stage]
        if any(entry.case.status != "ok" for entry in mine):
            return
        try:
            await action()
        except RemoteError as failure:
            self._say(f"{stage.setup.contender}: {failure.status}")
            stage.kill()
            for entry in mine:
                entry.case.status, entry.case.error = failure.status, str(failure)


@contextlib.contextmanager
def _suspended(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
