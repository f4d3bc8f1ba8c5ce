"""Models with adapters: the same lines with torchrl's strategy and ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrl.weight_update
from tensordict import TensorDictBase

import aiosync
from tests.weights.peft_models import KINDS, base_model, generated, train, with_adapters

# PEFT uses an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXPERIMENTAL = pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")


@EXPERIMENTAL
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_strategy_merges(kind: str) -> None:
    model = with_adapters(kind)
    train(model)
    found: list[dict[str, Any]] = []
    for library in (torchrl.weight_update, aiosync):
        weights = library.WeightStrategy("state_dict").extract_weights(model)
        worker = base_model(kind, seed=1)
        worker.load_state_dict(weights)
        assert generated(worker)[0] == generated(model)[0]
        found.append(weights)
    theirs, ours = found
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensordict_strategy_of_torchrl_is_as_is(kind: str) -> None:
    model = with_adapters(kind)
    train(model)
    theirs = torchrl.weight_update.WeightStrategy("tensordict").extract_weights(model)
    ours = aiosync.WeightStrategy("tensordict", peft="as_is").extract_weights(model)
    assert isinstance(theirs, TensorDictBase)
    assert isinstance(ours, TensorDictBase)
    # torchrl sends non-persistent buffers too.
    mine, transient = set(ours.keys(True, True)), set(dict(model.named_buffers()))
    assert {".".join(key) for key in theirs.keys(True, True)} - {".".join(key) for key in mine} <= transient
    assert all(torch.equal(ours[key], theirs[key].data) for key in mine)
