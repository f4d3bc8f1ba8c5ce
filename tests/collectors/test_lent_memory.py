"""A batch's memory is the trainer's while anything refers to it, and no longer."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiosync.collectors.batch_buffers import BatchBuffer
from aiosync.weights.segment import Segment
from tests.collectors.kit import ENVS, collecting
from tests.collectors.worlds import make_policy

SPECS = (
    ("observation", (3, 4), torch.float32),
    ("half", (3,), torch.bfloat16),
    ("none", (3, 0), torch.int64),
)

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda tensor: tensor[0, 1:],
    "detached": Tensor.detach,
    "array": lambda tensor: tensor.numpy()[1:],
    "bytes": lambda tensor: memoryview(tensor.numpy()),  # type: ignore[arg-type]
    "other dtype": lambda tensor: tensor.view(torch.uint8),
    "storage": Tensor.untyped_storage,
    "parameter": nn.Parameter,
    "dlpack": lambda tensor: tensor.__dlpack__(),
    "graph": lambda tensor: tensor * torch.ones(4, requires_grad=True),
}


def _buffer() -> BatchBuffer:
    return BatchBuffer(SPECS, 5, Segment.private, 1)


@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_holds_a_tensor(holder: str) -> None:
    buffer = _buffer()
    assert not buffer.is_lent
    for _ in range(2):
        fields = buffer.lend(5)
        assert buffer.is_lent
        held = HOLDERS[holder](fields.pop("observation"))
        del fields
        assert buffer.is_lent
        del held
        assert not buffer.is_lent


@pytest.mark.parametrize("key", [key for key, *_ in SPECS])
def test_one_field_is_enough(key: str) -> None:
    buffer = _buffer()
    kept = buffer.lend(5)[key]
    assert buffer.is_lent
    del kept
    assert not buffer.is_lent


@pytest.mark.parametrize("when", ["lent", "asked"])
def test_a_tool_that_looks_at_local_variables(when: str) -> None:
    buffer = _buffer()

    def profiled(call: Callable[[], Any]) -> Any:
        sys.setprofile(lambda frame, event, arg: frame.f_locals)  # refers to what the frame refers to
        try:
            return call()
        finally:
            sys.setprofile(None)

    fields = profiled(lambda: buffer.lend(5)) if when == "lent" else buffer.lend(5)
    for _ in range(2):
        assert buffer.is_lent
        assert profiled(lambda: buffer.is_lent)
    del fields
    assert not buffer.is_lent


@contextmanager
def _gradients_in_inference_mode() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, _gradients_in_inference_mode])
@pytest.mark.parametrize("steps", [5, 4])
@pytest.mark.parametrize("key", ["observation", "half"])
def test_what_was_lent_without_gradients_can_be_used_with_them(
    key: str, steps: int, mode: Callable[[], Any]
) -> None:
    with mode():
        fields = _buffer().lend(steps)
    factor = torch.ones((), dtype=fields[key].dtype, requires_grad=True)
    fields[key].mul_(factor).sum().backward()
    assert factor.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("sync", [False, True])
async def test_a_batch_taken_without_gradients_can_be_used_with_them(
    sync: bool, mode: Callable[[], Any]
) -> None:
    async with collecting(ENVS, make_policy(), sync=sync) as collector:
        with mode():
            batch = await anext(collector)
        factor = torch.ones((), requires_grad=True)
        batch["next", "reward"].mul_(factor).sum().backward()
    assert factor.grad is not None


def _mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:aiosync" in line for line in maps)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
async def test_a_batch_that_outlives_its_collector_is_freed_when_it_is_dropped() -> None:
    gc.collect()
    gc.disable()  # what is in a cycle waits for it
    try:
        async with collecting(ENVS, make_policy(), sync=False) as collector:
            kept = [await anext(collector) for _ in range(5)]
        copies, before = [batch.clone() for batch in kept], _mapped()
        assert all((batch == copy).all() for batch, copy in zip(kept, copies, strict=True))
        kept.clear()
        assert _mapped() == before - 5
    finally:
        gc.enable()
