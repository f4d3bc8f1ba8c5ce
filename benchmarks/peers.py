"""The contenders: one pair of ends for each library, scheme and way of using it.

A :class:`SendPeer` lives in the trainer's process and makes a recipe that travels to the workers by
spawn; a :class:`ReceivePeer` lives in a worker. The harness around them is the same for all.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["CONTENDERS", "Contender", "ReceivePeer", "SendPeer", "Sent", "Weights"]

Weights: TypeAlias = "nn.Module | TensorDictBase"


@dataclass(frozen=True, slots=True)
class Sent:
    """What a contender says about one send.

    Attributes:
        commit: seconds that the commit took, by worker; empty where the contender does not tell.
        phases: seconds per phase at the sender; empty where the contender does not tell.
    """

    commit: Mapping[int, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)


class SendPeer(abc.ABC):
    """The sender's end. Made with the trainer's model, before any worker is started.

    Attributes:
        recipe: what each worker gets to make its end from; picklable while a process is spawned.
    """

    recipe: object

    @abc.abstractmethod
    async def connect(self) -> None:
        """Meet the workers and hand out the initial weights."""

    @abc.abstractmethod
    async def send(self, weights: Weights, *, off_loop: bool = False) -> Sent:
        """Send and wait until every worker has said that it applied the weights.

        Args:
            weights: the trainer's own model, or a TensorDict of fresh tensors.
            off_loop: for a library that blocks: call it in a thread, the best that a caller with
                an event loop can do. An asynchronous library takes no notice.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of this end."""


class ReceivePeer(abc.ABC):
    """A worker's end. Made with the worker's model and the recipe."""

    @abc.abstractmethod
    async def connect(self) -> None:
        """Get the initial weights and from here on apply whatever comes."""

    @abc.abstractmethod
    def version(self) -> int | None:
        """The version in service, or None where the library keeps no versions."""

    @abc.abstractmethod
    def pinned(self) -> AbstractAsyncContextManager[int | None]:
        """Inside, no update lands; does nothing where the library has no such promise."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of this end."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of using one library for one scheme.

    Attributes:
        name: the contender's name in tables and results.
        module: the module of this package that has its ``make_sender`` and ``make_receiver``.
        schemes: the backend names it is measured for.
        about: one line that says what is measured.
    """

    name: str
    module: str
    schemes: tuple[str, ...]
    about: str

    def make_sender(self, scheme: str, model: nn.Module, num_workers: int, ctx: SpawnContext) -> SendPeer:
        """The sender's end for ``scheme``."""
        peer: SendPeer = self._load().make_sender(self.name, scheme, model, num_workers, ctx)
        return peer

    def make_receiver(self, recipe: object, model: nn.Module, worker_idx: int) -> ReceivePeer:
        """A worker's end."""
        peer: ReceivePeer = self._load().make_receiver(recipe, model, worker_idx)
        return peer

    def _load(self) -> Any:
        # By name, so that a run without torchrl does not need torchrl.
        return importlib.import_module(self.module)


CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender(
            "aiosync",
            "benchmarks.peer_aiosync",
            ("shared", "process"),
            "the trainer's memory is copied once into the arena; send waits for every worker's ack",
        ),
        Contender(
            "torchrl",
            "benchmarks.peer_torchrl",
            ("shared", "process"),
            "the trainer's memory is really copied. shared: one shared buffer for all workers "
            "(params_map). process: each worker has weights of its own (device_map_fn)",
        ),
        Contender(
            "torchrl-alias",
            "benchmarks.peer_torchrl",
            ("shared", "process"),
            "set up as in torchrl's stand-alone example (weights=, devices=): the trainer's "
            "tensors are moved into shared memory and the workers' parameters ARE them, so that "
            "nothing is copied, and a worker sees each training step as it happens, unsent",
        ),
    )
}
