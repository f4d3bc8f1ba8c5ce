"""What is compared: for each library, a sender's end and a worker's end that the harness drives alike."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from benchmarks.harness.model_specs import ModelSpec

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import nn

MODEL_ID = "policy"
LIMIT = "memcpy"  # not a library: one warm copy of the same bytes, which the driver takes itself

Mode: TypeAlias = Literal["plain", "fresh", "known", "still"]
"""What a send gets: the model, fresh tensors of it, nothing (the sender knows the model), or nothing, and the
weights have not changed since the last send."""
Weights: TypeAlias = "nn.Module | TensorDictBase"


@dataclass(frozen=True, slots=True)
class Setup:
    """One contender in one measurement."""

    contender: str  # a key of ABOUT
    scheme: str  # backend name, as ``WeightSyncScheme.from_backend`` takes it
    model: ModelSpec
    workers: int
    modes: tuple[Mode, ...] = ("plain",)
    uvloop: bool = False  # whether its processes run uvloop
    options: Mapping[str, Any] = field(default_factory=dict)  # of aiosync's scheme; see ``bare`` for others
    # What the contender needs besides, see its module. With ``rpc`` its processes meet in a file and join
    # torch RPC; with ``port`` they meet in a store and join a process group. The trainer is rank 0.
    extras: Mapping[str, Any] = field(default_factory=dict)

    def ends(self) -> Any:  # tuple[type[SenderEnd], type[WorkerEnd]]
        """The classes of the contender's ends, by name: a run without torchrl does not need torchrl."""
        return importlib.import_module(_module_of(self.contender)).ends(self)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a contender reports of one send; empty if it does not report it."""

    commit: Sequence[float] = ()  # seconds that the commit took, of each worker
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds per phase at the sender


@dataclass(eq=False)
class SenderEnd:
    """The sender's end. Its methods are in the order of the calls."""

    setup: Setup
    model: nn.Module  # the trainer's

    def __post_init__(self) -> None:
        """Make the end, before any worker is started."""

    async def recipe(self, index: int) -> Any:
        """What worker ``index`` makes its end from, pickled while the worker's process is spawned."""
        return None

    async def connect(self) -> None:
        """Connect to the workers and hand out the initial weights."""

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        """Send, and wait until every worker has applied the ``weights``, or the model for None.

        A library that blocks is called in a thread if ``off_loop``; an asynchronous library ignores it.
        """
        raise NotImplementedError

    async def send_past_last(self) -> None:
        """Send, and wait for every worker but the last."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """``memory`` of the slots and ``wire_nbytes`` sent so far, in bytes; empty if not known."""
        return {}

    async def close(self) -> None:
        """Release this end, before the workers'."""


@dataclass(eq=False)
class WorkerEnd:
    """A worker's end."""

    setup: Setup
    recipe: Any
    model: nn.Module  # the worker's
    index: int

    def __post_init__(self) -> None:
        """Make the end."""

    async def connect(self) -> None:
        """Receive the initial weights, and apply each update from here on."""

    def version(self) -> int | None:
        """The version in service, or None if the library keeps no versions."""
        return None

    def pinned(self) -> AbstractAsyncContextManager[int | None]:
        """No update is applied inside, if the library can promise that."""
        return contextlib.nullcontext()

    async def close(self) -> None:
        """Release this end."""


ABOUT = {
    "aiosync": "the trainer's memory is copied once into the arena; send waits for every worker's ack",
    "torchrl": "the trainer's memory is really copied. shared: one shared buffer for all workers "
    "(params_map). process: each worker has weights of its own (device_map_fn)",
    "torchrl-alias": "set up as in torchrl's stand-alone example (weights=, devices=): the trainer's "
    "tensors are moved into shared memory and the workers' parameters ARE them, so that nothing is copied, "
    "and a worker sees each training step as it happens, unsent",
    "sockets": "one blocking socket: sendall out of a ready buffer, recv_into a warm one, and a byte back",
    "gloo": "one gloo send and receive of one tensor out of a ready buffer into a warm one, and a byte back",
}
"""Each contender, and what is measured of it. ``torchrl-alias`` is a way of using torchrl."""
_MODULES = {"torchrl-alias": "torchrl", "sockets": "bare", "gloo": "bare"}


def _module_of(contender: str) -> str:
    return f"{__name__}.{_MODULES.get(contender, contender)}"


def installed(contender: str) -> bool:
    """Whether the contender's module is here (a wheel has aiosync's only), and the library it needs."""
    if importlib.util.find_spec(_module_of(contender)) is None:
        return False
    return not contender.startswith("torchrl") or importlib.util.find_spec("torchrl") is not None
