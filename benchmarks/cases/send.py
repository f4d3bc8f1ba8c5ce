"""``aiosync bench send``: schemes within one machine beside torchrl's and beside one warm memcpy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated

import typer

from benchmarks.contenders import ABOUT, LIMIT, Mode, Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare
from benchmarks.harness.meters import Memcpy, Spread, in_bytes, proc, spread
from benchmarks.harness.models import MODELS, sizes
from benchmarks.harness.results import Case, Key, Results
from benchmarks.harness.tables import Row, print_rows, say

SCHEMES = options.Names(("shared", "process"))
MIB = 1 << 20
WARM_UP = 3  # turns before anything is counted: enough for every slot of an arena to have been written
MEMORY_SENDS = 4  # sends that the memory is sampled over
MEMORY_SHARE = 0.85  # of the memory that is free when a block starts, how much its processes may take


@dataclass(frozen=True, slots=True)
class _Block:
    """Contenders of the same model, scheme and number of workers, which take turns."""

    setups: list[Setup]
    one: Setup | None  # aiosync with one worker, which takes turns too, to compare with
    turns: str = "all"  # contenders are in this block, or "some": as many as memory holds


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
    results = Results(dict(locals(), json=str(json), png=str(png)), _notes(contenders))
    results.models = {name: sizes(MODELS[name]) for name in models}
    cut = 5 if quick else 1
    for name, scheme, count in product(models, schemes, workers):
        turns = rounds or max(3, MODELS[name].rounds // cut)
        # The shared scheme copies any source alike, so it needs only one mode.
        modes: tuple[Mode, ...] = ("plain", "fresh") if scheme == "process" else ("plain",)
        base = Setup("aiosync", scheme, MODELS[name], count, modes, uvloop, {"sync": True})
        one = scheme == "shared" and count > 1 and count == max(workers) and "aiosync" in contenders
        setups = [replace(base, contender=contender) for contender in contenders]
        for block in _that_fit(_Block(setups, replace(base, workers=1) if one else None)):
            say(f"--- {name}, {scheme}, workers: {count}")
            results.cases.extend(asyncio.run(_measure(block, turns, cut, deadline)))
    print_rows("send, in milliseconds: median (least - most)", _send_rows(results))
    print_rows("pauses, memory, reads", _side_rows(results))
    for note in results.notes:
        print(f"note: {note}")
    if png is not None:
        # matplotlib is optional, and only a picture needs it.
        from benchmarks.harness.picture import draw

        draw(results, png)
    results.conclude(json, check=check)


async def _measure(block: _Block, rounds: int, cut: int, deadline: float) -> list[Case]:
    first = block.setups[0]
    extra = max(2, min(20, rounds)) // min(cut, 2)
    setups = [*block.setups, block.one] if block.one else block.setups
    async with compare(deadline, *setups) as comparison:
        one = comparison.entries[-1] if block.one else None
        entries = comparison.entries[: -1 if one else None]
        limit = Memcpy(sizes(first.model)["nbytes"] // 4)
        copies = await comparison.take_turns(rounds, warm_up=WARM_UP, limit=limit)
        del limit  # it holds two model sizes
        await comparison.each("verified", entries)
        await comparison.each("stall", entries, sends=extra)
        await comparison.each("memory", entries, sends=MEMORY_SENDS)
        # The receiver may tear a read, and the receiver is the same in every mode.
        plain = [entry for entry in entries if entry.case.key.mode == "plain"]
        await comparison.each("reads", plain, sends=extra, reads=1_000 // cut)
    key = Key(first.model.name, first.scheme, "plain", first.workers)
    cases = [Case(key, LIMIT, send=spread(copies), samples=[1e3 * copy for copy in copies])]
    for case in (entry.finish() for entry in entries):
        case.limit = spread(copies)
        if one and case.contender == "aiosync":
            case.one_worker = one.finish().send
        cases.append(case)
    for case in cases:
        case.turns = block.turns
    return cases


def _that_fit(block: _Block) -> Iterator[_Block]:
    """The block, or, if memory does not hold all its contenders at once, one for every few."""
    available = in_bytes(proc("meminfo"), "MemAvailable")
    nbytes = sizes(block.setups[0].model)["nbytes"]
    free = MEMORY_SHARE * available / nbytes if available else float("inf")
    fits: list[list[Setup]] = []
    room = 0.0  # in model sizes
    for setup in block.setups:
        needed = _model_sizes(setup)
        if not fits or needed > room:
            room = free - 2  # the limit's
            if block.one and not fits:
                room -= _model_sizes(block.one)
            fits.append([])
        fits[-1].append(setup)
        room -= needed
    for setups in fits:
        one = block.one if any(setup.contender == "aiosync" for setup in setups) else None
        yield _Block(setups, one, "all" if len(fits) == 1 else "some")


def _model_sizes(setup: Setup) -> int:
    """How many model sizes a contender may hold, in all its processes together."""
    if setup.scheme == "shared":
        return {"aiosync": 4, "torchrl": 2, "torchrl-alias": 1}[setup.contender]
    # The trainer's own and a fresh one; what is in transit; what each worker has.
    workers = setup.workers
    found = {"aiosync": 2 + 3 + 2 * workers, "torchrl": 2 + 1 + workers, "torchrl-alias": 2 + 1}
    return found[setup.contender]


def _send_rows(results: Results) -> Iterator[Row]:
    for key, name in product(results.keys(), (*ABOUT, LIMIT)):
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
        row = {
            **asdict(case.key),
            "contender": case.contender,
            "commit ms\nmedian / max": _late(case.commit, "median", "max"),
            "stall, sender ms\np50 / p99 / max": _late(stall.sender if stall else None),
            "stall, worker ms\np50 / p99 / max": _late(stall.worker if stall else None),
            "sender peak\nMiB (grown)": None,
            "worker peak\nMiB (grown)": None,
            "shared MiB\n(models)": None,
            "torn / leaked\nof reads": f"{reads.torn} / {reads.leaked} of {reads.reads}" if reads else None,
        }
        if memory:
            models = memory.shared / results.models[case.key.model]["nbytes"]
            row["sender peak\nMiB (grown)"] = _grown(memory.sender, memory.sender_growth)
            row["worker peak\nMiB (grown)"] = _grown(memory.worker, memory.worker_growth)
            row["shared MiB\n(models)"] = f"{memory.shared / MIB:.1f} ({models:.2f})"
        yield row


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
