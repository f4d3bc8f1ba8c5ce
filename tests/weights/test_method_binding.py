"""Commits by a method of the model's owner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aiosync.weights.binding import MethodBinding, Staged
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy


class _Policy(nn.Module):
    """Has buffers that a state_dict has and has not."""

    counts: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_buffer("counts", torch.zeros(2))
        self.register_buffer("frequencies", torch.ones(3), persistent=False)


def test_a_partial_update_of_a_model_with_a_buffer_that_is_not_persistent() -> None:
    model, sent = _Policy(), _Policy()
    views = {name: value.clone() for name, value in sent.state_dict().items()}
    binding = MethodBinding(model.load_state_dict, model, Layout.of(views), WeightStrategy(), nested=False)
    staged = Staged(views, frozenset(), frozenset())
    with binding.committing(staged):
        pass
    model.counts += 3  # the model's own
    views["head.weight"].fill_(7.0)
    with binding.committing(staged, frozenset({"head.weight", "head.bias"})):
        pass
    assert model.head.weight.unique().tolist() == [7]
    assert torch.equal(model.body.weight, sent.body.weight)
    assert model.counts.tolist() == [3, 3]
    assert model.frequencies.tolist() == [1, 1, 1]
