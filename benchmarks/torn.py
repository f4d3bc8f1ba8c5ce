"""A million in-loop reads under back-to-back sends: how many saw two versions at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.conductor import ContenderFailed, Stage
from benchmarks.models import ModelSpec
from benchmarks.results import TornCase
from benchmarks.worker import ReadCounts

__all__ = ["TornPlan", "run_torn"]

SENDS = 20
"""Sends per case, at least."""
COMPARED = 20
"""The others are read this many times less often: their torn reads are a share, ours a count."""


@dataclass(frozen=True, slots=True)
class TornPlan:
    """What to read.

    Attributes:
        specs: the models.
        schemes: backend names.
        contenders: their names.
        reads: how many reads of aiosync's worker per case.
        deadline: seconds that one command may take, except for the reading itself.
        reading_deadline: seconds that the reading of one case may take.
        uvloop: whether to run on uvloop.
    """

    specs: tuple[ModelSpec, ...]
    schemes: tuple[str, ...]
    contenders: tuple[str, ...]
    reads: int
    deadline: float
    reading_deadline: float
    uvloop: bool


def run_torn(plan: TornPlan, say: Callable[[str], None]) -> Iterator[TornCase]:
    """Every case in turn, one worker each; a failure is a result."""
    for spec in plan.specs:
        for scheme in plan.schemes:
            for contender in plan.contenders:
                say(f"torn reads: {spec.name}, {scheme}, {contender}")
                yield _run_case(plan, spec, scheme, contender)


def _run_case(plan: TornPlan, spec: ModelSpec, scheme: str, contender: str) -> TornCase:
    case = TornCase(spec.name, scheme, contender)
    reads = plan.reads if contender == "aiosync" else max(1, plan.reads // COMPARED)
    try:
        with Stage(contender, scheme, spec, 1, deadline=plan.deadline, uvloop=plan.uvloop) as stage:
            stage.post("build")
            stage.build()
            stage.call("connect")
            counts = stage.call(
                "torn", deadline=plan.reading_deadline, mode="plain", sends=SENDS, reads=reads
            )
            case.sends = counts.pop("sends")
            case.reads = ReadCounts(**counts)
            stage.post("close")
            stage.close()
    except ContenderFailed as failure:
        case.status, case.error = failure.status, str(failure)
    return case
