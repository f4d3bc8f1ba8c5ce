"""Copies give what torch's own copy gives, whatever the tensors look like."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from aiosync.errors import InvalidArgumentError
from aiosync.weights.block_copy import BlockCopy
from aiosync.weights.copying import INLINE_LIMIT, Pairs, copy_few, copy_lanes, copy_pairs


class _Wrapper(Tensor):
    """A tensor without memory of its own, as libraries for quantisation make them."""

    wrapped: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.wrapped if isinstance(value, _Wrapper) else value

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


def _sources(size: int) -> dict[str, Tensor]:
    plain = torch.arange(size * 4, dtype=torch.float32).view(size, 4)
    pairs = torch.view_as_complex(torch.arange(size * 8, dtype=torch.float32).view(size, 4, 2))
    return {
        "plain": plain,
        "parameter": nn.Parameter(plain.clone()),
        "transposed": plain.t(),
        "expanded": plain[:1].expand(size, 4),
        "every other row": plain[::2],
        "a part of another": plain[1:],
        "conjugated": pairs.conj(),
        "negated": pairs.conj().imag,
        "negated, one value": pairs[:1, :1].conj().imag,
        "of another dtype": plain.to(torch.float64),
        "bfloat16": plain.to(torch.bfloat16),
        "bool": plain > 3,
        "no values": plain[:0],
        "a single value": torch.tensor(3.0),
        "a wrapper": _Wrapper(plain),
    }


def _in_blocks(pairs: Pairs) -> None:
    ((destination, _),) = pairs
    buffer = destination.view(torch.uint8)
    BlockCopy(buffer, len(buffer), pairs, 1 << 16).complete(paced=False)


@pytest.mark.parametrize("copy", [copy_few, copy_pairs])
@pytest.mark.parametrize("size", [2, INLINE_LIMIT // 8], ids=["small", "large"])
@pytest.mark.parametrize("name", _sources(2))
def test_the_same_as_torch(name: str, size: int, copy: object) -> None:
    source = _sources(size)[name]
    dtype = torch.float32 if name == "of another dtype" else source.dtype
    expected = torch.zeros(source.shape, dtype=dtype).copy_(source.detach())
    strided = torch.zeros((*source.shape, 2), dtype=dtype)[..., 0]
    for destination in (torch.zeros(source.shape, dtype=dtype), strided):
        copy([(destination, source)])  # type: ignore[operator]
        assert torch.equal(destination, expected)
        assert not destination.requires_grad


def test_many_at_once() -> None:
    sources = list(_sources(3).values())
    destinations = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    copy_few(list(zip(destinations, sources, strict=True)))
    for destination, source in zip(destinations, sources, strict=True):
        assert torch.equal(destination, source)


@pytest.mark.parametrize("copy", [copy_few, copy_pairs])
@pytest.mark.parametrize("size", [4, INLINE_LIMIT], ids=["small", "large"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2, 1), (3, 2), (2, 2, 2)])
def test_another_shape(shape: tuple[int, ...], size: int, copy: object) -> None:
    destination = torch.zeros(2, 2, size)
    source = torch.ones(*shape, size)
    with pytest.raises(InvalidArgumentError, match="expected a tensor of shape"):
        copy([(destination, source)])  # type: ignore[operator]
    assert not destination.any()


@pytest.mark.parametrize("copy", [copy_few, copy_pairs, _in_blocks])
@pytest.mark.parametrize("size", [4, INLINE_LIMIT], ids=["small", "large"])
def test_tensors_without_memory(size: int, copy: object) -> None:
    destination = torch.ones(size)
    copy([(destination, torch._efficientzerotensor(size))])  # type: ignore[operator]
    assert not destination.any()
    freed = torch.ones(size)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="its storage was freed"):
        copy([(destination, freed)])  # type: ignore[operator]
    assert not destination.any()


def test_nothing_to_copy() -> None:
    copy_few([])


def _large(count: int) -> tuple[Pairs, list[Tensor]]:
    sources = [torch.full((INLINE_LIMIT,), float(number)) for number in range(count)]
    sources.append(torch.arange(6 << 20, dtype=torch.float32))  # more than one piece
    destinations = [torch.full_like(source, -1.0) for source in sources]
    return list(zip(destinations, sources, strict=True)), destinations


def test_lanes_share_the_pieces_and_copy_all_of_them() -> None:
    pairs, destinations = _large(40)
    lanes = copy_lanes(pairs, 3)
    assert len(lanes) == 3
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(lambda lane: lane(lambda: False), lanes))
    for destination, (_, source) in zip(destinations, pairs, strict=True):
        assert torch.equal(destination, source)


def test_one_lane_copies_what_a_late_one_does_not() -> None:
    pairs, destinations = _large(4)
    early, late = copy_lanes(pairs, 2)
    assert early(lambda: False)
    assert all(torch.equal(d, s) for d, (_, s) in zip(destinations, pairs, strict=True))
    assert late(lambda: False)  # nothing is left


def test_a_cancelled_lane_says_that_the_copy_is_not_whole() -> None:
    pairs, destinations = _large(4)
    early, late = copy_lanes(pairs, 2)
    asked = iter([False, True])
    assert not early(lambda: next(asked))
    late(lambda: False)
    assert sum(bool((d == -1).any()) for d in destinations) == 1  # the piece that was taken and not copied
