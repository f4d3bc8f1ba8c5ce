from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from aiosync.errors import (
    InvalidArgumentError,
    LayoutMismatchError,
    UnsupportedTensorError,
)
from aiosync.weights.flatten import named_tensors, optional_names
from aiosync.weights.layout import ALIGNMENT, Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.tensors import check_tied, to_bytes
from tests.weights.models import DTYPES, Counting, Tied, awkward, bits, filled

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
names = st.lists(st.text("ab_0é", min_size=1, max_size=4), min_size=1, max_size=3).map(".".join)
models = st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12).map(
    lambda specs: {name: filled(*spec, seed=i) for i, (name, spec) in enumerate(specs.items())}
)


def buffer_for(layout: Layout) -> Tensor:
    return torch.zeros(layout.nbytes, dtype=torch.uint8)


@given(models)
def test_bytes_survive_the_buffer(tensors: dict[str, Tensor]) -> None:
    layout = Layout.of(tensors)
    buffer = buffer_for(layout)
    views = layout.views(buffer)
    assert list(views) == list(tensors) == list(layout.names)
    for name, tensor in layout.fit(tensors) if tensors else []:
        views[name].copy_(tensor)
    for name, tensor in tensors.items():
        view = views[name]
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert view.is_contiguous()
        assert bits(view) == bits(tensor)
        # Its own bytes of the buffer and no others, so that it is pickled at its own size.
        assert view.untyped_storage().nbytes() == view.nbytes
        if tensor.numel():
            assert view.data_ptr() == buffer.data_ptr() + layout[name].offset


@given(models)
def test_entries_are_aligned_and_apart(tensors: dict[str, Tensor]) -> None:
    layout = Layout.of(tensors)
    end = 0
    for entry in layout:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end
        assert entry.nbytes == math.prod(entry.shape) * entry.dtype.itemsize
        end = entry.offset + entry.nbytes
    assert end <= layout.nbytes
    assert layout.nbytes % ALIGNMENT == 0
    assert layout.nbytes >= ALIGNMENT


@given(models)
def test_wire_and_pickle_round_trip(tensors: dict[str, Tensor]) -> None:
    layout = Layout.of({**tensors, "one": torch.ones(2)})
    for again in (
        Layout.from_wire(layout.to_wire()),
        pickle.loads(pickle.dumps(layout)),
        copy.deepcopy(layout),
    ):
        assert again == layout
        assert hash(again) == hash(layout)
        assert again.signature == layout.signature
        assert again.nbytes == layout.nbytes


def test_an_empty_model_has_a_buffer() -> None:
    layout = Layout.of({})
    assert (len(layout), layout.nbytes, layout.fit({})) == (0, ALIGNMENT, [])
    assert layout.views(buffer_for(layout)) == {}
    assert layout  # a layout is a layout, entries or not
    layout.check_receiver({})


def test_ties_become_aliases_and_leave_the_signature_alone() -> None:
    tied, untied = Layout.of(named_tensors(Tied())), Layout.of(named_tensors(Tied(tie=False)))
    assert dict(tied.aliases) == {"head.weight": "embed.weight"}
    assert tied["head.weight"] is tied["embed.weight"]
    assert (len(tied), len(untied)) == (1, 2)
    assert tied.names == untied.names
    assert tied != untied
    assert tied.signature == untied.signature
    tied.check_receiver(untied)
    untied.check_receiver(tied)
    assert tied.views(buffer_for(tied))["head.weight"].shape == (5, 3)


def test_memory_seen_otherwise_is_no_tie() -> None:
    base = torch.arange(4.0)
    seen = {"a": base, "b": base.view(2, 2), "c": base[:2], "d": base.view(torch.int32)}
    seen |= {"e": base[1:]}
    seen |= {"none": torch.empty(0), "none_too": torch.empty(0)}
    meta = torch.empty(3, device="meta")
    seen |= {"m": meta, "n": meta, "o": torch.empty(3, device="meta")}
    assert dict(Layout.of(seen).aliases) == {"n": "m"}
    assert dict(Layout.of({"a": base, "b": base.view(4)}).aliases) == {"b": "a"}


def test_a_bit_that_is_not_in_the_memory_is_no_tie() -> None:
    """Of a conjugated tensor, and of the imaginary part of one, which is a negated one."""
    w = torch.randn(3, dtype=torch.complex64)
    tensors = {"w": w, "conjugated": w.conj(), "imag": w.imag, "negated": w.conj().imag}
    layout = Layout.of(tensors)
    assert not layout.aliases
    layout.check_receiver({name: tensor.clone() for name, tensor in tensors.items()})
    for tensor in (w.conj(), w.conj().imag):
        assert torch.equal(to_bytes(tensor), to_bytes(tensor.resolve_conj().resolve_neg().clone()))
    receiver = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    WeightStrategy().apply_weights(receiver, tensors)
    assert all(torch.equal(receiver[name], tensor) for name, tensor in tensors.items())


