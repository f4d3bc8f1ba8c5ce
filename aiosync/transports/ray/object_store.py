"""Versions in Ray's object store. A version is put once, and workers read it in place.

A small actor, the *keeper*, passes references from process to process, because Ray counts only references
that travel in calls. A call of the worker's own actor would wait until the actor's current method returns,
which may be never.
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
from aiosync.transports.ray import ray_here
from aiosync.weights.copying import copy_pairs
from aiosync.weights.layout import Layout

logger = logging.getLogger("aiosync")

# (Ray's node id, Ray's worker id) -> handle of that process's keeper, which ends with its job. A restarted
# cluster has other node ids, but may have the same worker ids. Ray ends a process that uses an actor of a
# cluster that is gone.
_keepers: dict[tuple[str, str], Any] = {}

# Seconds that a reference may arrive after the Update that names it, because they take different ways.
_PATIENCE = 10.0


def open_keeper() -> Any:
    """Return the handle of this process's keeper. The first call starts it, without waiting."""
    ray = ray_here()
    context = ray.get_runtime_context()
    here = context.get_node_id(), context.get_worker_id()
    if here not in _keepers:
        _keepers.clear()
        # On this node: if another node is removed, the references that its actors keep are lost.
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(here[0], soft=False)
        _keepers[here] = ray.remote(**options)(_keeper_class()).remote()
    return _keepers[here]


def _keeper_class() -> type[Any]:
    # A local class: Ray pickles it by value, so the keeper's process does not import torch.
    class RefKeeper:
        """Keeps references to versions, and gives them to workers."""

        def __init__(self) -> None:
            self._kept: dict[tuple[str, int], asyncio.Future[list[Any]]] = {}
            self._closed: set[str] = set()
            self._newest: dict[str, int] = {}

        def _slot(self, name: str, number: int) -> asyncio.Future[list[Any]]:
            if (name, number) not in self._kept:
                self._kept[name, number] = asyncio.get_running_loop().create_future()
            return self._kept[name, number]

        async def keep(self, name: str, number: int, refs: list[Any]) -> None:
            """Keep the references of a version that a publisher has put."""
            if name in self._closed:
                return  # Ray may repeat calls, in another order
            slot = self._slot(name, number)
            self._newest[name] = max(number, self._newest.get(name, -1))
            if not slot.done():
                slot.set_result(refs)

        async def fetch(self, name: str, number: int, patience: float) -> list[Any] | None:
            """Wait at most ``patience`` seconds for a version's references; None: they are not kept."""
            if (name, number) not in self._kept and number <= self._newest.get(name, -1):
                return None  # dropped: the worker has been offered a newer version
            slot = self._slot(name, number)
            await asyncio.wait([slot], timeout=patience)
            if slot.done():
                return slot.result()
            self._kept.pop((name, number), None)
            return None

        async def drop(self, name: str, number: int) -> None:
            """Release a version."""
            self._kept.pop((name, number), None)

        async def forget(self, name: str) -> None:
            """Release all versions of one publisher."""
            self._closed.add(name)
            self._newest.pop(name, None)
            for key in [key for key in self._kept if key[0] == name]:
                del self._kept[key]

    return RefKeeper


def notify_keeper(keeper: Any, method: str, *args: Any) -> None:
    """Call a method of a keeper without waiting. Does nothing if the keeper's cluster is gone."""
    try:
        if ray_here() is not None and keeper in _keepers.values():
            getattr(keeper, method).remote(*args)
    except Exception as exc:  # noqa: BLE001 - what it kept is gone with it
        logger.debug("a call of a reference keeper failed: %s", exc)


def put(thing: Any, tensor_transport: str) -> Any:
    """Put a 1-D uint8 tensor, or an object that Ray pickles, into the store. Blocking."""
    ray = ray_here()
    if tensor_transport != "object_store":
        # Such a transport does not copy: receivers read this tensor as long as the reference exists.
        copied = thing.clone() if isinstance(thing, Tensor) else thing
        return ray.put(copied, _tensor_transport=tensor_transport)
    # Ray stores an array's bytes without pickling them, and a tensor's with pickling.
    return ray.put(thing.numpy() if isinstance(thing, Tensor) else thing)


def warn_if_tight(nbytes: int) -> None:
    """Log a warning if versions of ``nbytes`` bytes may fill this node's store. Blocking.

    Ray frees dropped versions about once a second, so the store has several versions at a time. From 70 % of
    its capacity Ray makes all its processes collect garbage, which blocks their event loops; from 80 % it
    spills to disk.
    """
    ray = ray_here()
    here = ray.get_runtime_context().get_node_id()
    nodes = (node for node in ray.nodes() if node["NodeID"] == here)
    capacity = next((node["Resources"].get("object_store_memory", 0) for node in nodes), 0)
    if 4 * nbytes > 0.7 * capacity:
        logger.warning(
            "Ray's object store has %.0f MB on this node, and a version %.0f MB: from 70 %% of its capacity "
            "Ray blocks all its processes to collect garbage. Start Ray with object_store_memory=%d or more",
            capacity / 1e6,
            nbytes / 1e6,
            6 * nbytes,
        )


def fetch(keeper: Any, name: str, number: int) -> Tensor:
    """Get version ``number`` of the publisher ``name``: 1-D uint8, in the object store's memory. Blocking.

    Raises ProtocolError if the keeper does not have the version, and a RayError if it is lost.
    """
    ray = ray_here()
    refs = ray.get(keeper.fetch.remote(name, number, _PATIENCE))
    if refs is None:
        raise ProtocolError("the object of an update is gone, because its keeper was restarted: send again")
    return as_tensor(ray.get(refs[0]))


def packed(named: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
    """Copy tensors into one 1-D uint8 CPU tensor; returns their layout in it, and the tensor. Blocking."""
    layout = Layout.of(named)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    views = layout.views(buffer)
    copy_pairs([(views[entry.name], named[entry.name]) for entry in layout.entries])
    return layout, buffer


def as_tensor(found: Any) -> Tensor:
    """Return a 1-D array or tensor of bytes as a tensor, without a copy."""
    if isinstance(found, Tensor):
        return found
    # The store's memory is read-only. torch has no read-only tensors, so users must not write to parameters
    # that view this memory.
    if not found.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_uint8 * found.nbytes).from_address(found.ctypes.data)
    memory.owner = found
    return torch.frombuffer(memory, dtype=torch.uint8)
