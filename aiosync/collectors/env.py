"""Adapters that give every kind of environment one interface: fields in, fields out, every wait an ``await``.

Fields have torchrl's names: observations under their own names (``"observation"`` if there is only one),
``"reward"``, ``"done"``, ``"terminated"`` and ``"truncated"``. The last four have the shape ``(*shape, 1)``.

Environments, policies and buffers exchange fields as dicts of plain tensors or NumPy arrays, as the
environment or the policy returned them. They are written into the memory of the batch at once, so they have
to be valid only until the next call of the environment. A TensorDict is made once per batch, and where a
policy takes one.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from aiosync.collectors.batch_config import BatchConfig
from aiosync.errors import InvalidArgumentError

Key: TypeAlias = str | tuple[str, ...]
"""A name; for a nested entry a tuple of names, as in TensorDict."""

Value: TypeAlias = Tensor | np.ndarray[Any, Any]
Fields: TypeAlias = dict[Key, Tensor]
Values: TypeAlias = dict[Key, Value]
"""Fields as an environment or a policy returned them; see :func:`as_tensor` and :func:`as_array`."""

Specs: TypeAlias = tuple[tuple[Key, tuple[int, ...], torch.dtype], ...]
"""Key, shape of one frame, dtype; one entry per field."""

Nested: TypeAlias = Mapping[tuple[str, ...], tuple[int, ...]]
"""Prefix of nested entries -> the batch dimensions that they have beside those of the environment, such as
the number of agents."""


ENDS = ("done", "terminated", "truncated")
TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def flatten(data: TensorDictBase) -> Fields:
    """Return the leaves of a TensorDict."""
    return dict(data.items(include_nested=True, leaves_only=True))


def unflatten(fields: Mapping[Key, Tensor], shape: Iterable[int], nested: Nested | None = None) -> TensorDict:
    """Return a TensorDict of batch size ``shape`` with these leaves."""
    size = torch.Size(shape)
    found = TensorDict({}, batch_size=size)
    for key, value in fields.items():
        found.set(key, value)
    for prefix, more in (nested or {}).items():
        inner = found.get(prefix, None)
        if inner is not None:
            inner.batch_size = size + more
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
        dynamic: True: fields may change their shapes from step to step.
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
    def random_action(self) -> Values:
        """Return a random action: the fields of ``action_keys``."""

    @abstractmethod
    def set_seed(self, seed: int) -> None:
        """Seed the next :meth:`reset`."""

    async def close(self) -> None:
        """Close the environment."""
        self.env.close()


def as_tensor(value: Value) -> Tensor:
    """Return a tensor that views this memory."""
    # isinstance(value, Tensor) of an array would take as long as all the rest.
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


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


def _default_float(found: np.ndarray[Any, Any]) -> Value:
    """Return numbers in torch's default dtype."""
    dtype = torch.get_default_dtype()
    if dtype in _NUMPY_FLOATS:
        return found.astype(_NUMPY_FLOATS[dtype], copy=False)
    return torch.from_numpy(found).to(dtype)


def value_of(value: object) -> Value:
    """Return ``value`` as an array or a tensor. float64, the type of Python's floats, becomes torch's default
    dtype."""
    if isinstance(value, Tensor):
        return value.to(torch.get_default_dtype()) if value.dtype == torch.float64 else value
    found = np.asarray(value)
    if found.dtype == np.float64:
        return _default_float(found)
    return found if found.flags.writeable else found.copy()  # torch warns of memory that is not writable


def _observation_fields(found: object, key: tuple[str, ...] = ()) -> Values:
    """Return the leaves of an observation. Entry ``i`` of a tuple has the tuple's name and ``_i``."""
    if isinstance(found, Mapping):
        entries = [((*key, name), value) for name, value in found.items()]
    elif isinstance(found, tuple):
        *outer, last = key or ("observation",)
        entries = [((*outer, f"{last}_{i}"), value) for i, value in enumerate(found)]
    else:
        name = key if len(key) > 1 else key[0] if key else "observation"
        return {name: value_of(found)}
    return {name: leaf for key, value in entries for name, leaf in _observation_fields(value, key).items()}


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value)


def _flags_of(value: Any) -> np.ndarray[Any, Any]:
    """Return booleans as a column."""
    found: np.ndarray[Any, Any] = _numbers(value).astype(np.bool_, copy=False)[..., None]
    return found


_FALSE, _TRUE = np.array([False]), np.array([True])


def _end_fields(terminated: Any, truncated: Any, shape: tuple[int, ...]) -> Values:
    if not shape:  # shared constants: the fields of a frame are never written into
        over, cut = _TRUE if terminated else _FALSE, _TRUE if truncated else _FALSE
        return {"done": over if terminated else cut, "terminated": over, "truncated": cut}
    over, cut = _flags_of(terminated), _flags_of(truncated)
    return {"done": over | cut, "terminated": over, "truncated": cut}


_NESTED_LOOP = (
    "asyncio.run() cannot be called from a running event loop",
    "This event loop is already running",
    "Cannot run the event loop while another loop is running",
)