def test_signature_sees_names_shapes_and_dtypes_but_not_the_order() -> None:
    a, b = torch.ones(2), torch.ones(3)
    base = Layout.of({"a": a, "b": b})
    assert Layout.of({"b": b, "a": a}).signature == base.signature
    for other in ({"a": a, "c": b}, {"a": a, "b": torch.ones(1, 3)}, {"a": a, "b": b.double()}):
        assert Layout.of(other).signature != base.signature


def test_cast_narrows_floating_entries_only() -> None:
    tensors = {dtype_name: filled((2,), dtype) for dtype in DTYPES if (dtype_name := str(dtype))}
    tensors["net.__extra_state__.mean"] = torch.ones(2)
    layout = Layout.of(tensors, cast=torch.bfloat16)
    for name, tensor in tensors.items():
        cast = tensor.is_floating_point() and "float4" not in name and "extra" not in name
        assert layout[name].dtype is (torch.bfloat16 if cast else tensor.dtype)
    layout.fit(tensors)
    layout.check_receiver(tensors)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool])
def test_cast_must_be_floating(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match="cast="):
        Layout.of({}, cast=dtype)


def unsupported() -> dict[str, tuple[Any, str]]:
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    return {
        "sparse": (torch.eye(2).to_sparse(), "to_dense"),
        "csr": (torch.eye(2).to_sparse_csr(), "to_dense"),
        "nested": (jagged, "pad it"),
        "lazy": (nn.LazyLinear(2).weight, "forward pass"),
        "number": (3, "not a tensor"),
        "quantised": (quantised, "dequantize"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "csr", "nested", "lazy", "number", "quantised"])
def test_what_has_no_dense_bytes_is_refused(kind: str) -> None:
    tensor, says = unsupported()[kind]
    with pytest.raises(UnsupportedTensorError, match=says) as caught:
        Layout.of({"fine": torch.ones(1), "w": tensor})
    assert caught.value.name == "w"
    with pytest.raises(UnsupportedTensorError):
        Layout.of({"w": torch.ones(2, 2)}).fit({"w": tensor})


def test_views_want_a_proper_buffer() -> None:
    layout = Layout.of({"a": torch.ones(3)})
    good = torch.zeros(4 * ALIGNMENT, dtype=torch.uint8)
    layout.views(good)["a"].fill_(1)
    assert good[:12].view(torch.float32).tolist() == [1.0] * 3
    layout.views(good[ALIGNMENT:])["a"].fill_(2)
    assert good[ALIGNMENT : ALIGNMENT + 12].view(torch.float32).tolist() == [2.0] * 3
    assert good[:12].view(torch.float32).tolist() == [1.0] * 3
    for bad in (good[:10], good[1:], good[::2], good.view(2, -1), good.view(torch.int8)):
        with pytest.raises(InvalidArgumentError, match="uint8 buffer"):
            layout.views(bad)


def test_fit_keeps_the_order_of_the_buffer_and_converts_floats() -> None:
    layout = Layout.of({"a": torch.ones(2), "b": torch.ones(3)})
    given = {"b": torch.ones(3).double(), "a": torch.ones(2).half()}
    assert [(name, t.dtype) for name, t in layout.fit(given)] == [
        ("a", torch.float16),
        ("b", torch.float64),
    ]


def test_fit_lists_everything_at_once() -> None:
    layout = Layout.of(
        {"a": torch.ones(4, 2), "b": torch.ones(1), "c": torch.ones(2), "d": torch.ones(2).int()}
    )
    given = {"a": torch.ones(2, 4), "b": torch.tensor(1.0), "d": torch.ones(2), "x": torch.ones(1)}
    with pytest.raises(LayoutMismatchError) as caught:
        layout.fit(given)
    error = caught.value
    assert (error.missing, error.unexpected) == (("c",), ("x",))
    assert error.differing == {
        "a": ("float32[4, 2]", "float32[2, 4]"),
        "b": ("float32[1]", "float32[]"),
        "d": ("int32[2]", "float32[2]"),
    }
    assert isinstance(error, KeyError)


def test_fit_not_strict_takes_a_subset_and_nothing_else() -> None:
    layout = Layout.of({"a": torch.ones(2), "b": torch.ones(3)})
    assert [name for name, _ in layout.fit({"b": torch.ones(3)}, strict=False)] == ["b"]
    with pytest.raises(InvalidArgumentError, match="got none"):
        layout.fit({}, strict=False)
    for wrong in ({"a": torch.ones(3)}, {"x": torch.ones(2)}):
        with pytest.raises(LayoutMismatchError):
            layout.fit(wrong, strict=False)


def test_fit_of_ties() -> None:
    one = torch.tensor([math.nan, 1.0, -0.0])
    layout = Layout.of({"a": one, "b": one, "c": one})
    equal = {"a": one, "b": one.clone(), "c": one.double()}
    assert [name for name, _ in layout.fit(equal)] == ["a"]
    with pytest.raises(LayoutMismatchError, match="separate values there") as caught:
        layout.fit({"a": one, "b": one, "c": one + 1})
    expected, got = caught.value.differing["c"]
    assert expected == "float32[3], tied to 'a' here"
    assert got.startswith("separate values there (both names were one tensor")
    with pytest.raises(LayoutMismatchError) as caught:
        layout.fit({"a": one})
    assert caught.value.missing == ("b", "c")
    ((name, tensor),) = layout.fit({"c": one + 1}, strict=False)
    assert (name, tensor[1].item()) == ("a", 2.0)
    with pytest.raises(LayoutMismatchError, match="separate values"):
        layout.fit({"b": one, "c": one + 1}, strict=False)


