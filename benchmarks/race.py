"""One group: all contenders of one model, scheme and number of workers, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from benchmarks.conductor import ContenderFailed, Memcpy, Stage
from benchmarks.meters import spread
from benchmarks.models import ModelSpec
from benchmarks.results import LIMIT, Case, Key, Stall
from benchmarks.worker import ReadCounts

__all__ = ["GroupPlan", "run_group"]

MEMORY_SENDS = 4
"""Sends that the memory is watched over."""
WARM_UP = 3
"""Sends before anything is counted: enough for every slot of an arena to have been written."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What to measure in one group.

    Attributes:
        spec: the model.
        nbytes: its size.
        scheme: backend name.
        workers: how many.
        contenders: their names.
        rounds: turns per contender and mode.
        extra: sends for stalls, and for torn reads at least.
        reads: reads of the model under back-to-back sends, at least.
        deadline: seconds that one command may take.
        uvloop: whether to run on uvloop.
        with_one: whether aiosync with one worker takes turns too, to compare with.
        turns: ``all`` contenders in this group, or ``some``.
    """

    spec: ModelSpec
    nbytes: int
    scheme: str
    workers: int
    contenders: tuple[str, ...]
    rounds: int
    extra: int
    reads: int
    deadline: float
    uvloop: bool
    with_one: bool = False
    turns: str = "all"

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways of sending: the shared scheme copies from wherever, so it needs only one."""
        return ("plain", "fresh") if self.scheme == "process" else ("plain",)


@dataclass(slots=True)
class _Entry:
    """One contender in one mode: what was measured so far."""

    stage: Stage
    case: Case
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def round(self) -> None:
        sends = self.stage.call("round", mode=self.case.key.mode)["sends"]
        self.first.append(sends[0]["seconds"])
        for send in sends:
            self.seconds.append(send["seconds"])
            self.commit.extend(send["commit"].values())
            for name, seconds in send["phases"].items():
                self.phases.setdefault(name, []).append(seconds)

    def forget(self) -> None:
        """The warm-up is over."""
        self.seconds.clear()
        self.first.clear()
        self.commit.clear()
        self.phases.clear()

    def finish(self) -> Case:
        self.case.send = spread(self.seconds)
        self.case.first = spread(self.first)
        self.case.samples = [s * 1e3 for s in self.seconds]
        self.case.commit = spread(self.commit)
        medians = {name: spread(seconds) for name, seconds in self.phases.items()}
        self.case.phases = {name: s.median for name, s in medians.items() if s is not None}
        return self.case


