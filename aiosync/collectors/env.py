"""Adapters that give every kind of environment one interface: fields in, fields out, every wait an ``await``.

Fields have torchrl's names: observations under their own names (``"observation"`` if there is only one),
``"reward"``, ``"done"``, ``"terminated"`` and ``"truncated"``. The last four have the shape ``(*shape, 1)``.

Environments, policies and buffers exchange fields as dicts of plain tensors or NumPy arrays, as the
environment or the policy returned them. They are written into the memory of the batch at once, so they have
to be valid only until the next call of the environment. A TensorDict is made once per batch, and where a
policy takes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from aiosync.collectors.batch_config import BatchConfig
from aiosync.errors import InvalidArgumentError

Key: TypeAlias = str | tuple[str, ...]
"""A name; for a nested entry a tuple of names, as in TensorDict."""

Value: TypeAlias = Tensor | np.ndarray[Any, Any]
Fields: TypeAlias = dict[Key, Tensor]
Values: TypeAlias = dict[Key, Value]
"""Fields as an environment or a policy returned them; see :func:`as_tensor` and :func:`as_array`. Those of
torchrl's environments may also be NonTensorData, if ``dynamic`` is true or ``use_buffers`` is False."""

Specs: TypeAlias = tuple[tuple[Key, tuple[int, ...], torch.dtype], ...]
"""Key, shape of one frame, dtype; one entry per field."""

Nested: TypeAlias = Mapping[tuple[str, ...], tuple[int, ...]]
"""Prefix of nested entries -> the batch dimensions that they have beside those of the environment, such as
the number of agents."""


ENDS = ("done", "terminated", "truncated")
TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def flatten(data: TensorDictBase) -> Fields:
    """Return the leaves of a TensorDict, with those that are no tensors: NonTensorData, NonTensorStack."""
    return dict(data.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))


def unflatten(fields: Mapping[Key, Tensor], shape: Iterable[int], nested: Nested | None = None) -> TensorDict:
    """Return a TensorDict of batch size ``shape`` with these leaves."""
    found = TensorDict({}, batch_size=torch.Size(shape))
    for key, value in fields.items():
        found.set(key, value)
    return _with_nested(found, nested)


_new_unchecked: Callable[..., TensorDict] | None = getattr(TensorDict, "_new_unsafe", None)
"""What tensordict makes its own results with. It is not public: tensordict may not have it some day."""


def assemble(fields: Mapping[Key, Tensor], shape: Iterable[int], nested: Nested | None = None) -> TensorDict:
    """As :func:`unflatten`, for tensors that are known to have these batch dimensions.

    tensordict does not check them, which takes six times as long as the rest.
    """
    if _new_unchecked is None:
        return unflatten(fields, shape, nested)
    tree: dict[str, Any] = {}
    for key, value in fields.items():
        *prefix, last = (key,) if isinstance(key, str) else key
        inner = tree
        for name in prefix:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return _with_nested(_new_unchecked(tree, batch_size=torch.Size(shape)), nested)


def _with_nested(found: TensorDict, nested: Nested | None) -> TensorDict:
    """Set the batch dimensions of nested entries."""
    for prefix, more in (nested or {}).items():
        inner = found.get(prefix, None)
        if inner is not None:
            inner.batch_size = found.batch_size + more
    return found


def under(first: str, key: Key) -> tuple[str, ...]:
    """Return ``key`` nested one level deeper, below ``first``."""
    return (first, key) if isinstance(key, str) else (first, *key)


@dataclass(frozen=True, slots=True)
class Ends:
    """The fields that say whether an episode has ended: those of the environment, or of some of its parts."""

    done: Key = "done"
    truncated: Key = "truncated"
    step_count: Key = "step_count"  # where max_frames_per_traj counts the steps of the episode
    within: tuple[Key, ...] = ()  # the same of parts of these parts, which end with them


