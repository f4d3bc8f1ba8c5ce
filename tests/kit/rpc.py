"""Processes that take part in torch RPC: the sender's and its workers', who join one by one."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Coroutine
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import rpc

from aiosync import RPCWeightSyncScheme
from aiosync.transports.torch_rpc.transport import is_member
from tests.kit.clock import PATIENCE
from tests.kit.ports import free_port

_Test = Callable[[], Coroutine[Any, Any, None]]

__all__ = ["JoiningScheme", "World", "free_address", "in_a_process", "join", "name_of"]


def name_of(rank: int) -> str:
    """The name of who has this rank."""
    return f"worker{rank - 1}" if rank else "trainer"


TRANSPORTS: list[str] | None = ["uv"]
"""What connects the agents, as in torchrl's RPCCollector. None: torch's default, where a thread of each
process polls shared memory without a pause, and so takes a processor from the tests."""


def join(address: str, rank: int, size: int | None = None) -> None:
    """Take part, if this process does not yet. Given the ``size`` of the world, wait until it is complete."""
    if not is_member():
        rpc._init_counter = 0  # by which torch tells worlds apart; each of ours has a store of its own
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=address, rpc_timeout=PATIENCE, _transports=TRANSPORTS
        )
        with warnings.catch_warnings(action="ignore"):  # of what torch RPC itself does
            rpc.init_rpc(name_of(rank), rank=rank, world_size=size, rpc_backend_options=options)


def free_address() -> str:
    """Where a world can be."""
    return f"tcp://127.0.0.1:{free_port()}"


class World:
    """A world of torch RPC with this process in it as rank 0; one at a time.

    Args:
        address: where it is to be.
        size: how many take part; None: others may come as they like.

    Attributes:
        address: where others join.
    """

    def __init__(self, address: str = "", size: int | None = None) -> None:
        self.address = address or free_address()
        join(self.address, 0, size)

    def close(self) -> None:
        """Leave it; those who are still in it are left to themselves."""
        if is_member():
            rpc.shutdown(graceful=False)


class JoiningScheme(RPCWeightSyncScheme):
    """Has a worker's process join before anything else."""

    def init_on_receiver(self, *, world: str = "", **arguments: Any) -> None:
        """See :class:`RPCWeightSyncScheme`; ``world`` is where to join."""
        if world:
            join(world, arguments["worker_idx"] + 1)
        super().init_on_receiver(**arguments)

    init_on_worker = init_on_receiver


def in_a_process(test: _Test) -> Callable[[], None]:
    """Run a test in a process of its own: torch's references to remote objects only work in a process's first
    world."""

    @wraps(test)
    def run() -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(test.__module__, test.__name__, theirs))
        process.start()
        theirs.close()
        try:
            trace = ours.recv() if ours.poll(3 * PATIENCE) else "it did not end in time"
        except EOFError:
            trace = "its process has died"
        process.kill()
        process.join()
        process.close()
        ours.close()
        assert not trace, trace

    return run


def _main(module: str, name: str, result: Connection[Any, Any]) -> None:
    try:
        asyncio.run(getattr(importlib.import_module(module), name).__wrapped__())
    except BaseException:  # noqa: BLE001 - the test fails by it
        result.send(traceback.format_exc())
    else:
        result.send("")
