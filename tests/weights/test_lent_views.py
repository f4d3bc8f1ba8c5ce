"""Tensors that are lent to a model: one whose memory was moved is made again before it is lent again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import Tensor, nn

from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import LentViews

LAYOUT = Layout(
    [
        ("w", (4, 3), torch.float32),
        ("half", (5,), torch.bfloat16),
        ("flag", (), torch.bool),
        ("none", (0, 2), torch.float32),
        ("complex", (2,), torch.complex64),
    ]
)

MOVES: dict[str, Callable[[Tensor], object]] = {
    "shared": lambda tensor: tensor.share_memory_(),
    "its storage shared": lambda tensor: tensor.untyped_storage().share_memory_(),
    "sent to a process": lambda tensor: ForkingPickler.dumps(tensor),
}

NO_MOVES: dict[str, Callable[[Tensor], object]] = {
    "pickled": lambda tensor: pickle.dumps(tensor),
    "saved": lambda tensor: torch.save(tensor, io.BytesIO()),
    "copied": lambda tensor: tensor.clone().share_memory_(),
    "another value": lambda tensor: tensor.fill_(1),
}


def _lent() -> tuple[Tensor, LentViews]:
    buffer = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    return buffer, LentViews(LAYOUT, buffer)


def _where(buffer: Tensor, tensors: dict[str, Tensor]) -> dict[str, int]:
    return {n: t.data_ptr() - buffer.data_ptr() for n, t in tensors.items() if t.numel()}


@pytest.mark.parametrize("by", ["parameter", "alias"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ["w", "half", "flag", "complex"])
def test_what_was_moved_is_made_again(name: str, move: str, by: str) -> None:
    buffer, lent = _lent()
    first = lent.tensors()
    places = _where(buffer, first)
    parameter = nn.Parameter(torch.zeros_like(first[name]), requires_grad=False)
    parameter.data = first[name]
    alias = parameter.detach()
    parameter.data = torch.zeros_like(first[name])  # another version is in service by now
    MOVES[move](parameter.requires_grad_(False) if by == "parameter" else alias)
    again = lent.tensors()
    assert (again is first) == (by == "parameter")
    assert _where(buffer, again) == places
    for entry in LAYOUT.entries:
        assert again[entry.name].shape == entry.shape and again[entry.name].dtype is entry.dtype
    buffer.fill_(1)
    assert again[name].view(-1)[:1].view(torch.uint8)[0] == 1
    assert lent.tensors() is again


@pytest.mark.parametrize("what", NO_MOVES)
def test_what_was_not_moved_is_lent_again(what: str) -> None:
    _, lent = _lent()
    first = lent.tensors()
    for _ in range(3):
        for tensor in first.values():
            if tensor.numel():
                NO_MOVES[what](tensor)
        assert lent.tensors() is first


def test_tensors_outlive_what_lent_them() -> None:
    buffer, lent = _lent()
    tensor = lent.tensors()["w"].fill_(3.0)
    del buffer, lent
    assert tensor.eq(3.0).all()
