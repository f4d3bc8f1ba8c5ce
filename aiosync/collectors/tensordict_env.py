"""The adapter for torchrl's environments. Which fields are actions, rewards and end flags, at the root or
nested, is read from the environment's specs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.collectors.batch_config import BatchConfig
from aiosync.collectors.env import (
    MASK,
    TRAJ_IDS,
    Ends,
    Env,
    Fields,
    Key,
    Nested,
    Value,
    Values,
    as_tensor,
    as_tensors,
    call_env,
    flatten,
    unflatten,
)
from aiosync.errors import OptionConflictError

_INPUT = ("observation", "done", "state")
_SPECS = (*_INPUT, "reward", "action")


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _sibling(key: Key, name: str) -> Key:
    """Return ``key`` with another last name."""
    return name if isinstance(key, str) else (*key[:-1], name)


class TensorDictEnv(Env):
    """A torchrl environment.

    The TensorDict that the environment returned last goes into its next step, so entries that are no fields
    of a frame, or that only ``reset`` returns, are still there. torchrl's collectors do the same.
    """

    whole = True

    def __init__(self, env: Any, device: torch.device | None = None) -> None:
        self.env = env if device is None else env.to(device)
        self.device = self.env.device
        self.shape = tuple(env.batch_size)
        self.action_keys = tuple(env.action_keys)
        self.observation_keys = tuple(env.observation_keys)
        self._specs = {name: getattr(env, f"full_{name}_spec") for name in _SPECS}
        self.nested = _nested(self._specs.values(), len(self.shape))
        # The fields that a step begins with.
        self._known = {key for name in _INPUT for key in self._specs[name].keys(True, True)}
        leaves = [leaf for spec in self._specs.values() for leaf in spec.values(True, True)]
        self.dynamic = any(leaf.dtype is None or -1 in leaf.shape for leaf in leaves)  # None: no tensor
        self._done_keys: list[Key] = list(env.done_keys)
        self.ends = _ends(self._done_keys)
        self.truncated = _truncated(self._done_keys)
        (first, *others) = self.ends
        shape = tuple(self._specs["done"][first.done].shape)
        # Whether "done" alone says whether episodes have ended.
        self._plain = not others and not first.within and first.done == "done" and shape == (*self.shape, 1)
        self._resets = True  # whether the environment begins the next episodes in the same call as a step
        self._hooked = False  # whether, otherwise, it has hooks to call between a step and a reset
        self._limited = 0  # max_frames_per_traj
        # The fields that the collector adds to a step.
        self._tags: set[Key] = {"policy_version", TRAJ_IDS, MASK}
        self._added: tuple[Ends, ...] = ()  # whose truncated key only max_frames_per_traj writes
        self._root: TensorDictBase | None = None  # the input of the next step, without what the policy adds
        self._fields: Values = {}  # of self._root
        # Whether it returns entries that are no fields; None: it has returned nothing yet.
        self._hides: bool | None = None
        # Whether the input of a step has no entries but fields, and need not be kept; None: not known yet.
        self._only_fields: bool | None = None
        self._first: frozenset[Key] = frozenset()  # the keys of the first reset, or of a loaded state
        self._stepped: TensorDictBase | None = None  # what step() of the environment returned last
        self._leaves: Fields = {}  # of its "next"
        # What the policy has added and may read in the next step, also in the next episode, as in torchrl.
        self._kept: Values = {}
        self._not_kept: Set[Key] = frozenset()

    def configure(self, config: BatchConfig) -> None:
        self._limited = limit = config.step_limit
        special = _steps_specially(self.env)
        self._resets = special and config.reset_when_done and not limit
        self._hooked = special and not self._resets and _has_hooks(self.env)
        keys = [key for spec in self._specs.values() for key in spec.keys(True, True)]
        counted = [key for key in keys if _path(key)[-1] == "step_count"]
        if limit and counted:
            raise OptionConflictError(
                f"max_frames_per_traj={limit}: the environment counts steps itself, in {counted[0]!r}: set "
                "the limit in its StepCounter instead"
            )
        if limit:
            self._added = tuple(each for each in self.ends if each.truncated not in self._done_keys)
            self._tags |= {each.step_count for each in self.ends} | {each.truncated for each in self._added}
            self.truncated = _truncated([*self._done_keys, *(each.truncated for each in self._added)])
        if config.set_truncated and not self.truncated:
            raise OptionConflictError(
                f"set_truncated=True: the environment has no truncated key, only {self._done_keys}: call its "
                "add_truncated_keys(), or give max_frames_per_traj="
            )

    async def reset(self) -> Values:
        self._root = call_env(self.env.reset)
        found = self._flatten(self._root)
        self._first = self._first or frozenset(found)
        for key, value in self._kept.items():
            if key not in found:
                self._root.set(key, value)
        self._fields = fields = self._kept | found
        for each in self._added:
            fields[each.truncated] = torch.zeros_like(as_tensor(fields[each.done]))
        return fields

    async def step(self, step: Values) -> Values:
        found = Values(self._step(self._input(step)))
        return found if self._limited else self.truncated_at(found)

    def truncated_at(self, after: Values) -> Values:
        if not self._hooked:
            return after
        root = self._next_input(after)
        self._stepped, self._root = self.env._post_step_mdp_hooks(self._stepped, root)
        assert self._stepped is not None
        self._leaves = self._flatten(self._stepped.get("next"))
        return self._leaves | {key: after[key] for key in self._tags & after.keys()}

    @property
    def carried(self) -> Set[Key] | None:
        """The fields that a step begins with, if they are all that it needs and all are below ``"next"`` of
        the step before; None: otherwise."""
        return self._first if self._only_fields and self._plain and not self.nested else None

    def act(self, chosen: Values) -> Fields:
        """Take a step that begins with the fields of :meth:`proceed`, and with those that the policy added.
        Returns the fields below ``"next"``. Requires :attr:`carried`."""
        copies: Values = {key: as_tensor(value).clone() for key, value in chosen.items()}
        step = self._fields | copies
        self._keep(step)
        return self._step(self._unflatten(step))

    def fields_of(self, found: Fields) -> Values:
        """Return what :meth:`act` returned."""
        return Values(found)

    def observed(self, current: Values) -> Values:
        """Return the fields that the next step begins with: all that a policy may need."""
        return current

    def _step(self, root: TensorDictBase) -> Fields:
        if self._resets:
            self._stepped, self._root = call_env(self.env.step_and_maybe_reset, root)
        else:
            self._stepped, self._root = call_env(self.env.step, root), None
        self._leaves = self._flatten(self._stepped.get("next"))
        if self._only_fields is None:
            fields = not self._resets and not self._hooked and self._first <= self._leaves.keys()
            self._only_fields = fields and _is_flat(root)
        return self._leaves

    def _flatten(self, data: TensorDictBase) -> Fields:
        """Return the leaves that are fields: not those with a leading underscore, as in torchrl."""
        found = flatten(data)
        if self._hides is None:
            self._hides = any(key[0][0] == "_" for key in found)
        return {key: value for key, value in found.items() if key[0][0] != "_"} if self._hides else found

    def _input(self, step: Values) -> TensorDictBase:
        """Return the input of a step: what the environment returned last, with what the policy has added."""
        root = self._root_of(step)
        # Copies: a policy may return the same memory each time, or its own parameters.
        chosen: Values = {
            key: as_tensor(value).clone()
            for key, value in step.items()
            if self._fields.get(key) is not value and key not in self._tags
        }
        step = {key: value for key, value in step.items() if key not in self._tags} | chosen
        if root is None:
            self._first = self._first or frozenset(key for key in step if key in self._known)
            root = self._unflatten(step)
        else:
            for key, value in chosen.items():
                root.set(key, value)
        self._keep(step)
        return root

    def _root_of(self, current: Values) -> TensorDictBase | None:
        """Return the TensorDict that has these fields, if it is kept: it is not if a state was loaded."""
        done = self.ends[0].done
        return self._root if self._fields.get(done) is current[done] else None

    def _keep(self, step: Values) -> None:
        """Remember what the policy may read again of the input of a step."""
        if not self._not_kept:
            self._not_kept = self._first | self._tags
        keys = [key for key in step if key not in self._not_kept and (key[0] != "next" or key == "next")]
        self._kept = {key: step[key] for key in keys}

    @property
    def kept(self) -> Set[Key]:
        return self._kept.keys()

    def _unflatten(self, fields: Values) -> TensorDictBase:
        data = unflatten(as_tensors(fields), self.shape, self.nested)
        return data if self.device is None else data.to(self.device)

    def ended(self, after: Values) -> Value:
        if self._plain:
            return after["done"].reshape(self.shape)
        each = [as_tensor(after[key]).reshape(*self.shape, -1).any(-1) for key in self._done_keys]
        return torch.stack(each).any(0)

    def proceed(self, after: Values) -> Values:
        if self._only_fields:
            self._fields = self._kept | {key: value for key, value in after.items() if key in self._first}
        else:
            if self._root is None:
                self._root = self.env.step_mdp(self._stepped)
            self._fields = self._fields_of(self._root, after)
        for each in self._added:
            self._fields[each.truncated] = after[each.truncated]
        return self._fields

    def _fields_of(self, root: TensorDictBase, after: Values) -> Values:
        # An entry of "next" that continues as the next observation is the same tensor; in `after`
        # max_frames_per_traj may have replaced it.
        return {
            key: after[key] if self._leaves.get(key) is value else value
            for key, value in self._flatten(root).items()
            if key not in self._tags or key in self._first
        }

    async def restart(self, after: Values) -> Values:
        if not self._resets:
            root = self._next_input(after) if self._root is None else self._root
            self._root = call_env(self.env.maybe_reset, root)
        assert self._root is not None
        self._leaves = {}  # it is a new episode
        self._fields = fields = self._fields_of(self._root, after)
        for each in self._added:
            fields[each.truncated] = torch.zeros_like(as_tensor(after[each.truncated]))
        return fields

    def _next_input(self, after: Values) -> TensorDictBase:
        """Return the input of the next step if no episode has ended."""
        if self._only_fields:
            return self._unflatten(self._kept | {key: after[key] for key in self._first})
        assert self._stepped is not None
        for each in self.ends if self._limited else ():
            for key in (each.done, each.truncated, *each.within):
                self._stepped.set(("next", *_path(key)), after[key])
        root: TensorDictBase = self.env.step_mdp(self._stepped)
        return root

    def random_action(self, current: Values) -> Values:
        root = self._root_of(current)
        if root is None:
            given = self._unflatten({key: value for key, value in current.items() if key not in self._tags})
        else:
            given = root.copy()
        found = self.env.rand_action(given)  # which may read a mask of actions, and adds the action
        return {key: found.get(key) for key in self.action_keys}

    def set_seed(self, seed: int) -> None:
        self.env.set_seed(seed)

    async def close(self) -> None:
        if not self.env.is_closed:
            self.env.close()


def load_env_state(env: Any, saved: Any) -> list[str]:
    """Load a ``state_dict`` of an environment. Returns what of it could not be loaded."""
    if not saved:
        return []
    if not isinstance(env, nn.Module):
        return [f"env_state_dict: the environment, a {type(env).__name__}, has no state_dict"]
    # torchrl's collector appends a transform: the state of a single one gets this prefix.
    added, own = "transforms.0.", env.state_dict()
    if all(name.startswith(added) for name in saved) and not any(name.startswith(added) for name in own):
        saved = {name.removeprefix(added): value for name, value in saved.items()}
    try:
        env.load_state_dict(saved)
    except (RuntimeError, KeyError) as exc:
        return [f"env_state_dict: {exc}"]
    return []


def _is_flat(data: TensorDictBase) -> bool:
    """Return whether all entries but TensorDicts are tensors."""
    values = (data.get(key) for key in data.keys(True))
    return all(isinstance(value, Tensor | TensorDictBase) for value in values)


def _has_hooks(env: Any) -> bool:
    """Return whether an environment or one of its transforms has a ``_post_step_mdp_hooks`` of its own."""
    name, passing_on = "_post_step_mdp_hooks", ("Transform.", "Compose.", "TransformedEnv.")
    found = [vars(each).get(name) or getattr(type(each), name, None) for each in env.modules()]
    return any(hook is not None and not hook.__qualname__.startswith(passing_on) for hook in found)


def _steps_specially(env: Any) -> bool:
    """Return whether ``step_and_maybe_reset()`` of an environment does more than one after the other of its
    ``step()``, ``step_mdp()`` and ``maybe_reset()``, which is slower."""
    base: Any = next(cls for cls in type(env).__mro__ if "maybe_reset" in vars(cls))
    own = type(env).step_and_maybe_reset is not base.step_and_maybe_reset
    hooks = ("_post_step_mdp_hooks", "_torchrl_native_autoreset", "_compiled_step_and_maybe_reset")
    # Not getattr(env, ...): some environments look names up in environments that they have not made yet.
    return own or any(vars(env).get(name) or getattr(type(env), name, None) for name in hooks)


def _nested(specs: Any, dims: int) -> Nested:
    """Return the batch dimensions of nested entries beside the first ``dims``, by prefix, outer first."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for spec in specs:
        leaves = set(spec.keys(True, True))
        for key in spec.keys(True):
            if key not in leaves and (more := tuple(spec[key].shape)[dims:]):
                found[_path(key)] = more
    each = dict(sorted(found.items(), key=lambda entry: len(entry[0])))
    return each | {("next", *prefix): more for prefix, more in each.items()}


def _ends(done_keys: Sequence[Key]) -> tuple[Ends, ...]:
    """Return the ends that decide whether episodes end. Ends at one level decide for all levels below."""
    prefixes = sorted({_path(key)[:-1] for key in done_keys}, key=lambda prefix: (len(prefix), prefix))
    found: list[Ends] = []
    roots: list[tuple[str, ...]] = []
    for prefix in prefixes:
        if any(prefix[: len(root)] == root for root in roots):
            continue
        roots.append(prefix)
        depth = len(prefix)
        below = [key for key in done_keys if len(_path(key)) > depth + 1 and _path(key)[:depth] == prefix]
        within = tuple(key for key in below if _path(key)[-1] in ("done", "truncated"))
        done: Key = (*prefix, "done") if prefix else "done"
        found.append(Ends(done, _sibling(done, "truncated"), _sibling(done, "step_count"), within))
    return tuple(found)


def _truncated(done_keys: Sequence[Key]) -> tuple[tuple[Key, Key], ...]:
    each = dict.fromkeys(key for key in done_keys if _path(key)[-1] == "truncated")
    return tuple((key, _sibling(key, "done")) for key in each)
