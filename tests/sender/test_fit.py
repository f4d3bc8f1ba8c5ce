"""How a source fits, found again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aiosync.errors import LayoutMismatchError
from aiosync.sender.extraction import fit, module_tensors
from aiosync.weights.layout import Layout


def test_what_fitted_once_is_found_again() -> None:
    model = nn.Linear(2, 3)
    layout = Layout.of(module_tensors(model))
    found = fit(layout, module_tensors(model), strict=True)
    assert fit(layout, module_tensors(model), strict=True) is found
    assert (found.whole, found.sharded, found.nbytes) == (True, False, 4 * 6 + 4 * 3)
    assert all(tensor is getattr(model, name) for name, tensor in found.pairs)
    another = Layout.of(module_tensors(model))
    assert fit(another, module_tensors(model), strict=True) is not found


def test_data_that_was_replaced_is_looked_at_anew() -> None:
    model = nn.Linear(2, 3)
    layout = Layout.of(module_tensors(model))
    found = fit(layout, module_tensors(model), strict=True)
    model.weight.data = torch.ones(3, 2)
    assert fit(layout, module_tensors(model), strict=True) is found
    model.weight.data = torch.ones(3, 2, dtype=torch.float64)
    assert fit(layout, module_tensors(model), strict=True).pairs[0][1].dtype is torch.float64
    for wrong in (torch.ones(2, 3), torch.ones(3, 2, dtype=torch.int64)):
        model.weight.data = torch.ones(3, 2)
        fit(layout, module_tensors(model), strict=True)
        with (
            pytest.raises(RuntimeError) if wrong.dtype is torch.int64 else pytest.raises(LayoutMismatchError)
        ):
            model.weight.data = wrong  # torch itself refuses integers: they have no gradient
            fit(layout, module_tensors(model), strict=True)


def test_a_buffer_that_became_another_dtype_does_not_fit() -> None:
    model = nn.BatchNorm1d(2)
    layout = Layout.of(module_tensors(model))
    fit(layout, module_tensors(model), strict=True)
    counted = model.num_batches_tracked
    assert isinstance(counted, torch.Tensor)
    counted.data = torch.ones((), dtype=torch.float32)
    with pytest.raises(LayoutMismatchError, match="num_batches_tracked"):
        fit(layout, module_tensors(model), strict=True)


def test_what_is_tied_elsewhere_is_compared_each_time() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(2))
            self.second = nn.Parameter(torch.ones(2))

    tied = Pair()
    tied.second = tied.first
    layout = Layout.of(module_tensors(tied))
    assert fit(layout, module_tensors(tied), strict=True) is fit(layout, module_tensors(tied), strict=True)
    apart = Pair()
    assert fit(layout, module_tensors(apart), strict=True).nbytes == layout["first"].nbytes
    apart.second.data.fill_(2)
    with pytest.raises(LayoutMismatchError, match="second"):
        fit(layout, module_tensors(apart), strict=True)


def test_a_part_is_not_taken_for_the_whole() -> None:
    model = nn.Linear(2, 3)
    layout = Layout.of(module_tensors(model))
    part = nn.Module()
    part.register_parameter("bias", model.bias)
    assert not fit(layout, module_tensors(part), strict=False).whole
    with pytest.raises(LayoutMismatchError, match="weight"):
        fit(layout, module_tensors(part), strict=True)


def test_a_lenient_fit_is_not_taken_for_a_strict_one() -> None:
    one = torch.ones(2)
    layout = Layout.of({"first": one, "second": one})
    model = nn.Module()
    model.register_parameter("first", nn.Parameter(torch.zeros(2)))
    assert fit(layout, module_tensors(model), strict=False).whole
    with pytest.raises(LayoutMismatchError, match="second"):
        fit(layout, module_tensors(model), strict=True)
