from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError, UnsupportedTensorError
from aiosync.weights.flatten import named_tensors, optional_names
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy, get_strategy, to_tensordict
from aiosync.weights.target import receiver_tensors
from tests.weights.models import (
    APPLY,
    FORMATS,
    Adapter,
    Forwarding,
    awkward,
    everything,
    mlp,
    snapshot,
)


def test_names_are_the_same_in_every_form() -> None:
    model = awkward()
    expected = snapshot(model)
    assert {"body.1.running_mean", "tied.head.weight", "scale", "nothing", "flags"} <= set(expected)
    assert "mask" not in expected
    forms: list[Any] = [
        model.state_dict(),
        dict(model.state_dict()),
        to_tensordict(model),
        named_tensors(model),
        to_tensordict(named_tensors(model)),
        named_tensors(to_tensordict(model)),
        to_tensordict(model).to_dict(),
        TensorDictParams(to_tensordict(mlp())),
    ]
    for form in forms[:-1]:
        assert snapshot(form) == expected
    assert snapshot(forms[-1]).keys() == snapshot(mlp()).keys()


def test_from_module_adds_non_persistent_buffers_and_lacks_extra_state() -> None:
    model = awkward()
    theirs = set(named_tensors(TensorDict.from_module(model)))
    ours = {name for name in named_tensors(model) if "__extra_state__" not in name}
    assert theirs - ours == {"mask"}
    assert ours <= theirs
    assert optional_names(model) == {"mask", "counting.__extra_state__"}
    assert optional_names(model.state_dict()) == frozenset()


def test_nested_flat_and_mixed_dicts() -> None:
    w, b = torch.ones(2), torch.zeros(1)
    for form in (
        {"a.b.w": w, "a.c": b},
        {"a": {"b": {"w": w}, "c": b}},
        {"a.b": {"w": w}, "a": {"c": b}},
        OrderedDict({"a": TensorDict({"b": {"w": w}, "c": b})}),
    ):
        assert named_tensors(form).keys() == {"a.b.w", "a.c"}


def test_parameters_held_in_a_tensordict_inside_a_module() -> None:
    module: Any = nn.Module()
    module.held = TensorDictParams(TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(1)}}))
    assert list(named_tensors(module)) == ["held.a", "held.b.c"]
    held = module.held["a"]
    APPLY(module, {"held": {"a": torch.ones(2), "b.c": torch.ones(1)}})
    assert module.held["a"] is held
    assert module.held["a"].tolist() == [1.0, 1.0]


def test_tensors_are_detached_and_share_memory() -> None:
    model = mlp()
    for name, tensor in named_tensors(model).items():
        assert not tensor.requires_grad
        assert type(tensor) is Tensor
        assert tensor.data_ptr() == receiver_tensors(model)[name].data_ptr()
    assert receiver_tensors(model)["0.weight"] is model[0].weight


def test_a_compiled_model_has_plain_names() -> None:
    model = mlp()
    compiled: Any = torch.compile(nn.Sequential(model), backend="eager")
    assert list(named_tensors(compiled)) == [f"0.{name}" for name in named_tensors(model)]
    assert list(named_tensors(compiled.state_dict())) == list(named_tensors(compiled))
    APPLY(compiled, nn.Sequential(mlp()))


@pytest.mark.parametrize(
    "source",
    [
        {"a": torch.ones(1), 3: torch.ones(1)},
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        3,
        [],
    ],
)
def test_sources_that_make_no_sense(source: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        named_tensors(source)


def test_a_name_below_a_tensor_has_no_tensordict() -> None:
    one = torch.ones(1)
    for source in ({"a": one, "a.b": one}, {"a.b": one, "a": one}):
        with pytest.raises(InvalidArgumentError, match="'a"):
            to_tensordict(source)


@pytest.mark.parametrize("value", ["text", 3, None, nn.Linear(1, 1)])
def test_entries_that_are_no_tensors(value: Any) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"'a\.b'"):
        named_tensors({"a": {"b": value}})


def test_senders_need_values() -> None:
    with torch.device("meta"):
        model = mlp()
    for source in (model, model.state_dict(), TensorDict.from_module(model)):
        with pytest.raises(UnsupportedTensorError, match="meta"):
            named_tensors(source)
    with pytest.raises(UnsupportedTensorError, match="lazy"):
        named_tensors(nn.LazyLinear(2))
    assert Layout.of(receiver_tensors(model)).signature == Layout.of(named_tensors(mlp())).signature


def test_a_strategy_of_ones_own_extracts_first() -> None:
    class Prefixed(WeightStrategy):
        def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Tensor]:
            return {"policy": super().extract_weights(source)}

    assert "policy.0.weight" in named_tensors(mlp(), strategy=Prefixed())


@pytest.mark.parametrize("name", FORMATS)
def test_adapters_are_sent_merged_and_the_live_model_is_not_touched(name: str) -> None:
    model = Adapter()
    before = everything(model)
    weights = get_strategy(name).extract_weights(model)
    assert everything(model) == before
    receiver = nn.Linear(3, 3)
    APPLY(receiver, weights)
    assert torch.equal(receiver.weight, model.base.weight + 2)
    assert torch.equal(receiver.bias, model.base.bias)


def test_adapters_inside_other_modules_keep_their_place() -> None:
    plain = {"module.weight", "module.bias"}
    policy = TensorDictModule(Adapter(), in_keys=["x"], out_keys=["y"])
    assert named_tensors(policy).keys() == plain
    assert named_tensors(Forwarding(Adapter())).keys() == plain
    # PEFT's outer model: all of it goes, and so does its part of the name.
    peft = Forwarding(Adapter(), name="base_model")
    assert named_tensors(peft).keys() == {"weight", "bias"}
    assert named_tensors(Forwarding(peft)).keys() == plain
    assert "base.weight" in receiver_tensors(Adapter())
