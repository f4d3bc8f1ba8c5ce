from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError, LayoutMismatchError
from aiosync.weights.flatten import named_tensors
from aiosync.weights.strategy import WeightStrategy, get_strategy, to_tensordict
from aiosync.weights.target import receiver_tensors
from tests.weights.models import (
    APPLY,
    DTYPES,
    FORMATS,
    Counting,
    Tied,
    awkward,
    everything,
    filled,
    mlp,
    shaken,
    snapshot,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def test_strategies_by_name() -> None:
    for name in FORMATS:
        strategy = get_strategy(name)
        assert strategy.extract_as == name
        assert get_strategy(strategy) is strategy
    for wrong in ("pickle", "", None, 3):
        with pytest.raises(InvalidArgumentError, match="strategy"):
            get_strategy(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="strategy"):
            WeightStrategy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_extract_gives_the_format_from_every_source(name: str) -> None:
    strategy = get_strategy(name)
    model = awkward()
    for source in (model, model.state_dict(), to_tensordict(model)):
        weights = strategy.extract_weights(source)
        if name == "tensordict":
            assert isinstance(weights, TensorDictBase)
            assert weights["counting", "__extra_state__", "steps"] == 3
        else:
            assert isinstance(weights, dict)
            assert all(isinstance(value, Tensor) for value in weights.values())
        assert snapshot(weights) == snapshot(model)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_apply_to_a_module_changes_values_and_nothing_else(name: str, inplace: bool) -> None:
    source, model = shaken(awkward()), awkward()
    weights = get_strategy(name).extract_weights(source)
    given = copy.deepcopy(snapshot(weights))
    objects = {n: (id(t), t.requires_grad) for n, t in receiver_tensors(model).items()}
    keys = list(model.state_dict())
    for _ in range(2):  # idempotent
        APPLY(model, weights, inplace)
        assert snapshot(model) == snapshot(source) == given == snapshot(weights)
    assert {n: (id(t), t.requires_grad) for n, t in receiver_tensors(model).items()} == objects
    assert list(model.state_dict()) == keys
    assert model.tied.head.weight is model.tied.embed.weight
    assert model.mask.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.counting.state["steps"] == 9
    mine = {t.untyped_storage().data_ptr() for t in receiver_tensors(model).values() if t.numel()}
    theirs = {t.untyped_storage().data_ptr() for t in named_tensors(weights).values() if t.numel()}
    assert not mine & theirs


@pytest.mark.parametrize("inplace", [True, False])
def test_inplace_keeps_the_memory_and_the_other_way_leaves_it(inplace: bool) -> None:
    model = mlp()
    view, before = model[0].weight.detach(), model[0].weight.detach().clone()
    APPLY(model, shaken(copy.deepcopy(model)), inplace)
    assert torch.equal(view, model[0].weight) is inplace
    assert torch.equal(view, before) is not inplace


@pytest.mark.parametrize("inplace", [True, False])
def test_apply_to_tensordicts_and_dicts(inplace: bool) -> None:
    source = shaken(awkward())
    flat = {name: t.clone() for name, t in named_tensors(awkward()).items()}
    destinations: list[Any] = [
        flat,
        to_tensordict(flat).clone(),
        to_tensordict(flat).clone().lock_(),
        to_tensordict(flat).clone().to_dict(),
        TensorDictParams(to_tensordict(mlp()).clone()),
    ]
    for destination in destinations[:-1]:
        for weights in (source, to_tensordict(source), source.state_dict(), named_tensors(source)):
            APPLY(destination, weights, inplace)
            assert snapshot(destination) == snapshot(source)
    other = shaken(mlp())
    APPLY(destinations[-1], other, inplace)
    assert snapshot(destinations[-1]) == snapshot(other)


def test_numbers_in_a_dict_stay_numbers() -> None:
    destination: dict[str, Any] = {"net": {"__extra_state__": {"steps": 1, "on": False}}}
    APPLY(destination, {"net.__extra_state__": {"steps": 4, "on": True}})
    assert destination == {"net": {"__extra_state__": {"steps": 4, "on": True}}}
    assert type(destination["net"]["__extra_state__"]["on"]) is bool


def test_torchs_own_extra_state_key() -> None:
    source = Counting(5)
    model: Any = nn.Sequential(Counting(1))
    destination = model.state_dict()
    APPLY(destination, nn.Sequential(source).state_dict())
    assert destination["0._extra_state"]["steps"] == 5
    assert set(destination) == {"0.weight", "0._extra_state"}
    APPLY(model, destination)
    assert model[0].state["steps"] == 5


def test_destinations_without_extra_state_do_without() -> None:
    model = Counting(1)
    td = TensorDict.from_module(model)
    APPLY(td, Counting(5))
    assert model.weight.tolist() == [5.0, 5.0]
    assert model.state["steps"] == 1


def test_from_module_carries_non_persistent_buffers_over() -> None:
    source, model = awkward(), awkward()
    source.mask += 10
    APPLY(model, source)
    assert model.mask[0] == 0
    APPLY(model, TensorDict.from_module(source))
    assert model.mask[0] == 10


def test_none_is_nothing_and_nonsense_is_refused() -> None:
    model = mlp()
    nonsense: Any = 3
    before = everything(model)
    APPLY(model, None)
    assert everything(model) == before
    with pytest.raises(InvalidArgumentError, match="int"):
        APPLY(model, nonsense)
    with pytest.raises(InvalidArgumentError, match="not to int"):
        APPLY(nonsense, model)
    APPLY(nn.ReLU(), nn.ReLU())
    APPLY(nn.ReLU(), {})
    APPLY({}, TensorDict())


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    ("change", "attribute", "name"),
    [
        (lambda w: w.pop("scale"), "missing", "scale"),
        (lambda w: w.update(more=torch.ones(1)), "unexpected", "more"),
        (lambda w: w.update(scale=torch.ones(1)), "differing", "scale"),
        (lambda w: w.update(flags=torch.ones(2)), "differing", "flags"),
        (lambda w: w.update({"body.__extra_state__": torch.ones(2)}), "unexpected", "body.__extra"),
        (lambda w: w.update({"tied.head.weight": torch.ones(5, 3)}), "differing", "tied.head"),
    ],
)
def test_a_mismatch_leaves_the_destination_whole(
    change: Any, attribute: str, name: str, inplace: bool
) -> None:
    model = awkward()
    before, state = everything(model), copy.deepcopy(model.counting.state["stats"])
    weights = dict(named_tensors(shaken(awkward())))
    change(weights)
    with pytest.raises(LayoutMismatchError) as caught:
        APPLY(model, weights, inplace)
    assert any(n.startswith(name) for n in getattr(caught.value, attribute))
    assert isinstance(caught.value, KeyError)
    assert everything(model) == before
    assert model.counting.state["stats"].keys() == state.keys()
    assert model.counting.sets == 0


