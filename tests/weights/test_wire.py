from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiosync.errors import ProtocolError
from aiosync.weights.layout import Layout

junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["entries", "aliases", "nbytes", "x"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(junk)
def test_from_wire_refuses_junk(obj: Any) -> None:
    with pytest.raises(ProtocolError):
        Layout.from_wire(obj)


@given(st.data())
@settings(max_examples=300)
def test_from_wire_survives_mutations(data: st.DataObject) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.int8), "c": torch.empty(0, 2)}
    tensors["tied"] = tensors["a"]
    wire = Layout.of(tensors).to_wire()
    node: Any = wire
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        node[key] = data.draw(junk)
        break
    try:
        layout = Layout.from_wire(wire)
    except ProtocolError:
        return
    # What it lets through must be usable.
    assert layout.to_wire() == wire
    if layout.nbytes < 1 << 20:
        layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))


def wire_of(*rows: list[Any], aliases: list[Any] | None = None, nbytes: int = 64) -> dict[str, Any]:
    return {"entries": list(rows), "aliases": aliases or [], "nbytes": nbytes}


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (None, "Expected `object`"),
        ({"entries": []}, "missing required field"),
        (wire_of(["a", "float33", [1], 0, 4]), "unknown dtype"),
        (wire_of(["a", "qint8", [1], 0, 1]), "unknown dtype"),
        (wire_of(["a", "float32", [-1], 0, 4]), "Expected `int` >= 0"),
        (wire_of(["a", "float32", [True], 0, 4]), "Expected `int`, got `bool`"),
        (wire_of(["a", "float32", [1.0], 0, 4]), "Expected `int`, got `float`"),
        (wire_of(["a", "float32", [1 << 60], 0, 1 << 62]), "Expected `int` <="),
        (wire_of(["a", "float32", [1 << 30, 1 << 30], 0, 1 << 57]), "past"),
        (wire_of(["a", "float32", [0, 1 << 40, 1 << 40], 0, 0]), "past"),
        (wire_of(["a", "float32", [1] * 65, 0, 4]), "length <= 64"),
        (wire_of(["a", "float32", [1], 64, 4], nbytes=128), "packed"),
        (wire_of(["a", "float32", [1], 1, 4]), "packed"),
        (wire_of(["a", "float32", [1], -64, 4]), "Expected `int` >= 0"),
        (wire_of(["a", "float32", [1], 0, 8]), "packed"),
        (wire_of(["a", "float32", [1], 0, 4], ["b", "int8", [1], 0, 1], nbytes=128), "packed"),
        (wire_of(["a", "float32", [1], 0, 4], nbytes=128), "packed"),
        (wire_of(["a", "float32", [1], 0, 4], ["a", "int8", [1], 64, 1], nbytes=128), "twice"),
        (wire_of(["", "float32", [1], 0, 4]), "length >= 1"),
        (wire_of(["x" * 5000, "float32", [1], 0, 4]), "length <= 4096"),
        (wire_of([7, "float32", [1], 0, 4]), "Expected `str`, got `int`"),
        (wire_of(["a", "float32", [1], 0]), "length 5"),
        (wire_of(["a", "float32", [1], 0, 4], aliases=[["b", "c"]]), "that is not an entry"),
        (wire_of(["a", "float32", [1], 0, 4], aliases=[["a", "a"]]), "twice"),
        (wire_of(["a", "float32", [1], 0, 4], aliases=[["b", "a"], ["c", "b"]]), "that is not an entry"),
        (wire_of(nbytes=0), "packed"),
    ],
)
def test_from_wire_says_what_is_wrong(wire: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Layout.from_wire(wire)


def test_from_wire_refuses_too_many_entries() -> None:
    wire = Layout.of({"a": torch.ones(1), "b": torch.ones(1)}).to_wire()
    assert len(Layout.from_wire(wire, max_entries=2)) == 2
    with pytest.raises(ProtocolError, match="more than 1"):
        Layout.from_wire(wire, max_entries=1)


def test_odd_names_still_have_a_signature() -> None:
    wire = wire_of(["\ud800", "float32", [1], 0, 4])
    assert Layout.from_wire(wire).signature


@pytest.mark.parametrize("part", ["entries", "aliases"])
def test_too_many_rows_are_refused_before_they_are_read(part: str) -> None:
    wire: dict[str, Any] = {"entries": [], "aliases": [], "nbytes": 64}
    wire[part] = [object()] * 1_000_001  # reading the first would be refused with another text
    with pytest.raises(ProtocolError, match="length <= 1000000"):
        Layout.from_wire(wire)
