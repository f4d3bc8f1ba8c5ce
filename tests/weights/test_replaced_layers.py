"""Whatever is done to a module's tensors and submodules, its structure tells that it was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aiosync.weights.walk import Structure

REGISTRIES = ["_parameters", "_buffers", "_modules"]


def _module(draw: Any, depth: int) -> nn.Module:
    """A module of up to two parameters, buffers and submodules."""
    module = nn.Module()
    for name in "ab"[: draw(st.integers(0, 2))]:
        module.register_parameter(name, nn.Parameter(torch.zeros(2)))
    for name in "st"[: draw(st.integers(0, 2))]:
        module.register_buffer(name, torch.zeros(2), persistent=draw(st.booleans()))
    for name in "xy"[: draw(st.integers(0, 2)) if depth else 0]:
        module.add_module(name, _module(draw, depth - 1))
    return module


@st.composite
def modules(draw: Any) -> nn.Module:
    return _module(draw, 2)


def _seen(module: nn.Module) -> tuple[object, ...]:
    """All that a binding could find. Tensors go by their names, so their order is nothing."""
    return (
        {(name, id(part)) for name, part in module.named_modules(remove_duplicate=False)},
        {(name, id(tensor)) for name, tensor in module.named_parameters(remove_duplicate=False)},
        {(name, id(tensor)) for name, tensor in module.named_buffers(remove_duplicate=False)},
        {*module.state_dict()},
    )


def _change(module: nn.Module, draw: Any) -> None:
    """Move, rename, remove, replace or hide something."""
    part = draw(st.sampled_from([*module.modules()]))
    kind = draw(st.sampled_from(REGISTRIES))
    registry = part.__dict__[kind]
    if not registry:
        return
    name = draw(st.sampled_from([*registry]))
    what = draw(st.sampled_from(["move", "rename", "remove", "replace", "hide", "copy the registry"]))
    if what == "copy the registry":
        part.__dict__[kind] = dict(registry)
    elif what == "hide":
        if kind == "_buffers":
            part._non_persistent_buffers_set ^= {name}
    elif what == "replace":
        registry[name] = _module(draw, 0) if kind == "_modules" else nn.Parameter(torch.zeros(2))
    else:
        found = registry.pop(name)
        if what == "rename":
            registry["c"] = found
        elif what == "move":
            inside = [*found.modules()] if kind == "_modules" else []  # not into itself
            others = [other for other in module.modules() if other not in inside]
            other = draw(st.sampled_from(others)).__dict__[kind]
            if draw(st.booleans()):  # the first of it
                after = dict(other)
                other.clear()
                other[name] = found
                other.update(after)
            else:
                other[name] = found


@given(modules(), st.data())
def test_nothing_escapes_it(module: nn.Module, drawn: st.DataObject) -> None:
    structure = Structure(module)
    assert structure.unchanged()
    before = _seen(module)
    for _ in range(drawn.draw(st.integers(1, 2))):
        _change(module, drawn.draw)
    assert not structure.unchanged() or _seen(module) == before


def test_a_layer_that_moves_up_keeps_its_place_in_the_order() -> None:
    module, inner = nn.Module(), nn.Module()
    module.x = inner
    inner.y = nn.Linear(2, 2)
    structure = Structure(module)
    linear = inner.y
    del inner.y
    module.y = linear
    assert not structure.unchanged()


def test_the_module_is_not_kept_alive() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    structure = Structure(module)
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None
    assert structure.comparable