def test_fit_compares_ties_as_they_will_be_sent() -> None:
    one = torch.tensor([1.0])
    layout = Layout.of({"a": one, "b": one}, cast=torch.bfloat16)
    layout.fit({"a": one, "b": one + 1e-6})
    with pytest.raises(LayoutMismatchError):
        layout.fit({"a": one, "b": one + 0.5})


def test_check_tied() -> None:
    one = torch.ones(2)
    check_tied({"a": one, "b": one.clone()}, {"b": "a", "gone": "a"})
    with pytest.raises(LayoutMismatchError):
        check_tied({"a": one, "b": one * 2}, {"b": "a"})


def test_fit_refuses_meta() -> None:
    layout = Layout.of({"a": torch.ones(2)})
    with pytest.raises(UnsupportedTensorError, match="meta"):
        layout.fit({"a": torch.ones(2, device="meta")})


def test_check_receiver_expects_what_the_receiver_has() -> None:
    sent = Layout.of({"a": torch.ones(2), "b": torch.ones(3), "n": torch.ones(1).int()})
    mine = {"a": torch.ones(4), "c": torch.ones(1), "n": torch.ones(1)}
    for other in (mine, Layout.of(mine)):
        with pytest.raises(LayoutMismatchError) as caught:
            sent.check_receiver(other)
        assert (caught.value.missing, caught.value.unexpected) == (("c",), ("b",))
        assert caught.value.differing == {
            "a": ("float32[4]", "float32[2]"),
            "n": ("float32[1]", "int32[1]"),
        }
    half = {"a": torch.ones(2).half(), "b": torch.ones(3, device="meta"), "n": torch.ones(1).int()}
    sent.check_receiver(half)
    with pytest.raises(LayoutMismatchError):
        sent.check_receiver({**half, "more": torch.ones(1)})
    sent.check_receiver({**half, "more": torch.ones(1)}, strict=False)
    sent.check_receiver({**half, "more": torch.ones(1)}, optional={"more"})


def test_extra_state_is_for_the_receiving_module_to_judge() -> None:
    sent = Layout.of({"net.__extra_state__.mean": torch.ones(2)})
    sent.check_receiver({}, optional={"net.__extra_state__"})
    Layout.of({}).check_receiver({"net.__extra_state__.var": torch.ones(1)}, optional={"net.__extra_state__"})
    with pytest.raises(LayoutMismatchError):
        sent.check_receiver({}, optional={"other.__extra_state__"})


def test_a_model_in_any_form_fits_its_own_layout() -> None:
    model = awkward()
    layout = Layout.of(named_tensors(model), optional=optional_names(model))
    td = TensorDict.from_module(model)
    for part in ("flags", "mask"):
        assert part in td.keys()
    layout.fit(named_tensors(model))
    layout.fit(named_tensors(model.state_dict()))
    # from_module knows nothing of extra state, so that form is a subset, with the mask on top.
    layout.fit(named_tensors(td), strict=False)
    assert "mask" not in layout
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain.register_buffer("mask", torch.ones(2), persistent=False)
    layout = Layout.of(named_tensors(plain), optional=optional_names(plain))
    assert len(layout.fit(named_tensors(TensorDict.from_module(plain)))) == len(layout) == 7


def test_an_optional_name_that_was_given_once_may_be_missing_later() -> None:
    layout = Layout.of({"a": torch.ones(2), "mask": torch.ones(2)}, optional={"mask"})
    assert [name for name, _ in layout.fit({"a": torch.zeros(2)})] == ["a"]
    with pytest.raises(LayoutMismatchError):
        layout.fit({"mask": torch.zeros(2)})


def test_subset() -> None:
    layout = Layout.of(named_tensors(Tied()) | {"z": torch.ones(1)})
    assert [e.name for e in layout.subset(["z", "head.weight"])] == ["embed.weight", "z"]
    with pytest.raises(LayoutMismatchError) as caught:
        layout.subset(["z", "nope"])
    assert caught.value.unexpected == ("nope",)


def test_entries_describe_themselves() -> None:
    layout = Layout.of({"w": torch.ones(4, 2), "s": torch.tensor(1, dtype=torch.uint16)})
    assert (layout["w"].describe(), layout["w"].nbytes) == ("float32[4, 2]", 32)
    assert (layout["s"].describe(), layout["s"].nbytes) == ("uint16[]", 2)
    assert "2 entries" in repr(layout)
    assert "w" in layout
    assert "v" not in layout
    assert layout != "w"


def test_numbers_in_extra_state_never_tie_with_weights() -> None:
    layout = Layout.of(named_tensors(Counting(2)))
    assert not layout.aliases
