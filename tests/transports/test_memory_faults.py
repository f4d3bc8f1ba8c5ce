"""Scripted faults: no fault of a frame makes a side hang, tears an update, or stops the other worker."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from typing import Literal, get_args

import anyio
import pytest

from aiosync import AiosyncError, Fault, InvalidArgumentError, MemoryWeightSyncScheme
from aiosync.transports.memory import FaultKind
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def has(worker: LocalWorker, version: int) -> bool:
    """Whether a worker's model has this version."""
    return value_of(worker.model) == version


def is_whole(worker: LocalWorker) -> bool:
    """Whether a worker's model has the version that its scheme says."""
    if not worker.scheme.synchronized_on_receiver:  # its connect() may have applied version 0 and then failed
        return value_of(worker.model) in (-1, 0)
    return has(worker, worker.scheme.version)


@pytest.mark.parametrize("frame", range(7))
@pytest.mark.parametrize("to", ["sender", "worker"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_frame_gone_wrong(kind: FaultKind, to: Literal["sender", "worker"], frame: int) -> None:
    scheme = MemoryWeightSyncScheme(faults=[Fault(kind, frame, to, worker=0)], timeout=BRIEF / 3)
    model = Uniform(0.0)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    hurt, well = (LocalWorker(copy.copy(scheme), index, Uniform(-1.0), {}) for index in range(2))

    async def join(worker: LocalWorker) -> None:
        with suppress(AiosyncError):
            # On a busy machine the sender's deadline may pass before the well worker has answered.
            await worker.connect(PATIENCE if worker is well else None)
            await worker.serve()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(join, hurt)
            tasks.start_soon(join, well)
            with suppress(AiosyncError):
                await within(scheme.connect())
        assert value_of(well.model) == 0
        assert is_whole(hurt)
        if not scheme.synchronized_on_sender:
            return  # the hurt worker never came
        for version in range(1, 5):
            fill(model, version)
            with suppress(AiosyncError):
                await within(scheme.send())
            await eventually(partial(has, well, version), "the well worker gets each version")
            assert well.scheme.version == scheme.version == version
            assert is_whole(hurt)
    finally:
        for worker in (hurt, well):
            await worker.close()
        await within(scheme.aclose())


def test_a_fault_before_the_first_frame() -> None:
    with pytest.raises(InvalidArgumentError, match="frame number of 0 or more"):
        MemoryWeightSyncScheme(faults=[Fault("drop", -1)]).init_on_sender(
            model_id="policy", model=Uniform(), num_workers=1
        )
