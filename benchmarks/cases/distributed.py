"""``aiosync bench distributed``: torch.distributed and torch RPC, beside torchrl's schemes and bare gloo.

torchrl's schemes are used as its collectors use them: they send tensor by tensor over the default process
group. Bare gloo is in :mod:`benchmarks.contenders.bare`. All times are until the new weights are in the
workers' models.

aiosync's workers view the sender's slots, as they do on one machine; ``--apart`` sends everything through
process groups, as between machines. With ``--acting`` workers roll a small policy out as fast as they can, on
their event loop or, torchrl's, in their main thread; the other contenders' workers are stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import typer
from torch._C._distributed_c10d import TCPStore

from benchmarks.contenders import Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare
from benchmarks.harness.meters import times
from benchmarks.harness.models import MODELS, sizes
from benchmarks.harness.tables import Row, report, say

SCHEMES = options.Names(("distributed", "rpc"))
WARM_UP = 2
STALL_SECONDS = 3.0  # for so long sends follow each other beside tickers: a percentile takes many ticks
DEADLINE = 120.0


def run(
    models: options.Models = options.ALL_MODELS,
    workers: options.Workers = options.UP_TO_FOUR,
    schemes: Annotated[options.Names, options.names_of(SCHEMES)] = SCHEMES,
    rounds: options.Rounds = 0,
    acting: Annotated[bool, typer.Option("--acting", help="Workers roll out meanwhile.")] = False,
    apart: options.Apart = False,
    json: options.Json = None,
) -> None:
    """torch.distributed and torch RPC, beside torchrl's schemes and bare gloo."""
    how = (", workers act" if acting else ", workers are idle") + (", as if apart" if apart else "")
    title = "aiosync beside torchrl and one bare gloo send: milliseconds, median (least - most)" + how
    with report(title, "distributed", json) as rows:
        for scheme, model, count in product(schemes, models, workers):
            say(f"--- {scheme}, {model}, workers: {count}")
            with tempfile.TemporaryDirectory(prefix="aiosync-bench-") as folder:
                # One send in a turn, also of the tiny model: each contender's wake-up counts.
                base = Setup(
                    "", scheme, replace(MODELS[model], turn=1), count, modes=("known",),
                    options={"timeout": 120, "share_memory": not apart}, extras={"file": folder},
                )  # fmt: skip
                rows.append(asyncio.run(_measure(base, rounds or MODELS[model].rounds, acting)))


async def _measure(base: Setup, rounds: int, acting: bool) -> Row:
    stores: list[Any] = []  # each ends with its last reference

    def setup(contender: str, workers: int) -> Setup:
        store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        extras = {"port": store.port, "file": f"{base.extras['file']}/{contender}"}
        return replace(base, contender=contender, workers=workers, extras=extras)

    count, spec = base.workers, base.model
    setups = setup("aiosync", count), setup("torchrl", count), setup("gloo", 1)
    async with compare(DEADLINE, *setups) as comparison:
        ours, theirs, gloo = comparison.entries
        if acting:
            await comparison.each("acting", [ours, theirs])
        await comparison.take_turns(rounds, warm_up=WARM_UP, alone=acting)
        await comparison.each("stall", [ours], seconds=STALL_SECONDS)
    case, other, bare = ours.finish(), theirs.finish(), gloo.finish()
    return {
        "scheme": base.scheme,
        "model": f"{spec.name}, {sizes(spec)['params'] / 1e6:.3g} M",
        "workers": count,
        "aiosync, ms": case.failure or case.send,
        "torchrl, ms": other.failure or other.send,
        "times": times(other.send, case.send),
        "gloo, ms": bare.failure or bare.send,
        "of gloo": times(bare.send, case.send),
        "stall p99, ms": case.stall,
    }