def test_not_strict_leaves_the_rest_alone() -> None:
    model = awkward()
    before = everything(model)
    APPLY(model, {"scale": torch.tensor(8.0), "counting.__extra_state__.steps": 8}, strict=False)
    after = everything(model)
    assert {name for name in after if after[name] != before[name]} == {"scale"}
    assert model.counting.state["steps"] == 8
    assert model.counting.state["rate"] == 1.5
    assert model.counting.state["stats"]["mean"].tolist() == [3.0] * 3
    with pytest.raises(LayoutMismatchError):
        APPLY(model, {"scales": torch.tensor(8.0)}, strict=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [True, False])
def test_every_dtype(dtype: torch.dtype, inplace: bool) -> None:
    def holder(seed: int) -> Any:
        module: Any = nn.Module()
        module.register_buffer("b", filled((3, 2), dtype, seed))
        module.register_buffer("s", filled((), dtype, seed + 1))
        module.p = nn.Parameter(filled((2,), dtype, seed + 2), requires_grad=False)
        return module

    source, model = holder(0), holder(10)
    APPLY(model, source, inplace)
    assert everything(model) == everything(source)
    assert model.b.dtype is dtype


def test_floats_convert_and_nan_survives() -> None:
    source, model = nn.Linear(2, 1).double(), nn.Linear(2, 1).bfloat16()
    with torch.no_grad():
        source.weight.fill_(float("nan"))
        source.bias.fill_(0.5)
    APPLY(model, source)
    assert model.weight.dtype is torch.bfloat16
    assert model.weight.isnan().all()
    assert model.bias.item() == 0.5


def test_ties_that_agree_are_fine_and_stay_tied() -> None:
    model = Tied()
    weights = {name: t.clone() + 1 for name, t in named_tensors(Tied()).items()}
    for inplace in (True, False):
        APPLY(model, weights, inplace)
        assert model.head.weight is model.embed.weight
    weights["head.weight"] = weights["head.weight"] + 1
    with pytest.raises(LayoutMismatchError, match="separate values there"):
        APPLY(model, weights)
    APPLY(Tied(tie=False), weights)


def test_memory_that_is_shared_by_two_parameters_stays_shared() -> None:
    model: Any = nn.Module()
    model.a = nn.Parameter(torch.zeros(2))
    model.b = nn.Parameter(torch.zeros(2))
    model.b.data = model.a.data
    one = torch.ones(2)
    APPLY(model, {"a": one, "b": one}, inplace=False)
    assert model.a.data_ptr() == model.b.data_ptr() != one.data_ptr()


def test_weights_that_live_in_the_destination() -> None:
    model: Any = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    APPLY(model, {"a": model.b, "b": model.a})
    assert (model.a.tolist(), model.b.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    APPLY(model, model)
    assert (model.a.tolist(), model.b.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_expanded_buffers_get_memory_of_their_own() -> None:
    model: Any = nn.Module()
    model.register_buffer("wide", torch.zeros(1).expand(3))
    buffer = model.wide
    APPLY(model, {"wide": torch.arange(3.0)})
    assert model.wide.tolist() == [0.0, 1.0, 2.0]
    assert model.wide is buffer


def test_strides_of_the_destination_are_kept() -> None:
    model: Any = nn.Conv2d(4, 4, 3)
    model.to(memory_format=torch.channels_last)
    stride = model.weight.stride()
    for inplace in (True, False):
        APPLY(model, nn.Conv2d(4, 4, 3), inplace)
        assert model.weight.stride() == stride


def test_applying_inside_and_to_inference_mode() -> None:
    with torch.inference_mode():
        born: Any = nn.Linear(2, 2)
        normal_source: Any = nn.Linear(2, 2)
    normal: Any = nn.Linear(2, 2)
    APPLY(born, normal)
    assert everything(born) == everything(normal)
    with torch.inference_mode():
        APPLY(normal, normal_source)
        APPLY(born, normal)
    assert everything(born) == everything(normal_source)
    assert normal.weight.requires_grad


def test_gradients_and_optimizers_go_on() -> None:
    model: Any = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inplace in (True, False):
        APPLY(model, nn.Linear(2, 1), inplace)
        before = model.weight.detach().clone()
        model(torch.ones(2)).backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)
