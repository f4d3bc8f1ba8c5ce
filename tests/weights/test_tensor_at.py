"""Tensors in a part of other memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from aiosync.weights.tensors import DTYPES, tensor_at


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_it_is_that_part_in_main_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory = bytearray(range(200))
    with torch.device("meta"):  # the default device of the caller
        found = tensor_at(memory, 16, shape, dtype)
    assert (found.device.type, found.dtype, tuple(found.shape)) == ("cpu", dtype, shape)
    assert found.is_contiguous() and found.untyped_storage().nbytes() == found.nbytes
    assert found.reshape(-1).view(torch.uint8).tolist() == list(range(16, 16 + found.nbytes))
    memory[16] = 255
    assert not found.numel() or found.reshape(-1).view(torch.uint8)[0] == 255, "a copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_memory(dtype: torch.dtype) -> None:
    memory = np.zeros(64, np.uint8)
    dropped = weakref.ref(memory)
    found = tensor_at(memory, 8, (2, 3), dtype)
    view = found[1]
    del memory, found
    gc.collect()
    assert dropped() is not None
    del view
    gc.collect()
    assert dropped() is None
