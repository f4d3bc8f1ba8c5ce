"""Models whose tensors are sharded over the ranks of a trainer: DTensors of FSDP2 and tensor parallelism.

This module finds the ranks, and the part of each tensor that a rank has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.errors import GatherError, InvalidArgumentError


class Block(msgspec.Struct, frozen=True):
    """A part of a tensor."""

    whole: tuple[int, ...]  # the whole tensor's shape
    offset: tuple[int, ...]  # the part's first index in each dimension
    shape: tuple[int, ...]
    dtype: str

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor."""
    # The import takes long. Code that has a DTensor has imported the module already.
    library: Any = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; the same object each time."""
    return tensor._local_tensor  # type: ignore[no-any-return]


def reshard(module: nn.Module) -> bool:
    """Make FSDP2 shard its parameters again; returns whether the model uses FSDP2.

    After a forward pass without a backward pass, FSDP2 may have left whole parameters, with the values of
    that time and in the dtype of the computation.
    """
    library: Any = sys.modules.get("torch.distributed.fsdp")
    if library is None:
        return False
    spread = [part for part in module.modules() if isinstance(part, library.FSDPModule)]
    for part in spread:
        part.reshard()
    return bool(spread)


def mesh_of(sources: Iterable[Any]) -> Any:
    """Return the device mesh of these modules, TensorDicts and dicts; None: they are not sharded.

    Raises:
        InvalidArgumentError: there are several meshes, or this rank is not in the mesh.
    """
    meshes = {tensor.device_mesh for source in sources for tensor in _tensors(source) if is_sharded(tensor)}
    if not meshes:
        return None
    if len(meshes) > 1:
        raise InvalidArgumentError(
            f"expected a model that is sharded over one mesh, got one over {len(meshes)} meshes"
        )
    (mesh,) = meshes
    if mesh.get_coordinate() is None:
        raise InvalidArgumentError("this rank is not in the mesh that the model is sharded over")
    return mesh


def _tensors(source: Any) -> Iterator[Any]:
    if isinstance(source, nn.Module):
        reshard(source)
        yield from source.parameters()
        yield from source.buffers()
    elif isinstance(source, Mapping | TensorDictBase):
        for value in source.values():
            yield from _tensors(value)
    else:
        yield source


def block_of(tensor: Any) -> Block | None:
    """Return the part of a DTensor that this rank contributes.

    None: the rank has no part, or another rank contributes the same part.

    Raises:
        GatherError: the DTensor is partial (ranks have addends of it), or the rank's part has an unexpected
            shape.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    coordinate = tensor.device_mesh.get_coordinate()
    for placement, place in zip(tensor.placements, coordinate, strict=True):
        if placement.is_partial():
            raise GatherError(f"a tensor is {placement!r}: ranks have addends of it; redistribute() it first")
        if placement.is_replicate() and place > 0:
            return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tuple(local_part(tensor).shape)
    if local != tuple(shape):
        raise GatherError(
            f"a tensor of {tuple(tensor.shape)} has {local} here, where {tensor.placements} would have "
            f"{tuple(shape)}: redistribute() it first"
        )
    if not math.prod(shape):
        return None
    return Block(tuple(tensor.shape), tuple(offset), local, str(tensor.dtype))


def check_blocks(name: str, tensor: Any, blocks: Sequence[Block]) -> None:
    """Check that ``blocks`` cover a tensor, without overlaps.

    Raises:
        GatherError: they do not, or their dtypes or shapes differ from the tensor's.
    """
    here = str(tensor.dtype), tuple(tensor.shape)
    others = {(block.dtype, block.whole) for block in blocks} - {here}
    if others:
        raise GatherError(f"{name!r} is {here} on rank 0 and {', '.join(map(str, others))} on others")
    there = sum(math.prod(block.shape) for block in blocks)
    if there != tensor.numel() or any(_overlap(a, b) for a, b in combinations(blocks, 2)):
        raise GatherError(
            f"the ranks' parts of {name!r} are not the whole of it ({there} of {tensor.numel()} elements): "
            "is it the same model on all of them?"
        )


def _overlap(a: Block, b: Block) -> bool:
    return all(
        s < t + u and t < s + r for s, r, t, u in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
