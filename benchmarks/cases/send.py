"""``aiosync bench send`` and ``torn``: schemes within one machine beside torchrl's.

``send`` times sends, beside one warm memcpy too. ``torn`` reads the model a million times under back-to-back
sends, and counts the reads that saw two versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated, Any

import typer

from benchmarks.contenders import ABOUT, LIMIT, Mode, Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare, measure, take_turns
from benchmarks.harness.meters import Memcpy, Spread, in_bytes, proc, spread
from benchmarks.harness.model_specs import MODELS, TORN_MODELS
from benchmarks.harness.models import sizes
from benchmarks.harness.results import Case, Key, ReadCounts, Results, Row, Stall, print_rows, say

SCHEMES = options.Names(("shared", "process"))
MIB = 1 << 20
WARM_UP = 3  # turns before anything is counted: enough for every slot of an arena to have been written
MEMORY_SENDS = 4  # sends that the memory is sampled over
MEMORY_SHARE = 0.85  # of the memory that is free when a block starts, how much its processes may take
TORN_SENDS = 20  # sends per case, at least
COMPARED = 20  # times fewer reads of the others: their torn reads are a share, aiosync's a count
READING_DEADLINE = 900.0  # seconds that a million reads may take


def send(
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
    results = Results(dict(locals(), json=str(json), png=str(png)))
    results.notes = [*(f"{name}: {ABOUT[name]}" for name in contenders), *NOTES]
    if any(name.startswith("torchrl") for name in contenders):
        results.notes += TORCHRL_NOTES
    results.models = {name: sizes(MODELS[name]) for name in models}
    cut = 5 if quick else 1
    for name, scheme, count in product(models, schemes, workers):
        turns = rounds or max(3, MODELS[name].rounds // cut)
        # The shared scheme copies any source alike, so it needs only one mode.
        modes: tuple[Mode, ...] = ("plain", "fresh") if scheme == "process" else ("plain",)
        base = Setup("aiosync", scheme, MODELS[name], count, modes, uvloop, {"sync": True})
        setups = [replace(base, contender=contender) for contender in contenders]
        # aiosync with one worker takes turns too, to compare with.
        one = replace(base, workers=1) if scheme == "shared" and 1 < count == max(workers) else None
        for block in _blocks(setups, one):
            say(f"--- {name}, {scheme}, workers: {count}")
            with_one = one if base in block else None
            for case in asyncio.run(_measure(block, with_one, turns, cut, deadline)):
                case.turns = "all" if block == setups else "some"
                results.cases.append(case)
    print_rows("send, in milliseconds: median (least - most)", _send_rows(results))
    print_rows("pauses, memory, reads", _side_rows(results))
    for note in results.notes:
        print(f"note: {note}")
    if png is not None:
        # matplotlib is optional, and only a picture needs it.
        from benchmarks.harness.picture import draw

        draw(results, png)
    results.conclude(json, check=check)


async def _measure(
    setups: list[Setup], with_one: Setup | None, rounds: int, cut: int, deadline: float
) -> list[Case]:
    first = setups[0]
    extra = max(2, min(20, rounds)) // min(cut, 2)
    async with compare(deadline, *setups, *filter(None, [with_one])) as every:
        entries, one = (every[:-1], every[-1]) if with_one else (every, None)
        limit = Memcpy(sizes(first.model)["nbytes"] // 4)
        copies = await take_turns(every, rounds, warm_up=WARM_UP, limit=limit)
        del limit  # it holds two model sizes
        await measure("verified", entries)
        await measure("stall", entries, sends=extra)
        await measure("memory", entries, sends=MEMORY_SENDS)
        # The receiver may tear a read, and the receiver is the same in every mode.
        plain = [entry for entry in entries if entry.case.key.mode == "plain"]
        await measure("reads", plain, sends=extra, reads=1_000 // cut)
    key = Key(first.model.name, first.scheme, "plain", first.workers)
    cases = [entry.finish() for entry in entries]
    for case in cases:
        case.limit = spread(copies)
        if one and case.contender == "aiosync":
            case.one_worker = one.finish().send
    return [Case(key, LIMIT, send=spread(copies), samples=[1e3 * copy for copy in copies]), *cases]


def _blocks(setups: list[Setup], one: Setup | None) -> list[list[Setup]]:
    """All contenders in one block, whose turns alternate; or one block for each if memory is short."""
    needed = 2 + sum(map(_model_sizes, [*setups, one] if one else setups))  # 2: the limit's
    available = in_bytes(proc("meminfo"), "MemAvailable")
    if not available or needed * sizes(setups[0].model)["nbytes"] <= MEMORY_SHARE * available:
        return [setups]
    return [[setup] for setup in setups]


def _model_sizes(setup: Setup) -> int:
    """How many model sizes a contender may hold, in all its processes together."""
    found = {"aiosync": 4, "torchrl": 2, "torchrl-alias": 1}
    if setup.scheme == "process":  # the trainer's own and a fresh one; in transit; what each worker has
        workers = setup.workers
        found = {"aiosync": 2 + 3 + 2 * workers, "torchrl": 2 + 1 + workers, "torchrl-alias": 2 + 1}
    return found[setup.contender]


def _send_rows(results: Results) -> Iterator[Row]:
    for key, name in product(results.keys(), (*ABOUT, LIMIT)):
        if case := results.find(key, name):
            yield {
                **asdict(key),
                "contender": name + (" (own block)" if case.turns == "some" else ""),
                "send": case.outcome,
                "vs aiosync": results.ratio(key, name, "aiosync"),
                "vs memcpy": results.ratio(key, name, LIMIT),
                "first of its turn": case.first.median if case.first else None,
                "1 worker in turn": case.one_worker,
            }


def _side_rows(results: Results) -> Iterator[Row]:
    for case in (case for case in results.cases if case.contender != LIMIT and not case.failure):
        memory, stall, reads = case.memory, case.stall or Stall(None), case.reads
        models = memory.shared / results.models[case.key.model]["nbytes"] if memory else 0
        yield {
            **asdict(case.key),
            "contender": case.contender,
            "commit ms\nmedian / max": _late(case.commit, "median", "max"),
            "stall, sender ms\np50 / p99 / max": _late(stall.sender, "median", "p99", "max"),
            "stall, worker ms\np50 / p99 / max": _late(stall.worker, "median", "p99", "max"),
            "sender peak\nMiB (grown)": memory and _grown(memory.sender, memory.sender_growth),
            "worker peak\nMiB (grown)": memory and _grown(memory.worker, memory.worker_growth),
            "shared MiB\n(models)": memory and f"{memory.shared / MIB:.1f} ({models:.2f})",
            "torn / leaked\nof reads": reads and f"{reads.torn} / {reads.leaked} of {reads.reads}",
        }


def _late(found: Spread | None, *names: str) -> str | None:
    return " / ".join(f"{getattr(found, name):.3g}" for name in names) if found else None


def _grown(total: int, growth: int) -> str:
    return f"{total / MIB:.0f} ({growth / MIB:+.0f})"


NOTES = (
    "memcpy: dst.copy_(src) of the same bytes, both buffers already resident, with as many threads as the "
    "trainers have; taken in turn with the sends",
    "a turn is ten sends of the tiny model, one of the others: its first pays for waking up after another "
    "contender had the processor, and is also given by itself",
    "every trainer changes all its weights in place between two sends, which is not timed; mode fresh clones "
    "them as well, so that each send brings new tensors (not timed either)",
    "each contender has a trainer process and workers of its own, started by spawn; workers use one torch "
    "thread; peak memory is PSS, shared memory the sum of all Pss_Shmem",
)
TORCHRL_NOTES = (
    "torchrl's process scheme moves the tensors it is given into shared memory: in mode plain once, the "
    "trainer's own parameters, and from then on only descriptors travel, and workers copy from (or, aliased, "
    "simply are) the memory that the trainer trains in; in mode fresh at every send",
    "torchrl's workers have an idle main thread while sends are timed (its best case); for the stalls its "
    "send is called in a thread (its best case; called directly it blocks the trainer's loop all the time)",
)


def torn(
    schemes: Annotated[options.Names, options.names_of(SCHEMES)] = SCHEMES,
    contenders: options.Contenders = options.INSTALLED,
    reads: Annotated[int, typer.Option(min=1, help="Reads of aiosync's worker, per case.")] = 1_000_000,
    uvloop: options.Uvloop = False,
    deadline: options.Deadline = 120.0,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """Reads of the model under back-to-back sends: how many saw two versions at once."""
    results = Results({"reads": reads, "uvloop": uvloop})
    for model, scheme, contender in product(TORN_MODELS, schemes, contenders):
        say(f"--- {model.name}, {scheme}, {contender}")
        setup = Setup(contender, scheme, model, 1, uvloop=uvloop, options={"sync": True})
        wanted = reads if contender == "aiosync" else max(1, reads // COMPARED)
        results.cases.append(asyncio.run(_count_torn(setup, wanted, deadline)))
    print_rows("reads under back-to-back sends", map(_torn_row, results.cases))
    results.conclude(json, check=check)


async def _count_torn(setup: Setup, reads: int, deadline: float) -> Case:
    async with compare(deadline, setup) as entries:
        await measure("reads", entries, timeout=READING_DEADLINE, sends=TORN_SENDS, reads=reads)
    return entries[0].case


def _torn_row(case: Case) -> Row:
    found = case.reads or ReadCounts()
    row: dict[str, Any] = {"sends": found.sends, "versions seen": found.versions, "reads": found.reads}
    row |= {"torn": found.torn, "share": f"{100 * found.torn / max(1, found.reads):.2f} %"}
    row |= {name: getattr(found, name) for name in ("leaked", "pinned", "moved", "skewed")}
    if case.reads is None:
        row = dict.fromkeys(row) | {"sends": case.failure}
    return {"model": case.key.model, "scheme": case.key.scheme, "contender": case.contender, **row}
