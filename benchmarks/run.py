"""A whole run: from the options of the command line to tables, JSON, picture and targets."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.models import MODELS, TORN_MODELS, ModelSpec, build_model
from benchmarks.peers import CONTENDERS
from benchmarks.race import GroupPlan, run_group
from benchmarks.report import print_checks, print_results
from benchmarks.results import Results, machine, memory_total
from benchmarks.targets import check
from benchmarks.torn import TornPlan, run_torn

__all__ = ["Options", "run"]

MEMORY_SHARE = 0.85
"""Of the memory that is free when a group starts, how much its processes may take."""
READING_DEADLINE = 900.0
"""Seconds that a million reads may take."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options, parsed. See ``--help`` for what they mean."""

    models: tuple[str, ...] = tuple(MODELS)
    workers: tuple[int, ...] = (1, 2, 4)
    schemes: tuple[str, ...] = ("shared", "process")
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    rounds: int = 0
    quick: bool = False
    torn: bool = False
    reads: int = 1_000_000
    uvloop: bool = False
    deadline: float = 120.0


def run(
    options: Options,
    *,
    json_path: Path | None = None,
    png_path: Path | None = None,
    check_targets: bool = False,
) -> int:
    """Measure, print, write; returns how many targets were missed.

    Raises:
        ValueError: for an option that names something unknown.
    """
    _validate(options)
    results = measure(options)
    print_results(results)
    checks = check(results)
    if check_targets:
        print_checks(checks)
    if json_path is not None:
        results.write(json_path)
    if png_path is not None:
        # matplotlib is optional, and only a picture needs it.
        from benchmarks.picture import draw

        draw(results, png_path)
    return sum(not c.ok for c in checks)


def measure(options: Options) -> Results:
    """Take every measurement that the options ask for."""
    contenders = _installed(options.contenders)
    results = Results(machine=machine(), settings=asdict(options), notes=_notes(contenders))
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {what}", file=sys.stderr, flush=True)

    if options.torn:
        plan = TornPlan(
            specs=tuple(TORN_MODELS.values()),
            schemes=options.schemes,
            contenders=contenders,
            reads=options.reads,
            deadline=options.deadline,
            reading_deadline=READING_DEADLINE,
            uvloop=options.uvloop,
        )
        results.models = {s.name: _sizes(s) for s in plan.specs}
        results.torn.extend(run_torn(plan, say))
        return results
    for name in options.models:
        results.models[name] = _sizes(MODELS[name])
    for group in _plans(options, contenders, results.models):
        say(f"--- {group.spec.name}, {group.scheme}, workers: {group.workers}")
        results.cases.extend(run_group(group, say))
    return results


def _plans(
    options: Options, contenders: tuple[str, ...], sizes: Mapping[str, Mapping[str, int]]
) -> Iterator[GroupPlan]:
    """Every group, smallest model first; split up where the contenders do not fit side by side."""
    cut = 5 if options.quick else 1
    for name in options.models:
        spec, nbytes = MODELS[name], sizes[name]["nbytes"]
        rounds = options.rounds or max(3, spec.rounds // cut)
        for scheme in options.schemes:
            for workers in options.workers:
                plan = GroupPlan(
                    spec=spec,
                    nbytes=nbytes,
                    scheme=scheme,
                    workers=workers,
                    contenders=contenders,
                    rounds=rounds,
                    extra=max(2, min(20, rounds)) // (2 if options.quick else 1),
                    reads=1_000 // cut,
                    deadline=options.deadline,
                    uvloop=options.uvloop,
                    with_one=scheme == "shared" and workers == max(options.workers),
                )
                yield from _that_fit(plan)


def _that_fit(plan: GroupPlan) -> Iterator[GroupPlan]:
    """The plan, or, where memory does not hold all its contenders at once, one for every few."""
    available = memory_total("MemAvailable")
    one = _model_sizes(replace(plan, workers=1), "aiosync") if plan.with_one else 0
    limit = 2
    blocks: list[tuple[str, ...]] = []
    room = 0.0
    for name in plan.contenders:
        needed = _model_sizes(plan, name) * plan.nbytes
        if not blocks or needed > room:
            blocks.append(())
            room = float("inf") if available is None else MEMORY_SHARE * available
            room -= (limit + (one if not blocks[:-1] else 0)) * plan.nbytes
        blocks[-1] += (name,)
        room -= needed
    for contenders in blocks:
        turns = "all" if len(blocks) == 1 else "some"
        yield replace(plan, contenders=contenders, turns=turns)


def _model_sizes(plan: GroupPlan, contender: str) -> int:
    """How many model sizes a contender may hold, in all its processes together."""
    if plan.scheme == "shared":
        return {"aiosync": 4, "torchrl": 2, "torchrl-alias": 1}[contender]
    # The trainer's own and a fresh one; what is in transit; what each worker has.
    return {
        "aiosync": 2 + 3 + 2 * plan.workers,
        "torchrl": 2 + 1 + plan.workers,
        "torchrl-alias": 2 + 1,
    }[contender]


def _sizes(spec: ModelSpec) -> dict[str, int]:
    params = list(build_model(spec).parameters())
    return {
        "params": sum(p.numel() for p in params),
        "tensors": len(params),
        "nbytes": sum(p.nbytes for p in params),
    }


def _installed(contenders: tuple[str, ...]) -> tuple[str, ...]:
    """Without torchrl there is less to compare with, and still something to measure."""
    if importlib.util.find_spec("torchrl") is not None:
        return contenders
    return tuple(name for name in contenders if not name.startswith("torchrl"))


def _validate(options: Options) -> None:
    for what, given, known in (
        ("model", options.models, tuple(MODELS)),
        ("scheme", options.schemes, ("shared", "process")),
        ("contender", options.contenders, tuple(CONTENDERS)),
    ):
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            raise ValueError(f"{what}: expected some of {', '.join(known)}; got {given}")
    if not options.workers or min(options.workers) < 1:
        raise ValueError(f"workers: expected numbers from 1 up; got {options.workers}")


def _notes(contenders: tuple[str, ...]) -> list[str]:
    return [
        *(f"{name}: {CONTENDERS[name].about}" for name in contenders),
        "memcpy: dst.copy_(src) of the same bytes, both buffers already resident, with as many "
        "threads as the trainers have; taken in turn with the sends",
        "a turn is ten sends of the tiny model, one of the others: its first pays for waking up after "
        "another contender had the processor, and is also given by itself",
        "every trainer changes all its weights in place between two sends, which is not timed; "
        "mode fresh clones them as well, so that each send brings new tensors (not timed either)",
        "torchrl's process scheme moves the tensors it is given into shared memory: in mode plain "
        "that happens once, to the trainer's own parameters, and from then on only descriptors "
        "travel, and workers copy from (or, aliased, simply are) the memory that the trainer "
        "trains in; in mode fresh it happens at every send",
        "torchrl's workers have an idle main thread while sends are timed (its best case); for the "
        "stalls its send is called in a thread (its best case; called directly it blocks the "
        "trainer's loop for the whole send)",
        "each contender has a trainer process and workers of its own, started by spawn; workers "
        "use one torch thread; peak memory is PSS, shared memory the sum of all Pss_Shmem",
    ]
