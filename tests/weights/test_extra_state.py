from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from aiosync.errors import UnsupportedTensorError
from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import named_tensors
from aiosync.weights.strategy import get_strategy
from tests.weights.models import (
    APPLY,
    FORMATS,
    Counting,
    LazyNorm,
    Refusing,
    everything,
    snapshot,
)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_come_back_as_the_receivers_types(name: str) -> None:
    model = Counting(1)
    source = Counting(6)
    APPLY(model, get_strategy(name).extract_weights(source))
    state = model.state
    assert (state["steps"], state["rate"], state["on"]) == (6, 3.0, True)
    assert [type(state[k]) for k in ("steps", "rate", "on")] == [int, float, bool]
    assert state["stats"].keys() == {"mean", "a.b"}
    assert state["stats"]["mean"].tolist() == [6.0] * 3
    assert state["stats"]["mean"].data_ptr() != source.state["stats"]["mean"].data_ptr()


def test_a_number_is_not_squeezed_into_a_type_that_cannot_hold_it() -> None:
    model = Counting(1)
    APPLY(model, {"weight": torch.ones(2), "__extra_state__": {"steps": 2.5, "on": 3, "rate": 2}})
    assert (model.state["steps"], model.state["on"], model.state["rate"]) == (2.5, 3, 2.0)
    assert type(model.state["rate"]) is float


def test_a_receiver_without_state_of_its_own_gets_tensors() -> None:
    source = nn.Sequential(LazyNorm(torch.ones(2)))
    model: Any = nn.Sequential(LazyNorm())
    APPLY(model, source)
    assert model[0].mean.tolist() == [1.0, 1.0]
    assert model[0].mean is not source[0].mean
    # A sender that has not started yet takes nothing away.
    APPLY(model, nn.Sequential(LazyNorm()))
    assert model[0].mean is not None


@pytest.mark.parametrize("state", [torch.ones(3), 7, 2.5, True, TensorDict({"a": torch.ones(2)})])
def test_lone_and_tensordict_states(state: Any) -> None:
    model, source = Counting(), Counting()
    source.state = state
    model.state = type(state)(0) if not isinstance(state, Tensor | TensorDictBase) else state * 0
    APPLY(model, source)
    assert type(model.state) is type(state)
    assert snapshot(model) == snapshot(source)


def test_none_does_not_travel_and_stays_where_it_is() -> None:
    model, source = Counting(), Counting()
    model.state, source.state = {"a": None, "b": 1}, {"a": None, "b": 2}
    APPLY(model, source)
    assert model.state == {"a": None, "b": 2}
    model.state = source.state = None
    APPLY(model, source)
    assert model.state is None


@pytest.mark.parametrize("bad", ["text", 2**63, object(), [1, 2], {3: torch.ones(1)}])
def test_state_that_cannot_travel(bad: Any) -> None:
    model: Any = nn.Sequential(Counting())
    model[0].state = {"x": bad}
    with pytest.raises(UnsupportedTensorError, match=r"0\.__extra_state__\.x"):
        named_tensors(model)


def test_a_state_that_is_refused_rolls_everything_back() -> None:
    model: Any = nn.Sequential(Counting(1), Refusing(2))
    source = nn.Sequential(Counting(8), Refusing(13))
    before = everything(model)
    with pytest.raises(RuntimeError, match="unlucky"):
        APPLY(model, source)
    assert everything(model) == before
    assert (model[0].state["steps"], model[1].state["steps"]) == (1, 2)


def test_applying_extra_state_rolls_back_when_the_body_fails() -> None:
    model = Counting(1)
    values = named_tensors(Counting(8))
    with pytest.raises(KeyError), applying_extra_state(model, values):
        assert model.state["steps"] == 8
        raise KeyError("commit")
    assert model.state["steps"] == 1
    with applying_extra_state(model, values):
        pass
    assert model.state["steps"] == 8


def test_torchrls_vecnorm() -> None:
    transforms = pytest.importorskip("torchrl.envs.transforms")
    td = TensorDict({"observation": torch.randn(3), "next": {"observation": torch.randn(3)}})
    make = transforms.VecNormV2
    source: Any = nn.Sequential(make(in_keys=["observation"]))
    model: Any = nn.Sequential(make(in_keys=["observation"]))
    for norm in (source[0], model[0]):
        norm._step(td, td["next"].clone())
    source[0]._step(td, TensorDict({"observation": torch.ones(3) * 5}))
    APPLY(model, source)
    theirs, mine = source[0].get_extra_state(), model[0].get_extra_state()
    assert theirs.keys() == mine.keys()
    for key, value in theirs.items():
        assert torch.equal(value, mine[key])
        assert value.data_ptr() != mine[key].data_ptr()
