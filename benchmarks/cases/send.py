"""``aiosync bench send``: schemes within one machine beside torchrl's and beside one warm memcpy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated

import typer

from benchmarks.contenders import ABOUT, LIMIT, Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import Comparison, Entry
from benchmarks.harness.meters import Memcpy, Spread, spread
from benchmarks.harness.models import MODELS, sizes
from benchmarks.harness.results import Case, Key, Results, machine, memory_total
from benchmarks.harness.tables import Row, print_rows, progress
from benchmarks.harness.targets import conclude
from benchmarks.harness.trainer import Mode

__all__ = ["SCHEMES", "run"]

SCHEMES = options.Names(("shared", "process"))
MIB = 1 << 20
WARM_UP = 3
"""Turns before anything is counted: enough for every slot of an arena to have been written."""
MEMORY_SENDS = 4
"""Sends that the memory is sampled over."""
MEMORY_SHARE = 0.85
"""Of the memory that is free when a block starts, how much its processes may take."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Contenders of the same model, scheme and number of workers, which take turns.

    Attributes:
        with_one: whether aiosync with one worker takes turns too, to compare with.
        turns: ``all`` contenders are in this block, or ``some``: as many as memory holds.
    """

    setups: list[Setup]
    with_one: bool
    turns: str = "all"


def run(
    models: options.Models = options.ALL_MODELS,
    workers: options.Workers = options.UP_TO_FOUR,
    schemes: Annotated[options.Names, options.names_of(SCHEMES)] = SCHEMES,
    contenders: options.Contenders = options.INSTALLED,
    rounds: options.Rounds = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the rounds.")] = False,
    uvloop: options.Uvloop = False,
    deadline: options.Deadline = 120.0,
    json: options.Json = None,
    png: options.Png = None,
    check: options.Check = False,
) -> None:
    """Sends within one machine, beside torchrl's and beside one warm memcpy."""
    settings = dict(locals(), json=str(json), png=str(png))
    results = Results(machine(), settings, _notes(contenders))
    results.models = {name: sizes(MODELS[name]) for name in models}
    say = progress()
    cut = 5 if quick else 1
    for name, scheme, count in product(models, schemes, workers):
        turns = rounds or max(3, MODELS[name].rounds // cut)
        one = scheme == "shared" and count > 1 and count == max(workers) and "aiosync" in contenders
        setups = [Setup(other, scheme, MODELS[name], count, uvloop, {"sync": True}) for other in contenders]
        for block in _that_fit(_Block(setups, one)):
            say(f"--- {name}, {scheme}, workers: {count}")
            measuring = _measure(block, turns, cut, deadline, say)
            results.cases.extend(asyncio.run(measuring))
    print_rows("send, in milliseconds: median (least - most)", _send_rows(results))
    print_rows("pauses, memory, reads", _side_rows(results))
    for note in results.notes:
        print(f"note: {note}")
    if png is not None:
        # matplotlib is optional, and only a picture needs it.
        from benchmarks.harness.picture import draw

        draw(results, png)
    conclude(results, json, check=check)


async def _measure(
    block: _Block, rounds: int, cut: int, deadline: float, say: Callable[[str], None]
) -> list[Case]:
    first = block.setups[0]
    # The shared scheme copies any source alike, so it needs only one mode.
    modes: tuple[Mode, ...] = ("plain", "fresh") if first.scheme == "process" else ("plain",)
    extra = max(2, min(20, rounds)) // min(cut, 2)
    async with Comparison(say, deadline) as comparison:
        for setup in block.setups:
            comparison.add(setup, *modes, turns=block.turns)
        entries = list(comparison.entries)
        one: Entry | None = None
        if block.with_one:
            one = comparison.add(replace(first, contender="aiosync", workers=1), "plain")
        await comparison.start()
        limit = Memcpy(sizes(first.model)["nbytes"] // 4)
        copies = await comparison.take_turns(rounds, warm_up=WARM_UP, limit=limit)
        del limit  # it holds two model sizes
        await comparison.each("verified", entries)
        await comparison.each("stall", entries, sends=extra)
        await comparison.each_memory(entries, sends=MEMORY_SENDS)
        # The receiver may tear a read, and the receiver is the same in every mode.
        plain = [entry for entry in entries if entry.mode == "plain"]
        await comparison.each("reads", plain, sends=extra, reads=1_000 // cut)
        await comparison.end()
    key = Key(first.model.name, first.scheme, "plain", first.workers)
    cases = [
        Case(key, LIMIT, turns=block.turns, send=spread(copies), samples=[1e3 * copy for copy in copies])
    ]
    for entry in entries:
        case = entry.finish()
        case.limit = spread(copies)
        if one is not None and (case.contender, entry.mode) == ("aiosync", "plain"):
            case.one_worker = one.finish().send
        cases.append(case)
    return cases


def _that_fit(block: _Block) -> Iterator[_Block]:
    """The block, or, if memory does not hold all its contenders at once, one for every few."""
    available = memory_total("MemAvailable")
    nbytes = sizes(block.setups[0].model)["nbytes"]
    free = float("inf") if available is None else MEMORY_SHARE * available / nbytes
    fits: list[list[Setup]] = []
    room = 0.0  # in model sizes
    for setup in block.setups:
        needed = _model_sizes(setup)
        if not fits or needed > room:
            room = free - 2  # the limit's
            if block.with_one and not fits:
                room -= _model_sizes(replace(setup, contender="aiosync", workers=1))
            fits.append([])
        fits[-1].append(setup)
        room -= needed
    for setups in fits:
        one = block.with_one and any(setup.contender == "aiosync" for setup in setups)
        yield _Block(setups, one, "all" if len(fits) == 1 else "some")


def _model_sizes(setup: Setup) -> int:
    """How many model sizes a contender may hold, in all its processes together."""
    if setup.scheme == "shared":
        return {"aiosync": 4, "torchrl": 2, "torchrl-alias": 1}[setup.contender]
    # The trainer's own and a fresh one; what is in transit; what each worker has.
    workers = setup.workers
    return {"aiosync": 2 + 3 + 2 * workers, "torchrl": 2 + 1 + workers, "torchrl-alias": 2 + 1}[
        setup.contender
    ]


def _send_rows(results: Results) -> Iterator[Row]:
    for key in results.keys():
        for name in (*ABOUT, LIMIT):
            case = results.find(key, name)
            if case is not None:
                yield {
                    **asdict(key),
                    "contender": name + (" (own block)" if case.turns == "some" else ""),
                    "send": case.failure or case.send,
                    "vs aiosync": results.ratio(key, name, "aiosync"),
                    "vs memcpy": results.ratio(key, name, LIMIT),
                    "first of its turn": case.first.median if case.first else None,
                    "1 worker in turn": case.one_worker,
                }


def _side_rows(results: Results) -> Iterator[Row]:
    for case in results.cases:
        if case.contender == LIMIT or case.failure:
            continue
        memory, stall, reads = case.memory, case.stall, case.reads
        nbytes = results.models[case.key.model]["nbytes"]
        yield {
            **asdict(case.key),
            "contender": case.contender,
            "commit ms\nmedian / max": _late(case.commit, "median", "max"),
            "stall, sender ms\np50 / p99 / max": _late(stall.sender if stall else None),
            "stall, worker ms\np50 / p99 / max": _late(stall.worker if stall else None),
            "sender peak\nMiB (grown)": _grown(memory.sender, memory.sender_growth) if memory else None,
            "worker peak\nMiB (grown)": _grown(memory.worker, memory.worker_growth) if memory else None,
            "shared MiB\n(models)": f"{memory.shared / MIB:.1f} ({memory.shared / nbytes:.2f})"
            if memory
            else None,
            "torn / leaked\nof reads": f"{reads.torn} / {reads.leaked} of {reads.reads}" if reads else None,
        }


def _late(found: Spread | None, *names: str) -> str | None:
    names = names or ("median", "p99", "max")
    return " / ".join(f"{getattr(found, name):.3g}" for name in names) if found else None


def _grown(total: int, growth: int) -> str:
    return f"{total / MIB:.0f} ({growth / MIB:+.0f})"


def _notes(contenders: tuple[str, ...]) -> list[str]:
    notes = [
        *(f"{name}: {ABOUT[name]}" for name in contenders),
        "memcpy: dst.copy_(src) of the same bytes, both buffers already resident, with as many "
        "threads as the trainers have; taken in turn with the sends",
        "a turn is ten sends of the tiny model, one of the others: its first pays for waking up after "
        "another contender had the processor, and is also given by itself",
        "every trainer changes all its weights in place between two sends, which is not timed; "
        "mode fresh clones them as well, so that each send brings new tensors (not timed either)",
        "each contender has a trainer process and workers of its own, started by spawn; workers "
        "use one torch thread; peak memory is PSS, shared memory the sum of all Pss_Shmem",
    ]
    if any(name.startswith("torchrl") for name in contenders):
        notes += [
            "torchrl's process scheme moves the tensors it is given into shared memory: in mode plain "
            "that happens once, to the trainer's own parameters, and from then on only descriptors "
            "travel, and workers copy from (or, aliased, simply are) the memory that the trainer "
            "trains in; in mode fresh it happens at every send",
            "torchrl's workers have an idle main thread while sends are timed (its best case); for the "
            "stalls its send is called in a thread (its best case; called directly it blocks the "
            "trainer's loop for the whole send)",
        ]
    return notes