@contextmanager
def no_nested_loop() -> Iterator[None]:
    """Around calls of an environment: replaces asyncio's errors about nested event loops by one that says
    what to do."""
    try:
        yield
    except RuntimeError as exc:
        if not any(text in str(exc) for text in _NESTED_LOOP):
            raise
        raise InvalidArgumentError(
            "the environment starts an event loop in reset() or step(), but the worker's event loop calls "
            "these methods: make them `async def` and use `await`, or run the other event loop in a thread "
            f"of the environment ({exc})"
        ) from exc


def call_env(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of an environment; see :func:`no_nested_loop`."""
    with no_nested_loop():
        return method(*arguments, **options)


class GymnasiumEnv(Env):
    """A single Gymnasium environment."""

    def __init__(self, env: Any, device: torch.device | None = None) -> None:
        self.env = env
        self.device = device
        self._seed: int | None = None
        self._one_hot: int | None = None
        space = getattr(env, "single_action_space", None) or getattr(env, "action_space", None)
        if space is not None and type(space).__name__ == "Discrete":
            self._one_hot = int(space.n)

    async def reset(self) -> Values:
        return self._reset_fields(call_env(self.env.reset, **self._pop_seed()))

    async def step(self, step: Values) -> Values:
        return self.fields_of(call_env(self.act, step))

    def act(self, step: Values) -> Any:
        """Take the action in ``step``. Returns what the environment returns."""
        return self.env.step(self._action(step))

    def observed(self, current: Values) -> Any:
        """Return the observation: all that some policies need of what the next step begins with."""
        return current["observation"]

    def fields_of(self, found: Any) -> Values:
        """Return the fields in what the environment's ``step`` returned."""
        return self._step_fields(found)

    def set_seed(self, seed: int) -> None:
        self._seed = seed
        space = getattr(self.env, "action_space", None)
        if space is not None:
            space.seed(seed)

    def random_action(self) -> Values:
        return {"action": value_of(self.env.action_space.sample())}

    def _pop_seed(self) -> dict[str, int]:
        seed, self._seed = self._seed, None
        return {} if seed is None else {"seed": seed}

    def _action(self, step: Values) -> Any:
        action = step["action"]
        if self._one_hot is not None:
            if len(action.shape) == len(self.shape) + 1 and action.shape[-1] == self._one_hot:
                action = action.argmax(-1)
            if not self.shape:
                return int(action)
        # A copy: a policy may return the same memory each time, its own parameters or its input, which may be
        # memory of the environment. The environment may write into its action, or keep it.
        return as_array(action).copy()

    def _reset_fields(self, found: Any) -> Values:
        observation = found[0] if isinstance(found, tuple) and len(found) == 2 else found
        none: Values = {name: np.zeros((*self.shape, 1), np.bool_) for name in ENDS}
        return self._to_device(_observation_fields(observation) | none)

    def _step_fields(self, found: Any) -> Values:
        observation, reward, terminated, truncated, *_ = found
        fields = _observation_fields(observation)
        fields["reward"] = _default_float(_numbers(reward))[..., None]
        return self._to_device(fields | _end_fields(terminated, truncated, self.shape))

    def _to_device(self, fields: Values) -> Values:
        if self.device is None:
            return fields
        return {key: as_tensor(value).to(self.device) for key, value in fields.items()}


class AsyncEnv(GymnasiumEnv):
    """An environment with ``async def reset`` and ``async def step``."""

    suspends = True

    async def reset(self) -> Values:
        return self._reset_fields(await self.env.reset(**self._pop_seed()))

    async def step(self, step: Values) -> Values:
        return self.fields_of(await self.env.step(self._action(step)))

    async def close(self) -> None:
        closing = getattr(self.env, "aclose", None) or getattr(self.env, "close", None)
        if closing is not None and inspect.isawaitable(done := closing()):
            await done


class VectorEnv(GymnasiumEnv):
    """A Gymnasium vector environment, in any autoreset mode."""

    def __init__(self, env: Any, device: torch.device | None = None) -> None:
        super().__init__(env, device)
        self.shape = (int(env.num_envs),)
        mode = getattr(env, "metadata", {}).get("autoreset_mode", "NextStep")
        self._mode = str(getattr(mode, "value", mode))
        self.skips = self._mode == "NextStep"
        self._after_autoreset: Values = {}

    def fields_of(self, found: Any) -> Values:
        after = self._step_fields(found)
        if self._mode == "SameStep" and after["done"].any():
            observed = _observation_fields(found[0])
            self._after_autoreset = {key: after[key] for key in observed}
            after |= {key: copy.deepcopy(after[key]) for key in observed}
            last = found[4]["final_obs"]
            for row in as_array(after["done"])[:, 0].nonzero()[0].tolist():
                for key, value in _observation_fields(last[row]).items():
                    as_tensor(after[key])[row] = as_tensor(value)
        return after

    async def restart(self, after: Values) -> Values:
        ended = after["done"]
        if self._mode == "NextStep":
            return self.proceed(after)
        if self._mode == "SameStep":
            none = np.zeros((*self.shape, 1), np.bool_)
            return self._after_autoreset | self._to_device(dict.fromkeys(ENDS, none))
        return self._reset_fields(call_env(self.env.reset, options={"reset_mask": as_array(ended)[:, 0]}))
