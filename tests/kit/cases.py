"""The schemes under test. A new one joins the conformance suite by a line in :data:`SCHEMES`."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

from aiosync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    TCPWeightSyncScheme,
    WeightSyncScheme,
)
from tests.kit.certificates import certificates
from tests.kit.rpc import JoiningScheme, World

__all__ = ["SCHEMES", "Place", "Recipe", "SchemeCase", "Start", "distributed", "named", "over_rpc"]


@dataclass
class Recipe:
    """A scheme, and what each worker's ``init_on_receiver`` is given besides.

    Attributes:
        scheme: not initialised yet.
        receiver_arguments: worker -> keyword arguments.
        owned: what the test closes when all is over.
    """

    scheme: WeightSyncScheme
    receiver_arguments: dict[int, dict[str, Any]] = field(default_factory=dict)
    owned: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Close what the scheme was lent."""
        for thing in self.owned:
            thing.close()


Build = Callable[[int, dict[str, Any]], Recipe]


class Place(Protocol):
    """Where a worker runs, in a process of its own.

    Attributes:
        control: the pipe by which it is told what to do; it ends with the worker.
    """

    control: Connection[Any, Any]

    @property
    def pid(self) -> int:
        """The process."""

    def close(self) -> None:
        """Let go of it when it has ended."""


Start = Callable[[WeightSyncScheme, int, dict[str, Any], bool], Place]
"""Starts a worker: see :class:`tests.kit.processes.Forked`."""


@dataclass(frozen=True)
class SchemeCase:
    """One scheme under test.

    Attributes:
        name: in the tests' ids.
        build: takes the number of workers and the scheme's options.
        processes: whether workers can be other processes.
        views: whether workers view the sender's memory (so they share it).
        respawns: whether a new process can take a dead worker's place.
        elastic: whether workers may be taken as they come.
        start: starts a worker in another process; None: forks it.
    """

    name: str
    build: Build
    processes: bool = True
    views: bool = False
    respawns: bool = True
    elastic: bool = False
    start: Start | None = None


def named(backend: str) -> Build:
    """A scheme that needs nothing but its name."""
    return lambda workers, options: Recipe(WeightSyncScheme.from_backend(backend, **options))


def _over_pipes(workers: int, options: dict[str, Any]) -> Recipe:
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(workers)), strict=True)
    scheme = MultiProcessWeightSyncScheme(pipes=list(ours), **options)
    return Recipe(scheme, {w: {"pipe": end} for w, end in enumerate(theirs)}, [*ours, *theirs])


def _over_sockets(kind: str, *, tls: bool) -> Build:
    """Lost is lost here; that a worker comes back by itself is tested elsewhere."""

    def build(workers: int, options: dict[str, Any]) -> Recipe:
        path = os.path.join(tempfile.gettempdir(), f"aiosync-test-{secrets.token_hex(8)}")
        address = f"unix://{path}" if kind == "unix" else "tcp://127.0.0.1:0"
        token = None if kind == "unix" else "a token of the tests"
        config = certificates().config if tls else None
        return Recipe(TCPWeightSyncScheme(address, token=token, tls=config, reconnect_for=0, **options))

    return build


class ByGroups(DistributedWeightSyncScheme):
    """Sends small models through process groups too, as large ones are."""

    _inline = 0


def distributed(collective: Literal["p2p", "broadcast"]) -> Build:
    """As between machines."""
    more: dict[str, Any] = {"collective": collective, "share_memory": False, "reconnect_for": 0}
    return lambda workers, options: Recipe(ByGroups(**{**more, **options}))


def over_rpc(*, share_memory: bool, reconnect_for: float = 0) -> Build:
    """A process that takes the place of one that has died is told of no world: it could not join it."""

    def build(workers: int, options: dict[str, Any]) -> Recipe:
        scheme = JoiningScheme(share_memory=share_memory, reconnect_for=reconnect_for, **options)
        world = World()
        return Recipe(scheme, {w: {"world": world.address} for w in range(workers)}, [world])

    return build


SCHEMES = [
    SchemeCase("shared", named("shared"), views=True),
    SchemeCase("process", named("process")),
    # The pipe is the caller's: one that has broken with its process cannot be mended.
    SchemeCase("process-pipes", _over_pipes, respawns=False),
    SchemeCase("tcp", _over_sockets("tcp", tls=False), elastic=True),
    SchemeCase("tcp-tls", _over_sockets("tcp", tls=True), elastic=True),
    SchemeCase("unix", _over_sockets("unix", tls=False), elastic=True),
    SchemeCase("unix-tls", _over_sockets("unix", tls=True), elastic=True),
    SchemeCase("distributed", distributed("p2p")),
    SchemeCase("distributed-broadcast", distributed("broadcast")),
    # As on one machine; where everything is sent it is as above.
    SchemeCase("rpc", over_rpc(share_memory=True), views=True),
    SchemeCase("memory", named("memory"), processes=False),
]
