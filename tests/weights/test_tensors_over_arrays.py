"""Tensors in a part of other memory."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
import torch

from aiosync.weights.tensors import DTYPES, array_at, maker_over_arrays


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_it_is_that_part_in_main_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory = bytearray(range(200))
    with torch.device("meta"):  # the default device of the caller
        found = maker_over_arrays(dtype)(array_at(memory, 16, shape, dtype))
    assert (found.device.type, found.dtype, tuple(found.shape)) == ("cpu", dtype, shape)
    assert found.is_contiguous() and found.untyped_storage().nbytes() == found.nbytes
    assert found.reshape(-1).view(torch.uint8).tolist() == list(range(16, 16 + found.nbytes))
    memory[16] = 255
    assert not found.numel() or found.reshape(-1).view(torch.uint8)[0] == 255, "a copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_array(dtype: torch.dtype) -> None:
    memory = np.zeros(64, np.uint8)
    array = array_at(memory, 8, (2, 3), dtype)
    before, memory_kept, array_kept = sys.getrefcount(array), weakref.ref(memory), weakref.ref(array)
    found = maker_over_arrays(dtype)(array)
    view, other = found[1], found.view(torch.uint8).numpy()[1:]
    del memory, found
    gc.collect()
    assert sys.getrefcount(array) == before + 1
    del view
    gc.collect()
    assert sys.getrefcount(array) == before + 1
    del other
    gc.collect()
    assert sys.getrefcount(array) == before
    del array
    assert array_kept() is memory_kept() is None