class _Group:
    """The contenders of a group that are still in the race."""

    def __init__(self, plan: GroupPlan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._entries: list[_Entry] = []
        self._stages: list[Stage] = []
        self._limit: list[float] = []
        self._reference: _Entry | None = None

    def run(self) -> list[Case]:
        plan = self._plan
        with ExitStack() as stack:
            for name in plan.contenders:
                self._add(stack, name, plan.workers)
            if plan.with_one and plan.workers > 1 and "aiosync" in plan.contenders:
                self._reference = self._add(stack, "aiosync", 1)
            self._start()
            limit = Memcpy(plan.nbytes // 4)
            self._take_turns(limit, WARM_UP)
            for entry in self._entries:
                entry.forget()
            self._limit.clear()
            self._take_turns(limit, plan.rounds)
            del limit  # it holds two model sizes
            self._each(self._verify, "does every worker hold what was sent")
            self._each(self._stalls, "event-loop stalls")
            self._each(self._memory, "memory")
            self._each(self._reads, "reads under sends")
            for stage in self._stages:
                self._guard(stage, partial(stage.post, "close"))
            for stage in self._stages:
                self._guard(stage, stage.close)
        return list(self._finish())

    def _add(self, stack: ExitStack, name: str, workers: int) -> _Entry:
        plan = self._plan
        stage = stack.enter_context(
            Stage(
                name,
                plan.scheme,
                plan.spec,
                workers,
                deadline=plan.deadline,
                uvloop=plan.uvloop,
            )
        )
        self._stages.append(stage)
        entries = [
            _Entry(stage, Case(key, name, turns=plan.turns))
            for key in (Key(plan.spec.name, plan.scheme, mode, workers) for mode in plan.modes)
        ]
        self._entries.extend(entries)
        return entries[0]

    def _start(self) -> None:
        self._say("starting the workers")
        # All at once: most of it is importing, and none of it is measured.
        for stage in self._stages:
            self._guard(stage, partial(stage.post, "build"))
        for stage in self._stages:
            self._guard(stage, stage.build)
        for stage in self._stages:
            self._guard(stage, partial(stage.call, "connect"))

    def _take_turns(self, limit: Memcpy, rounds: int) -> None:
        """A B C, B C A, C A B: who comes first changes from round to round."""
        self._say(f"{rounds} rounds of {self._plan.spec.turn} sends each")
        for turn in range(rounds):
            runners = self._alive()
            cut = turn % max(1, len(runners))
            self._limit.extend(limit.round(turn) for _ in range(self._plan.spec.turn))
            for entry in runners[cut:] + runners[:cut]:
                self._guard(entry.stage, entry.round)

    def _each(self, measure: Callable[[_Entry], None], what: str) -> None:
        for entry in self._alive():
            if entry is not self._reference:
                self._say(f"{what}: {entry.case.contender}, {entry.case.key.mode}")
                self._guard(entry.stage, partial(measure, entry))

    def _verify(self, entry: _Entry) -> None:
        seen = entry.stage.call("look")
        expected = float(seen["expected"])
        entry.case.verified = all(v == expected for w in seen["workers"] for v in w["values"])

    def _stalls(self, entry: _Entry) -> None:
        late = entry.stage.call("stall", mode=entry.case.key.mode, sends=self._plan.extra)
        entry.case.stall = Stall(
            sender=spread(late["sender"]), worker=spread(late["workers"]), idle=spread(late["idle"])
        )

    def _memory(self, entry: _Entry) -> None:
        entry.case.memory = entry.stage.memory(entry.case.key.mode, MEMORY_SENDS)

    def _reads(self, entry: _Entry) -> None:
        plan = self._plan
        if entry.case.key.mode != "plain":
            return  # it is the receiver that may tear, and that is the same in every mode
        counts = entry.stage.call("torn", mode=entry.case.key.mode, sends=plan.extra, reads=plan.reads)
        del counts["sends"]
        entry.case.reads = ReadCounts(**counts)

    def _alive(self) -> list[_Entry]:
        return [e for e in self._entries if e.case.status == "ok"]

    def _guard(self, stage: Stage, action: Callable[[], object]) -> None:
        """Do it unless this contender is out; a failure is its result, and the rest go on."""
        mine = [e for e in self._entries if e.stage is stage]
        if any(e.case.status != "ok" for e in mine):
            return
        try:
            action()
        except ContenderFailed as failure:
            self._say(f"{stage.contender}: {failure.status}")
            stage.kill()
            for entry in mine:
                entry.case.status, entry.case.error = failure.status, str(failure)

    def _finish(self) -> Iterator[Case]:
        plan = self._plan
        limit = spread(self._limit)
        samples = [s * 1e3 for s in self._limit]
        key = Key(plan.spec.name, plan.scheme, "plain", plan.workers)
        yield Case(key, LIMIT, turns=plan.turns, send=limit, samples=samples)
        one = self._reference.finish().send if self._reference else None
        for entry in self._entries:
            if entry is self._reference or entry.case.key.workers != plan.workers:
                continue
            case = entry.finish()
            case.limit = limit
            if case.contender == "aiosync" and case.key.mode == "plain":
                case.one_worker = one
            yield case


def run_group(plan: GroupPlan, say: Callable[[str], None]) -> list[Case]:
    """Measure one group; failures are results, and nothing waits longer than its deadline."""
    return _Group(plan, say).run()
