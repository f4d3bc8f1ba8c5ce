"""``aiosync bench delta``: how many bytes an update takes, and how long over a thin link.

A small transformer learns a Markov chain with AdamW; after each step the weights go to a worker, which must
have the sender's cast weights bit by bit. Learning rates are those of fine-tuning, and larger ones.
"""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Annotated, Literal, NamedTuple

import torch
import typer
from torch import Tensor, nn

import aiosync
from benchmarks.contenders.aiosync import limit_rate
from benchmarks.harness import options
from benchmarks.harness.meters import summary
from benchmarks.harness.tables import Row, report

WORDS, WIDTH, LAYERS, LENGTH, BATCH = 512, 256, 4, 32, 16
WARM_UP = 30


class _Setting(NamedTuple):
    """One line of the table."""

    codec: Literal["full", "zstd", "delta"]
    wire: str
    lr: float
    mbit: float = 0.0  # the link's megabits per second; 0: unlimited


SETTINGS = [
    *(_Setting("delta", "bfloat16", lr) for lr in (1e-6, 3e-6, 1e-5, 1e-4)),
    _Setting("full", "bfloat16", 1e-5),
    _Setting("zstd", "bfloat16", 1e-5),
    _Setting("delta", "float32", 1e-5),
    _Setting("full", "bfloat16", 1e-5, 100),
    _Setting("delta", "bfloat16", 1e-5, 100),
    _Setting("delta", "bfloat16", 1e-6, 100),
]


class Transformer(nn.Module):
    """Causal, 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next word at each place."""
        hidden = self.words(tokens) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        out: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return out


class Training:
    """AdamW on the chain, first with a large learning rate: moments and weights are then those of a run."""

    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        self._dice = torch.Generator().manual_seed(1)
        self._chain = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=self._dice), -1)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(WARM_UP):
            self.step()
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """One update."""
        tokens = torch.randint(0, WORDS, (BATCH, 1), generator=self._dice)
        for _ in range(LENGTH):
            following = torch.multinomial(self._chain[tokens[:, -1]], 1, generator=self._dice)
            tokens = torch.cat([tokens, following], 1)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


async def _measure(setting: _Setting, updates: int) -> Row:
    """``updates`` steps, each sent and compared bit by bit."""
    wire: torch.dtype = getattr(torch, setting.wire)
    training = Training(setting.lr)
    scheme = aiosync.TCPWeightSyncScheme(
        codec=setting.codec, cast=wire if wire is not torch.float32 else None, timeout=120
    )
    scheme.init_on_sender(model_id="policy", model=training.model, num_workers=1)
    limit_rate(setting.mbit, scheme)
    worker = aiosync.TCPWeightSyncScheme(scheme.address, timeout=120)
    model = copy.deepcopy(training.model)
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    await asyncio.gather(scheme.connect(), worker.connect())
    seconds: list[float] = []
    async with worker.receiving():
        before = scheme.stats.wire_nbytes
        for _ in range(updates):
            training.step()
            begun = time.perf_counter()
            await scheme.send()
            seconds.append(time.perf_counter() - begun)
            for (name, sent), got in zip(training.model.named_parameters(), model.parameters(), strict=True):
                if not torch.equal(sent.detach().to(wire), got.detach().to(wire)):
                    raise AssertionError(f"{name} differs from what was sent")
        nbytes = (scheme.stats.wire_nbytes - before) / updates
    await worker.aclose()
    await scheme.aclose()
    full = sum(p.numel() for p in model.parameters()) * wire.itemsize
    return {
        "codec": setting.codec,
        "on the wire": setting.wire,
        "learning rate": f"{setting.lr:g}",
        "link": f"{setting.mbit:g} Mbit/s" if setting.mbit else "loopback",
        "kB per update": nbytes / 1e3,
        "times smaller": full / nbytes,
        "send, ms": summary(seconds),
    }


def run(
    updates: Annotated[
        int, typer.Option(min=1, help="Updates of each kind; a tenth over a thin link.")
    ] = 200,
    json: options.Json = None,
) -> None:
    """Bytes per update of a transformer that learns, by codec."""
    title = f"A transformer's updates with AdamW, {updates} of each, every one bit-exact"
    with report(title, "delta", json) as rows:
        for setting in SETTINGS:
            count = updates if not setting.mbit else max(5, updates // 10)
            rows.append(asyncio.run(_measure(setting, count)))
