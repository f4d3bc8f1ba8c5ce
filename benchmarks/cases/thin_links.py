"""``aiosync bench delta`` and ``relay``: what TCP makes of links of a given rate, also thin ones.

``delta``: how many bytes an update takes. A small transformer learns a Markov chain with AdamW; after each
step the weights go to a worker, which must have the sender's cast weights bit by bit. Learning rates are
those of fine-tuning, and larger ones.

``relay``: a trainer, two relays and eight workers, beside eight workers of the trainer's own. Every link has
the same rate, a network's: the way that the bytes take is compared, and not the cores of the one machine on
which all processes run.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import aiosync
from benchmarks.contenders import Setup
from benchmarks.contenders.aiosync import limit_rate
from benchmarks.harness import options
from benchmarks.harness.comparison import compare, measure, take_turns
from benchmarks.harness.meters import summary, times
from benchmarks.harness.model_specs import ModelSpec
from benchmarks.harness.results import Case, Row, report

WORDS, WIDTH, LAYERS, LENGTH, BATCH = 512, 256, 4, 32, 16
LEARNING_WARM_UP = 30
WORKERS, RELAYS, WARM_UP = 8, 2, 2
DEADLINE = 300.0


SETTINGS: tuple[tuple[str, torch.dtype, float, float], ...] = (
    *(("delta", torch.bfloat16, lr, 0) for lr in (1e-6, 3e-6, 1e-5, 1e-4)),
    ("full", torch.bfloat16, 1e-5, 0),
    ("zstd", torch.bfloat16, 1e-5, 0),
    ("delta", torch.float32, 1e-5, 0),
    ("full", torch.bfloat16, 1e-5, 100),
    ("delta", torch.bfloat16, 1e-5, 100),
    ("delta", torch.bfloat16, 1e-6, 100),
)
"""The codec, the dtype on the wire, the learning rate, and the link's megabits per second (0: unlimited)."""


class _Transformer(nn.Module):
    """Causal, 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        out: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return out


def _train(lr: float) -> Iterator[nn.Module]:
    """AdamW on the chain; yields the model, at first and after each update.

    A large learning rate precedes: moments and weights are then those of a run.
    """
    torch.manual_seed(0)
    model, dice = _Transformer(), torch.Generator().manual_seed(1)
    chain = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=dice), -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in itertools.count():
        if number >= LEARNING_WARM_UP:
            optimizer.param_groups[0]["lr"] = lr
            yield model
        tokens = torch.randint(0, WORDS, (BATCH, 1), generator=dice)
        for _ in range(LENGTH):
            following = torch.multinomial(chain[tokens[:, -1]], 1, generator=dice)
            tokens = torch.cat([tokens, following], 1)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


async def _measure_codec(codec: Any, wire: torch.dtype, lr: float, mbit: float, updates: int) -> Row:
    """So many steps, each sent and compared bit by bit."""
    training = _train(lr)
    trained = next(training)
    cast = wire if wire is not torch.float32 else None
    scheme = aiosync.TCPWeightSyncScheme(codec=codec, cast=cast, timeout=120)
    scheme.init_on_sender(model_id="policy", model=trained, num_workers=1)
    limit_rate(mbit, scheme)
    worker = aiosync.TCPWeightSyncScheme(scheme.address, timeout=120)
    model = copy.deepcopy(trained)
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    await asyncio.gather(scheme.connect(), worker.connect())
    seconds: list[float] = []
    async with worker.receiving():
        before = scheme.stats.wire_nbytes
        for _ in range(updates):
            next(training)
            begun = time.perf_counter()
            await scheme.send()
            seconds.append(time.perf_counter() - begun)
            for (name, sent), got in zip(trained.named_parameters(), model.parameters(), strict=True):
                if not torch.equal(sent.detach().to(wire), got.detach().to(wire)):
                    raise AssertionError(f"{name} differs from what was sent")
        nbytes = (scheme.stats.wire_nbytes - before) / updates
    await worker.aclose()
    await scheme.aclose()
    full = sum(p.numel() for p in model.parameters()) * wire.itemsize
    return {
        "codec": codec, "on the wire": str(wire).removeprefix("torch."), "learning rate": f"{lr:g}",
        "link": f"{mbit:g} Mbit/s" if mbit else "loopback",
        "kB per update": nbytes / 1e3,
        "times smaller": full / nbytes,
        "send, ms": summary(seconds),
    }  # fmt: skip


def delta(
    updates: Annotated[int, typer.Option(min=1, help="Of each kind; a tenth over a thin link.")] = 200,
    json: options.Json = None,
) -> None:
    """Bytes per update of a transformer that learns, by codec."""
    title = f"A transformer's updates with AdamW, {updates} of each, every one bit-exact"
    with report(title, "delta", json) as rows:
        for codec, wire, lr, mbit in SETTINGS:
            count = max(5, updates // 10) if mbit else updates
            rows.append(asyncio.run(_measure_codec(codec, wire, lr, mbit, count)))


def relay(
    mib: Annotated[int, typer.Option(min=1, help="Size of the model in MiB.")] = 256,
    mbit: Annotated[float, typer.Option(min=0, help="Megabits per second of a link; 0: unlimited.")] = 1000.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed sends of each way.")] = 5,
    json: options.Json = None,
) -> None:
    """A trainer, two relays and eight workers, beside eight workers of the trainer's own."""
    rate = f"{mbit:g} Mbit/s" if mbit else "as fast as they go"
    title = f"{mib} MiB to {WORKERS} workers, links {rate}: median (least - most)"
    flat = None
    with report(title, "relay", json) as rows:
        for relays in (0, RELAYS):
            case, copies = asyncio.run(_measure_way(relays, mib, mbit, rounds))
            flat = flat or case.send
            longer = times(case.send, flat)
            row = {
                "way": f"1 - {relays} - {WORKERS}" if relays else f"1 - {WORKERS}",
                "copies sent by the trainer": f"{copies:.3f}",
                "send, ms": case.outcome,
                "added by the level": longer - 1 if relays and longer else None,
            }
            rows.append(row)


async def _measure_way(relays: int, mib: int, mbit: float, rounds: int) -> tuple[Case, float]:
    """One way's sends, and how many models the trainer sent for each."""
    model, extras = ModelSpec(f"{mib} MiB", mib=mib), {"relays": relays, "mbit": mbit}
    setup = Setup("aiosync", "tcp", model, WORKERS, ("still",), extras=extras)
    sent: list[int] = []
    async with compare(DEADLINE, setup) as entries:
        for turns in (WARM_UP, rounds):
            await take_turns(entries, turns, warm_up=0)
            await measure("counters", entries)
            sent.append(entries[0].case.counters.get("wire_nbytes", 0))
    return entries[0].finish(), (sent[1] - sent[0]) / rounds / (mib << 20)
