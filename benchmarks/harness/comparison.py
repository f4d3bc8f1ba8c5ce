"""The driver: starts the contenders' processes and has the contenders take turns within one run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contenders import Sent, Setup
from benchmarks.harness.meters import Memcpy, MemoryPeak, memory_of, memory_peak, spread, summary
from benchmarks.harness.results import Case, Key, say
from benchmarks.harness.trainer import Remote, RemoteError, Trainer, stopped

BUILD_TIMEOUT = 300.0  # for a dozen processes to import torch, on two cores that other programs use too
CLOSE_TIMEOUT = 30.0
SAMPLE_EVERY = 0.01  # seconds between two samples of the memory, at least
SAMPLING_SHARE = 0.2  # how much of the time may go into sampling: a sample blocks processes that map memory


class Stage:
    """One contender's processes: a trainer, and the workers that the trainer spawned."""

    def __init__(self, setup: Setup, deadline: float) -> None:
        self.setup, self._deadline = setup, deadline
        self.workers: list[int] = []  # process ids, once built
        keys = (Key(setup.model.name, setup.scheme, mode, setup.workers) for mode in setup.modes)
        self.cases = [Case(key, setup.contender) for key in keys]
        self.trainer = Remote(Trainer, setup, uvloop=setup.uvloop, parent=True)

    @property
    def alive(self) -> bool:
        """Whether the contender has not failed."""
        return self.cases[0].status == "ok"

    async def call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call the trainer within the deadline, or ``timeout``; None if this contender has failed."""
        with self._noted():
            return await self.trainer.call(method, timeout=timeout or self._deadline, **arguments)

    async def build(self) -> None:
        """Wait until the workers are up; memory is counted from here."""
        self.workers = await self.call("build", timeout=BUILD_TIMEOUT) or []
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

    async def close(self) -> None:
        """Close the trainer, which closes the workers."""
        with self._noted():
            await self.trainer.close(CLOSE_TIMEOUT)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Have the cases note the first failure. It ends the processes."""
        try:
            yield
        except RemoteError as failure:
            self.trainer.kill()
            if self.alive:
                say(f"{self.setup.contender}: {failure.status}")
                for case in self.cases:
                    case.status, case.error = failure.status, str(failure)


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
        case.commit = spread([seconds for _, sent in sends for seconds in sent.commit])
        phases = [sent.phases for _, sent in sends]
        for name in dict.fromkeys(name for each in phases for name in each):
            case.phases[name] = summary([each[name] for each in phases if name in each]).median
        return case


async def take_turns(
    entries: Sequence[Entry], rounds: int, *, warm_up: int, limit: Memcpy | None = None, alone: bool = False
) -> list[float]:
    """A B C, B C A, C A B: which contender comes first changes from round to round.

    Before ``rounds`` turns of each that count, ``warm_up`` turns do not. The ``limit`` is taken before each
    round, as often as a turn has sends; returns its seconds. With ``alone`` the workers of the other
    contenders are stopped (SIGSTOP) during a turn. A contender that fails is a result: the others continue.
    """
    copies: list[float] = []
    for number in range(warm_up + rounds):
        if number in (0, warm_up):
            say(f"{rounds} rounds" if number == warm_up else "warming up")
            copies.clear()
            for entry in entries:
                entry.turns.clear()
        alive = [entry for entry in entries if entry.stage.alive]
        cut = number % max(1, len(alive))
        if limit is not None:
            copies.extend(limit.take(number) for _ in range(entries[0].stage.setup.model.turn))
        for entry in alive[cut:] + alive[:cut]:
            others = {other.stage for other in alive if alone and other.stage is not entry.stage}
            with stopped([pid for other in others for pid in other.workers]):
                if turn := await entry.stage.call("turn", mode=entry.case.key.mode):
                    entry.turns.append(turn)
    return copies


async def measure(name: str, entries: Sequence[Entry], **arguments: Any) -> None:
    """Measure one more thing of each of these entries, one after the other.

    The ``name`` is that of a field of :class:`Case`: ``memory``, or a method of :class:`Trainer` too, with
    its ``arguments``. Among those, a ``timeout`` in seconds replaces the deadline.
    """
    for case, stage in ((entry.case, entry.stage) for entry in entries if entry.stage.alive):
        say(f"{name}: {case.contender}, {case.key.mode}")
        arguments["mode"] = case.key.mode
        found = await (stage.memory(**arguments) if name == "memory" else stage.call(name, **arguments))
        if stage.alive:
            setattr(case, name, found)


@contextlib.asynccontextmanager
async def compare(deadline: float, *setups: Setup) -> AsyncIterator[list[Entry]]:
    """Build and connect contenders, whose steps may take ``deadline`` seconds each; close them at the end.

    There is an entry for each mode of each. No process is left afterwards. A case notes a failure of its
    contender's end, too.
    """
    stages: list[Stage] = []
    try:
        say("starting the workers")
        stages.extend(Stage(setup, deadline) for setup in setups)
        # At the same time: most of it is importing, and none of it is measured.
        await asyncio.gather(*(stage.build() for stage in stages))
        for stage in stages:
            await stage.call("connect")
        yield [Entry(stage, case) for stage in stages for case in stage.cases]
        await asyncio.gather(*(stage.close() for stage in stages))
    finally:
        for stage in stages:
            stage.trainer.kill()