class Env(ABC):
    """An environment, or several that step together.

    Methods in the order of their calls: :meth:`configure`, :meth:`set_seed`, :meth:`reset`, then :meth:`step`
    and :meth:`proceed` or :meth:`restart` for each frame, :meth:`close`.

    Attributes:
        shape: batch shape: ``()``, or ``(number,)`` of environments that step together.
        env: the adapted environment.
        suspends: whether :meth:`reset` and :meth:`step` may suspend the task that awaits them.
        device: the device of the tensors that it returns; None: CPU memory.
        skips: True: a step after the end of an episode only begins the next episode, whatever the action.
            Such steps are false in ``("collector", "mask")``.
        action_keys: the fields that :meth:`step` takes.
        observation_keys: the fields that a policy which takes tensors gets, in order; None: all but the ends.
        nested: batch dimensions of nested entries.
        dynamic: True: fields may change their shapes from step to step, or are no tensors.
        whole: True: a replay buffer gets batches of the shape ``(*shape, steps)``, as from torchrl's
            collectors; False: single frames.
        ends: the fields that ``max_frames_per_traj`` writes.
        truncated: (truncated, done): the fields that ``set_truncated`` writes.
    """

    shape: tuple[int, ...] = ()
    env: Any
    suspends = False
    device: torch.device | None = None
    skips = False
    action_keys: tuple[Key, ...] = ("action",)
    observation_keys: tuple[Key, ...] | None = None
    nested: Nested = MappingProxyType({})
    dynamic = False
    whole = False
    ends: tuple[Ends, ...] = (Ends(),)
    truncated: tuple[tuple[Key, Key], ...] = (("truncated", "done"),)

    @property
    def kept(self) -> Set[Key]:
        """What the policy has added to the last step and may read in the next one."""
        return frozenset()

    def configure(self, config: BatchConfig) -> None:
        """Prepare for these options. InvalidArgumentError: the environment cannot do what they say."""
        limit = config.step_limit
        if self.skips and limit:
            raise InvalidArgumentError(
                f"max_frames_per_traj={limit}: an environment that begins episodes by itself cannot be "
                "truncated: make it with AutoresetMode.DISABLED, or set the limit in it"
            )

    @abstractmethod
    async def reset(self) -> Values:
        """Begin a new episode in all environments. Returns the observations, and ``done``, ``terminated`` and
        ``truncated``, all false."""

    @abstractmethod
    async def step(self, step: Values) -> Values:
        """Take the action in ``step``. Returns the observations, the reward and the end flags: they are valid
        until the next call of a method."""

    def truncated_at(self, after: Values) -> Values:
        """Complete a step whose end flags ``max_frames_per_traj`` has set in ``after``: return its fields."""
        return after

    def ended(self, after: Values) -> Value:
        """Return which trajectories have ended, of the shape ``shape``. ``after``: what :meth:`step`
        returned."""
        return after["done"].reshape(self.shape)

    def proceed(self, after: Values) -> Values:
        """Return the observations and end flags that the next step begins with, if no episode has ended."""
        return {key: value for key, value in after.items() if key != "reward"}

    async def restart(self, after: Values) -> Values:
        """Begin a new episode in each environment whose ``after["done"]`` is true. Returns the observations
        of all."""
        return await self.reset()

    @abstractmethod
    def random_action(self, current: Values) -> Values:
        """Return a random action: the fields of ``action_keys``. ``current``: what the next step begins with,
        such as a mask of the actions that are allowed."""

    @abstractmethod
    def set_seed(self, seed: int) -> None:
        """Seed the next :meth:`reset`."""

    async def close(self) -> None:
        """Close the environment."""
        self.env.close()


def as_tensor(value: Value) -> Tensor:
    """Return a tensor that views this memory; or a copy of an array that torch cannot view, because it has
    negative strides or another byte order. TypeError: torch has no such dtype."""
    # isinstance(value, Tensor) of an array would take as long as all the rest.
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))


def as_array(value: Value) -> np.ndarray[Any, Any]:
    """Return an array that views this memory, or a copy of a tensor on another device. TypeError: NumPy has
    no such dtype."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return value.numpy()  # as almost always
    except (RuntimeError, TypeError):  # it requires gradients, or is on another device
        return value.numpy(force=True)


def as_tensors(values: Mapping[Key, Value]) -> Fields:
    """Return tensors that view this memory."""
    return {key: as_tensor(value) for key, value in values.items()}


_NUMPY_FLOATS = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def default_float(found: np.ndarray[Any, Any]) -> Value:
    """Return numbers in torch's default dtype."""
    dtype = torch.get_default_dtype()
    if dtype in _NUMPY_FLOATS:
        return found.astype(_NUMPY_FLOATS[dtype], copy=False)
    return torch.from_numpy(found).to(dtype)


def value_of(value: object) -> Value:
    """Return ``value`` as an array or a tensor of its own memory: a policy may write into its input. float64,
    the type of Python's floats, becomes torch's default dtype."""
    if isinstance(value, Tensor):
        return value.to(torch.get_default_dtype() if value.dtype == torch.float64 else value.dtype, copy=True)
    found = np.array(value)
    if not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    return default_float(found) if found.dtype == np.float64 else found


_NESTED_LOOP = (
    "asyncio.run() cannot be called from a running event loop",
    "This event loop is already running",
    "Cannot run the event loop while another loop is running",
)


class NoNestedLoop:
    """The context to call an environment in: replaces asyncio's errors about nested event loops by one that
    says what to do."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _NESTED_LOOP):
            raise InvalidArgumentError(
                "the environment starts an event loop in reset() or step(), but the worker's event loop "
                "calls these methods: make them `async def` and use `await`, or run the other event loop in "
                f"a thread of the environment ({error})"
            ) from error


def call_env(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of an environment; see :class:`NoNestedLoop`."""
    with NoNestedLoop():
        return method(*arguments, **options)
