"""The results as tables on a terminal; plain text where rich is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from benchmarks.meters import Spread
from benchmarks.peers import CONTENDERS
from benchmarks.results import LIMIT, Case, Key, Results
from benchmarks.targets import Check

__all__ = ["print_checks", "print_results"]

MIB = 1 << 20


def print_results(results: Results) -> None:
    """Print every table that this run has something for, and what to know when reading them."""
    if results.cases:
        _print_table("send, in milliseconds: median [min - max]", _SEND_HEAD, _send_rows(results))
        _print_table("pauses, memory, reads", _SIDE_HEAD, _side_rows(results))
    if results.torn:
        _print_table("reads under back-to-back sends", _TORN_HEAD, _torn_rows(results))
    for note in results.notes:
        print(f"note: {note}")


def print_checks(checks: Sequence[Check]) -> None:
    """Print each target, reached or missed."""
    rows = [
        ("ok" if c.ok else "MISSED", c.what, "-" if c.got is None else f"{c.got:.4g}", c.want) for c in checks
    ]
    _print_table("targets", ("", "figure", "got", "want"), rows)


_SEND_HEAD = (
    "model", "scheme", "mode", "workers", "contender",
    "send", "vs aiosync", "vs memcpy", "first of its turn", "1 worker in turn",
)  # fmt: skip


def _send_rows(results: Results) -> Iterable[Sequence[str]]:
    for key in results.keys():
        for name in (*CONTENDERS, LIMIT):
            case = results.find(key, name)
            if case is None:
                continue
            yield (
                *_key_cells(key),
                name + (" (own block)" if case.turns == "some" else ""),
                _spread(case.send) if case.status == "ok" else _failure(case),
                _times(results.ratio(key, name, "aiosync")),
                _times(results.ratio(key, name, LIMIT)),
                "-" if case.first is None else _ms(case.first.median),
                "-" if case.one_worker is None else _spread(case.one_worker),
            )


_SIDE_HEAD = (
    "model", "scheme", "mode", "workers", "contender",
    "commit ms\nmedian / max", "stall, sender ms\np50 / p99 / max",
    "stall, worker ms\np50 / p99 / max", "sender peak\nMiB (grown)", "worker peak\nMiB (grown)",
    "shared MiB\n(models)", "torn / leaked\nof reads",
)  # fmt: skip


def _side_rows(results: Results) -> Iterable[Sequence[str]]:
    for case in results.cases:
        if case.contender == LIMIT or case.status != "ok":
            continue
        memory, stall, reads = case.memory, case.stall, case.reads
        nbytes = results.models[case.key.model]["nbytes"]
        yield (
            *_key_cells(case.key),
            case.contender,
            "-" if case.commit is None else f"{case.commit.median:.3f} / {case.commit.max:.3f}",
            _late(stall.sender if stall else None),
            _late(stall.worker if stall else None),
            _grown(memory.sender, memory.sender_growth) if memory else "-",
            _grown(memory.worker, memory.worker_growth) if memory else "-",
            f"{memory.shared / MIB:.1f} ({memory.shared / nbytes:.2f})" if memory else "-",
            f"{reads.torn} / {reads.leaked} of {reads.reads}" if reads else "-",
        )


_TORN_HEAD = (
    "model", "scheme", "contender", "sends", "versions seen", "reads", "torn", "share",
    "leaked", "pinned", "moved", "skewed",
)  # fmt: skip


def _torn_rows(results: Results) -> Iterable[Sequence[str]]:
    for case in results.torn:
        reads = case.reads
        if reads is None:
            yield (case.model, case.scheme, case.contender, case.status)
            continue
        yield (
            case.model,
            case.scheme,
            case.contender,
            str(case.sends),
            str(reads.versions),
            str(reads.reads),
            str(reads.torn),
            f"{100 * (case.torn_share or 0):.2f} %",
            str(reads.leaked),
            str(reads.pinned),
            str(reads.moved),
            str(reads.skewed),
        )


def _key_cells(key: Key) -> tuple[str, ...]:
    return key.model, key.scheme, key.mode, str(key.workers)


def _spread(s: Spread | None) -> str:
    return "-" if s is None else f"{_ms(s.median)} [{_ms(s.min)} - {_ms(s.max)}]"


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def _late(s: Spread | None) -> str:
    return "-" if s is None else f"{s.median:.1f} / {s.p99:.1f} / {s.max:.1f}"


def _grown(total: int, growth: int) -> str:
    return f"{total / MIB:.0f} ({growth / MIB:+.0f})"


def _failure(case: Case) -> str:
    last = case.error.strip().splitlines()[-1] if case.error else ""
    return f"{case.status}: {last[:60]}"


def _print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    if importlib.util.find_spec("rich") is None:
        _print_plain(title, head, rows)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # as Text, a bracket is a bracket and not a style

    table = Table(title=Text(f"\n{title}"), title_justify="left", title_style="bold")
    for name in head:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    # Into a file or a pipe there is no width to keep to.
    Console(width=None if console.is_terminal else 220).print(table)


def _print_plain(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [[cell.replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(head))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)))
