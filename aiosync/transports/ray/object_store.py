"""Versions in Ray's object store: put there once, and looked at by workers where they lie.

A reference gets from process to process by a small actor that keeps it, the *office*: only what travels in
calls is counted by Ray. Handed to a worker's own actor by a call of that, it would wait behind whatever
method the actor is in; an actor whose loop never returns would never be sent anything.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.transports.ray.calls import ray_here
from aiosync.weights.copying import copy_pairs
from aiosync.weights.layout import Layout

__all__ = ["as_tensor", "open_office", "packed", "put", "take", "tell", "warn_if_tight"]

logger = logging.getLogger("aiosync")

_offices: dict[tuple[str, str], Any] = {}
"""(node, worker) by Ray's names -> the office of that process, which ends with its job. A cluster that is
started again has other nodes, but may have the same workers; an actor of a cluster that is no more must not
be touched: Ray ends the process that does."""


_PATIENCE = 10.0
"""Seconds for which a reference may come later than the word of it, which goes another way."""


def open_office() -> Any:
    """The handle of this process's office, which may still be on its way.

    Raises:
        NotInitializedError: this process takes no part in a cluster.
    """
    ray = ray_here()
    context = ray.get_runtime_context()
    here = context.get_node_id(), context.get_worker_id()
    if here not in _offices:
        _offices.clear()
        # Here: another node may go at any time, and all that it keeps with it.
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        near = strategies.NodeAffinitySchedulingStrategy(here[0], soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": near}
        _offices[here] = ray.remote(**options)(_office()).remote()
    return _offices[here]


def _office() -> type[Any]:
    # Local, so that Ray pickles it whole: its process need not import torch for it.
    class Office:
        """Keeps references."""

        def __init__(self) -> None:
            self._kept: dict[tuple[str, int], asyncio.Future[list[Any]]] = {}
            self._forgotten: set[str] = set()
            self._newest: dict[str, int] = {}

        def _slot(self, name: str, number: int) -> asyncio.Future[list[Any]]:
            key = name, number
            if key not in self._kept:
                self._kept[key] = asyncio.get_running_loop().create_future()
            return self._kept[key]

        async def keep(self, name: str, number: int, refs: list[Any]) -> None:
            """Keep a version that a publisher has put."""
            if name in self._forgotten:
                return  # calls may be made again, and overtake each other then
            slot = self._slot(name, number)
            self._newest[name] = max(number, self._newest.get(name, -1))
            if not slot.done():
                slot.set_result(refs)

        async def take(self, name: str, number: int, patience: float) -> list[Any] | None:
            """It, as soon as it is kept, which may be a moment later; None: it is not, or no more."""
            if (name, number) not in self._kept and number <= self._newest.get(name, -1):
                return None  # the worker that asks has been sent another version meanwhile
            slot = self._slot(name, number)
            await asyncio.wait([slot], timeout=patience)
            if not slot.done():
                self._kept.pop((name, number), None)
                return None
            return slot.result()

        async def drop(self, name: str, number: int) -> None:
            """Let go of it."""
            self._kept.pop((name, number), None)

        async def forget(self, name: str) -> None:
            """Release all versions of one publisher."""
            self._forgotten.add(name)
            self._newest.pop(name, None)
            for key in [key for key in self._kept if key[0] == name]:
                del self._kept[key]

    return Office


def tell(office: Any, method: str, *args: Any) -> None:
    """Call an office and do not wait; it may be gone, with its cluster."""
    try:
        if ray_here() is not None and office in _offices.values():
            getattr(office, method).remote(*args)
    except Exception as exc:  # noqa: BLE001 - what it kept is gone with it
        logger.debug("an office did not get a message: %s", exc)


def put(thing: Any, tensor_transport: str) -> Any:
    """Put something in the object store; gives the reference. Blocking.

    Args:
        thing: a 1-D uint8 tensor, or what Ray is to pickle.
        tensor_transport: how Ray moves the tensors in it.
    """
    ray = ray_here()
    if tensor_transport != "object_store":
        # Those do not copy: receivers read the tensor itself, for as long as the reference is there.
        copied = thing.clone() if isinstance(thing, Tensor) else thing
        return ray.put(copied, _tensor_transport=tensor_transport)
    # An array's bytes go there as they are; a tensor would be pickled.
    return ray.put(thing.numpy() if isinstance(thing, Tensor) else thing)


def warn_if_tight(nbytes: int) -> None:
    """Log a warning where versions of so many bytes soon fill this node's store. Blocking.

    Ray frees what was dropped about once a second. Until then several versions lie there; from 70 % on all
    of Ray's processes are asked to collect garbage, which holds their loops up, from 80 % on it spills.
    """
    ray = ray_here()
    here = ray.get_runtime_context().get_node_id()
    sizes = (
        node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here
    )
    capacity = next(sizes, 0)
    if 4 * nbytes > 0.7 * capacity:
        logger.warning(
            "Ray's object store has %.0f MB on this node, and a version %.0f MB: from 70 %% on Ray holds all "
            "its processes up to collect garbage. Start it with object_store_memory=%d or more",
            capacity / 1e6,
            nbytes / 1e6,
            6 * nbytes,
        )


def take(office: Any, name: str, number: int) -> Tensor:
    """What is kept there: a 1-D uint8 tensor in the object store's memory. Blocking.

    Raises:
        ProtocolError: it is not there any more.
        ray.exceptions.RayError: it is lost.
    """
    ray = ray_here()
    refs = ray.get(office.take.remote(name, number, _PATIENCE))
    if refs is None:
        raise ProtocolError("what an update lies in is gone: its keeper was started again, send once more")
    return as_tensor(ray.get(refs[0]))


def packed(named: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
    """Tensors copied into one 1-D uint8 tensor of CPU memory, and where each is in it. Blocking."""
    layout = Layout.of(named)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    views = layout.views(buffer)
    copy_pairs([(views[entry.name], named[entry.name]) for entry in layout.entries])
    return layout, buffer


def as_tensor(found: Any) -> Tensor:
    """A 1-D array, or tensor, of bytes as a tensor, without a copy."""
    if isinstance(found, Tensor):
        return found
    # The store's memory is marked read-only, of which torch has no notion: parameters that view it are read
    # only by contract.
    if not found.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_uint8 * found.nbytes).from_address(found.ctypes.data)
    memory.owner = found
    return torch.frombuffer(memory, dtype=torch.uint8)
