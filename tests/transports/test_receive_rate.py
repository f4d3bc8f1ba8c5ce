"""Workers that read no more than ``max_receive_rate`` bytes per second."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aiosync import InvalidArgumentError, TCPWeightSyncScheme
from aiosync.transports.tcp.pace import Pace
from tests.kit.certificates import certificates
from tests.kit.clock import PATIENCE, within
from tests.kit.local import LocalWorker
from tests.kit.tcp import TOKEN, join

RATE = 20e6
SIZE = 4 << 20  # bytes of the model


def _of(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "unix":
        return {"address": f"unix://{folder}/socket"}
    return {"address": "tcp://127.0.0.1:0", "tls": certificates().config if kind == "tls" else None}


@pytest.mark.parametrize("kind", ["tcp", "tls", "unix"])
async def test_updates_take_their_time(kind: str, tmp_path: Path) -> None:
    options = {"token": TOKEN, "timeout": PATIENCE, **_of(kind, tmp_path)}
    model, copy = nn.Linear(1024, SIZE // 4096, bias=False), nn.Linear(1024, SIZE // 4096, bias=False)
    scheme = TCPWeightSyncScheme(**options)
    scheme.init_on_sender(model_id="policy", model=model)
    options["address"] = scheme.address
    worker = LocalWorker(TCPWeightSyncScheme(**options, max_receive_rate=RATE), 0, copy, {})
    worker.init(worker_idx=None)
    await within(join(scheme, worker))
    for _ in range(2):
        nn.init.normal_(model.weight)
        begun = time.monotonic()
        await within(scheme.send())
        # One read comes before the first rest.
        assert time.monotonic() - begun >= (SIZE - 2 * Pace(RATE).most) / RATE
        assert torch.equal(model.weight, copy.weight)
    await within(worker.close())
    await within(scheme.aclose())


async def test_it_ends_while_it_rests() -> None:
    model, copy = nn.Linear(1024, 8192, bias=False), nn.Linear(1024, 8192, bias=False)
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE, on_failure="drop")
    scheme.init_on_sender(model_id="policy", model=model)
    slow = TCPWeightSyncScheme(scheme.address, token=TOKEN, timeout=PATIENCE, max_receive_rate=16e6)
    worker = LocalWorker(slow, 0, copy, {})
    worker.init(worker_idx=None)
    await within(join(scheme, worker))
    versions = [model.weight.clone()]
    nn.init.normal_(model.weight)
    versions.append(model.weight)
    await within(scheme.send(wait=False))
    await asyncio.sleep(0.2)  # the worker needs two seconds to read it
    await within(worker.close())
    await within(scheme.aclose())
    assert torch.equal(copy.weight, versions[slow.version])


def test_small_reads_do_not_rest() -> None:
    pace = Pace(1e9)
    assert [pace.rest_after(1000) for _ in range(1000)] == [0.0] * 1000
    slow = Pace(1 << 16)
    assert slow.most == 1 << 14
    assert slow.rest_after(slow.most) == 0.0  # after a while without reads the first one is free
    assert slow.rest_after(slow.most) == pytest.approx(0.25, abs=0.01)
    assert slow.rest_after(slow.most) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("rate", [0, -1, 100, math.inf, math.nan, "fast", True])
def test_what_is_no_rate(rate: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_receive_rate: expected bytes per second >= 65536"):
        TCPWeightSyncScheme(max_receive_rate=rate)
