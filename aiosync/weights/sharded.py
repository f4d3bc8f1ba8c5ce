"""Models whose tensors are spread over the ranks of a trainer: DTensors, as FSDP2 and tensor parallelism
have them.

Every rank of the mesh takes part each time that weights are gathered, in the same order: the rank whose
coordinates are all zero, which leads, writes them down; the others only lend their shards. Before that, the
one that leads tells the others that it is going to, or why not; so nobody waits for it in vain.

One tensor is gathered at a time, and let go before the next: what a rank takes for it besides its own shards
is memory for the largest tensor, once whole and once in the parts that it is made of.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aiosync.errors import GatherError, InvalidArgumentError

__all__ = ["Team", "collect", "is_sharded", "local_part", "team_of"]


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    library: Any = sys.modules.get(
        "torch.distributed.tensor"
    )  # takes long to import: who has one has done so
    return library is not None and isinstance(tensor, library.DTensor)


def local_part(tensor: Any) -> Tensor:
    """What this rank has of a DTensor; the same object each time."""
    part: Tensor = tensor._local_tensor
    return part


def team_of(source: Any) -> Team | None:
    """The ranks that a model's tensors are spread over, if they are.

    Raises:
        InvalidArgumentError: they are spread over several meshes, or this rank is in none of them.
    """
    if isinstance(source, nn.Module):
        tensors: Iterable[Any] = (*source.parameters(), *source.buffers())
    else:
        tensors = _leaves(source) if isinstance(source, Mapping) or hasattr(source, "items") else ()
    meshes = {tensor.device_mesh: None for tensor in tensors if is_sharded(tensor)}
    if not meshes:
        return None
    if len(meshes) > 1:
        raise InvalidArgumentError(f"a model is to be spread over one mesh, this one is over {len(meshes)}")
    (mesh,) = meshes
    if mesh.get_coordinate() is None:
        raise InvalidArgumentError("this rank has no part in the mesh that the model is spread over")
    return _team(mesh)


def _team(mesh: Any) -> Team:
    if mesh not in _teams:
        _teams[mesh] = Team(mesh)
    return _teams[mesh]


def _leaves(source: Any) -> Iterable[Any]:
    for value in source.values():
        if hasattr(value, "values") and not isinstance(value, Tensor):
            yield from _leaves(value)
        else:
            yield value


def collect(pairs: Sequence[tuple[Tensor, Any]]) -> None:
    """Gather each second tensor, which is spread over ranks, into the first. Blocking; see :class:`Team`."""
    _team(pairs[0][1].device_mesh).collect(pairs)


class Team:
    """The ranks of one mesh, as far as they gather weights. Its calls block.

    Attributes:
        leads: whether this rank is the one that gets the weights.
        begun: how often this rank has begun to gather.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._one_at_a_time = threading.Lock()
        self.leads = not any(mesh.get_coordinate())
        self.begun = 0

    def collect(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Gather each second tensor into the first; on the rank that leads.

        Raises:
            GatherError: a rank is gone.
        """
        with self._one_at_a_time:
            self.begun += 1
            self._share("")
            for destination, source in pairs:
                destination.copy_(self._whole(source))

    def call_off(self, reason: str) -> None:
        """Tell the others that nothing will be gathered; on the rank that leads."""
        with self._one_at_a_time:
            self._share(reason)

    def contribute(self, tensors: Iterable[Tensor]) -> None:
        """Lend this rank's shards.

        Raises:
            GatherError: the rank that leads has called it off, or a rank is gone.
        """
        with self._one_at_a_time:
            reason = self._share("")
            if reason:
                raise GatherError(f"the trainer's rank 0 did not send: {reason}")
            self.begun += 1
            for tensor in tensors:
                self._whole(tensor)

    def _share(self, reason: str) -> str:
        """What the rank that leads says; along one dimension of the mesh after the other."""
        said = [reason]
        try:
            for dimension in range(self._mesh.ndim):
                group = self._mesh.get_group(dimension)
                dist.broadcast_object_list(said, group=group, group_src=0)
        except RuntimeError as exc:
            raise GatherError(f"a rank of the trainer is gone: {str(exc).splitlines()[0]}") from exc
        return said[0]

    def _whole(self, tensor: Any) -> Tensor:
        try:
            with torch.no_grad():
                whole: Tensor = tensor.full_tensor()
        except RuntimeError as exc:
            raise GatherError(f"a rank of the trainer is gone: {str(exc).splitlines()[0]}") from exc
        return whole


_teams: WeakKeyDictionary[Any, Team] = WeakKeyDictionary()
