from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from aiosync.errors import LayoutMismatchError
from aiosync.weights.flatten import optional_names
from tests.weights.models import (
    APPLY,
    Tied,
    awkward,
    everything,
    mlp,
    shaken,
    snapshot,
)


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("inplace", [True, False])
def test_a_module_on_meta_comes_to_life(inplace: bool) -> None:
    model, source = on_meta(mlp), shaken(mlp())
    weight: Any = model[0].weight
    mean = model[1].running_mean
    weight.tag = "mine"
    APPLY(model, source, inplace)
    assert everything(model) == everything(source)
    assert model[0].weight is weight
    assert model[1].running_mean is mean
    assert weight.tag == "mine"
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert model(torch.ones(2, 3)).shape == (2, 2)
    assert weight.data_ptr() != source[0].weight.data_ptr()
    APPLY(model, shaken(source), inplace)
    assert everything(model) == everything(source)


def test_ties_on_meta_stay_tied() -> None:
    model, source = on_meta(Tied), Tied()
    APPLY(model, source)
    assert model.head.weight is model.embed.weight
    assert everything(model) == everything(source)


def test_a_tie_on_meta_that_something_refers_to_weakly_stays_tied() -> None:
    model, source = on_meta(Tied), Tied()
    watcher = weakref.ref(model.head.weight)
    APPLY(model, source)
    assert watcher() is not model.head.weight
    assert model.head.weight is model.embed.weight


def test_an_lstm_on_meta_comes_to_life() -> None:
    model, source = on_meta(lambda: nn.LSTM(2, 3)), nn.LSTM(2, 3)
    APPLY(model, source)
    x = torch.randn(4, 2)
    assert torch.equal(model(x)[0], source(x)[0])


def test_meta_in_dicts_and_tensordicts() -> None:
    source = mlp()
    for destination in (
        on_meta(mlp).state_dict(),
        to_nested_meta(mlp),
        TensorDict.from_module(on_meta(mlp)),
        TensorDict.from_module(on_meta(mlp)).lock_(),
    ):
        APPLY(destination, source)
        assert snapshot(destination) == snapshot(source)


def to_nested_meta(make: Any) -> dict[str, Any]:
    nested: dict[str, Any] = TensorDict.from_module(on_meta(make)).to_dict()
    return nested


def test_a_non_persistent_buffer_on_meta_has_to_come_from_somewhere() -> None:
    model = on_meta(awkward)
    assert "mask" not in optional_names(model)
    with pytest.raises(LayoutMismatchError) as caught:
        APPLY(model, awkward())
    assert caught.value.missing == ("mask",)
    assert model.mask.is_meta
    assert model.scale.is_meta
    APPLY(model, TensorDict.from_module(awkward()))
    assert model.mask.tolist() == [0.0, 1.0, 2.0, 3.0]
