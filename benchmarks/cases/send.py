"""``aiosync bench send``: schemes within one machine beside torchrl's and beside one warm memcpy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.contenders import ABOUT, LIMIT, Setup
from benchmarks.harness.comparison import Comparison, Entry
from benchmarks.harness.meters import Memcpy, Spread, spread
from benchmarks.harness.models import MODELS, ModelSpec, sizes
from benchmarks.harness.results import Case, Key, Results, machine, memory_total
from benchmarks.harness.tables import Row, print_rows, progress, write
from benchmarks.harness.targets import check, print_checks
from benchmarks.harness.trainer import Mode

__all__ = ["SCHEMES", "Options", "run"]

SCHEMES = ("shared", "process")
MIB = 1 << 20
WARM_UP = 3
"""Turns before anything is counted: enough for every slot of an arena to have been written."""
MEMORY_SENDS = 4
"""Sends that the memory is sampled over."""
MEMORY_SHARE = 0.85
"""Of the memory that is free when a block starts, how much its processes may take."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options, parsed. See ``--help`` for what they mean."""

    models: tuple[str, ...]
    workers: tuple[int, ...]
    schemes: tuple[str, ...]
    contenders: tuple[str, ...]
    rounds: int
    quick: bool
    uvloop: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class _Block:
    """Contenders that take turns: those of one model, scheme and number of workers that memory holds.

    Attributes:
        nbytes: the model's size.
        rounds: turns of each.
        extra: sends for stalls, and for torn reads at least.
        reads: reads of the model under back-to-back sends, at least.
        with_one: whether aiosync with one worker takes turns too, to compare with.
        turns: ``all`` contenders are in this block, or ``some``.
    """

    model: ModelSpec
    nbytes: int
    scheme: str
    workers: int
    contenders: tuple[str, ...]
    rounds: int
    extra: int
    reads: int
    with_one: bool
    turns: str = "all"

    def setup(self, contender: str, workers: int, uvloop: bool) -> Setup:
        return Setup(contender, self.scheme, self.model, workers, uvloop, {"sync": True})

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Ways of sending: the shared scheme copies any source alike, so it needs only one."""
        return ("plain", "fresh") if self.scheme == "process" else ("plain",)


def run(options: Options, json: Path | None, png: Path | None, *, show_targets: bool) -> int:
    """Measure, print, write; returns how many targets were missed."""
    results = Results(machine=machine(), settings=asdict(options), notes=_notes(options.contenders))
    results.models = {name: sizes(MODELS[name]) for name in options.models}
    say = progress()
    for block in _blocks(options, results.models):
        say(f"--- {block.model.name}, {block.scheme}, workers: {block.workers}")
        results.cases.extend(asyncio.run(_measure(block, options, say)))
    print_rows("send, in milliseconds: median (least - most)", _send_rows(results))
    print_rows("pauses, memory, reads", _side_rows(results))
    for note in results.notes:
        print(f"note: {note}")
    checks = check(results)
    if show_targets:
        print_checks(checks)
    write(json, {**asdict(results), "ratios": results.ratios()})
    if png is not None:
        # matplotlib is optional, and only a picture needs it.
        from benchmarks.harness.picture import draw

        draw(results, png)
    return sum(not c.ok for c in checks)


async def _measure(block: _Block, options: Options, say: Callable[[str], None]) -> list[Case]:
    async with Comparison(say, options.deadline) as comparison:
        for name in block.contenders:
            setup = block.setup(name, block.workers, options.uvloop)
            comparison.add(setup, *block.modes, turns=block.turns)
        entries = list(comparison.entries)
        one: Entry | None = None
        if block.with_one and block.workers > 1 and "aiosync" in block.contenders:
            one = comparison.add(block.setup("aiosync", 1, options.uvloop), "plain")
        await comparison.start()
        limit = Memcpy(block.nbytes // 4)
        copies = await comparison.take_turns(block.rounds, warm_up=WARM_UP, limit=limit)
        del limit  # it holds two model sizes
        each = comparison.each
        await each("does every worker hold what was sent", Entry.verify, entries)
        await each("event-loop stalls", lambda entry: entry.stall(block.extra), entries)
        await each("memory", lambda entry: entry.memory(MEMORY_SENDS), entries)
        await each("reads under sends", lambda entry: _read(entry, block), entries)
        await comparison.end()
    return list(_cases(block, entries, one, copies))


async def _read(entry: Entry, block: _Block) -> None:
    # The receiver may tear a read, and the receiver is the same in every mode.
    if entry.mode == "plain":
        await entry.read(block.extra, block.reads)


def _cases(block: _Block, entries: list[Entry], one: Entry | None, copies: list[float]) -> Iterator[Case]:
    limit = spread(copies)
    key = Key(block.model.name, block.scheme, "plain", block.workers)
    yield Case(key, LIMIT, turns=block.turns, send=limit, samples=[copy * 1e3 for copy in copies])
    for entry in entries:
        case = entry.finish()
        case.limit = limit
        if one is not None and (case.contender, entry.mode) == ("aiosync", "plain"):
            case.one_worker = one.finish().send
        yield case


def _blocks(options: Options, known: Mapping[str, Mapping[str, int]]) -> Iterator[_Block]:
    """Every block, smallest model first; contenders that do not fit side by side get blocks of their own."""
    cut = 5 if options.quick else 1
    for name in options.models:
        rounds = options.rounds or max(3, MODELS[name].rounds // cut)
        for scheme in options.schemes:
            for workers in options.workers:
                block = _Block(
                    model=MODELS[name],
                    nbytes=known[name]["nbytes"],
                    scheme=scheme,
                    workers=workers,
                    contenders=options.contenders,
                    rounds=rounds,
                    extra=max(2, min(20, rounds)) // (2 if options.quick else 1),
                    reads=1_000 // cut,
                    with_one=scheme == "shared" and workers == max(options.workers),
                )
                yield from _that_fit(block)


def _that_fit(block: _Block) -> Iterator[_Block]:
    """The block, or, if memory does not hold all its contenders at once, one for every few."""
    available = memory_total("MemAvailable")
    free = float("inf") if available is None else MEMORY_SHARE * available / block.nbytes
    fits: list[tuple[str, ...]] = []
    room = 0.0  # in model sizes
    for name in block.contenders:
        needed = _model_sizes(block.scheme, block.workers, name)
        if not fits or needed > room:
            limit = 2
            one = _model_sizes(block.scheme, 1, "aiosync") if block.with_one and not fits else 0
            room = free - limit - one
            fits.append(())
        fits[-1] += (name,)
        room -= needed
    for contenders in fits:
        yield replace(block, contenders=contenders, turns="all" if len(fits) == 1 else "some")


def _model_sizes(scheme: str, workers: int, contender: str) -> int:
    """How many model sizes a contender may hold, in all its processes together."""
    if scheme == "shared":
        return {"aiosync": 4, "torchrl": 2, "torchrl-alias": 1}[contender]
    # The trainer's own and a fresh one; what is in transit; what each worker has.
    return {"aiosync": 2 + 3 + 2 * workers, "torchrl": 2 + 1 + workers, "torchrl-alias": 2 + 1}[contender]


def _send_rows(results: Results) -> Iterator[Row]:
    for key in results.keys():
        for name in (*ABOUT, LIMIT):
            # The limit knows no modes: it is one copy either way.
            case = results.find(replace(key, mode="plain") if name == LIMIT else key, name)
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
            "stall, sender ms\np50 / p99 / max": _late(stall and stall.sender),
            "stall, worker ms\np50 / p99 / max": _late(stall and stall.worker),
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
