"""``aiosync bench network``: aiosync over TCP, Unix sockets and TLS beside one blocking socket.

The blocking socket does the fastest that a few lines of Python do (see :mod:`benchmarks.contenders.bare`).
aiosync's time is that of ``send``: until every worker's parameters are the new ones.
"""

from __future__ import annotations

import asyncio
import tempfile
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

import aiosync
from benchmarks.contenders import Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare
from benchmarks.harness.meters import times
from benchmarks.harness.models import ModelSpec
from benchmarks.harness.tables import Row, report, say

SIZES = options.Numbers((256, 1024))
LINKS = options.Names(("tcp", "unix", "tls"))
WARM_UP = 2
STALL_SENDS = 5
SUSPENDED_SENDS = 8
DEADLINE = 300.0


def run(
    mib: Annotated[options.Numbers, options.numbers("Model sizes in MiB.")] = SIZES,
    workers: options.Workers = options.UP_TO_FOUR,
    links: Annotated[options.Names, options.names_of(LINKS)] = LINKS,
    rounds: Annotated[int, typer.Option(min=1, help="Timed sends of each.")] = 9,
    json: options.Json = None,
) -> None:
    """TCP, Unix sockets and TLS beside one blocking socket."""
    title = "aiosync over sockets, beside one blocking socket: milliseconds, median (least - most)"
    with report(title, "network", json) as rows:
        for link, size, count in product(links, mib, workers):
            say(f"--- {link}, {size} MiB, workers: {count}")
            with tempfile.TemporaryDirectory(prefix="aiosync-bench-") as folder:
                rows.append(asyncio.run(_measure(link, size, count, rounds, Path(folder))))


def _certificates(folder: Path) -> aiosync.TLSConfig:
    """Certificates for localhost, in ``folder``."""
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    return aiosync.TLSConfig(str(folder / "own.pem"), cafile=str(folder / "ca.pem"))


async def _measure(link: str, mib: int, workers: int, rounds: int, folder: Path) -> Row:
    tls = _certificates(folder) if link == "tls" else None
    model = ModelSpec(f"{mib} MiB", mib=mib)
    address = f"unix://{folder}/socket" if link == "unix" else "tcp://127.0.0.1:0"
    given = {"address": address, "tls": tls, "timeout": 120.0}
    bare = {"unix": link == "unix", "tls": tls}
    async with compare(
        DEADLINE,
        Setup("aiosync", "tcp", model, workers, modes=("still",), options=given),
        Setup("sockets", link, model, 1, modes=("still",), options=bare),
    ) as comparison:
        ours, blocking = comparison.entries
        await comparison.take_turns(rounds, warm_up=WARM_UP)
        # After the turns: tickers would take processor time from one side of the comparison only.
        await comparison.each("stall", [ours], sends=STALL_SENDS)
        await comparison.each("counters", [ours])
        if workers > 1:
            await comparison.each("suspended", [ours], sends=SUSPENDED_SENDS)
    case, limit = ours.finish(), blocking.finish()
    faster, stopped = times(limit.send, case.send), case.suspended
    return {
        "link": link,
        "MiB": mib,
        "workers": workers,
        "send, ms": case.failure or case.send,
        "blocking, ms": limit.failure or limit.send,
        "ratio": workers * faster if faster else None,  # of bytes per second to all workers
        "stall p99, ms": case.stall,
        "slots, models": case.counters.get("memory", 0) / (mib << 20),
        "one stopped: slots, models": stopped["memory"] / (mib << 20) if stopped else None,
        "one stopped: send, ms": stopped.get("send"),
    }
