"""Base of all weight updaters, and those of weights that this process can write to. Names as in torchrl."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from aiosync._deadline import Deadline, check_timeout, default_timeout
from aiosync.errors import (
    InvalidArgumentError,
    NotInitializedError,
    SyncTimeoutError,
    UnknownWorkerError,
    WeightSourceError,
)
from aiosync.transports._offload import offloaded
from aiosync.updaters.push_lock import PushLock, Turn
from aiosync.weights.strategy import WeightStrategy

WorkerId: TypeAlias = "int | torch.device"
"""How an updater identifies a worker."""

WorkerIds: TypeAlias = "WorkerId | Sequence[WorkerId] | None"
"""One worker, several, or None for all."""

_deadline: ContextVar[Deadline] = ContextVar("_deadline")


async def bounded(result: Any) -> Any:
    """Await the result of a hook, until the deadline of the current push (SyncTimeoutError)."""
    deadline = current_deadline()
    try:
        async with asyncio.timeout(deadline.remaining()) as limit:
            return await result
    except TimeoutError as exc:
        if not limit.expired() or isinstance(exc, SyncTimeoutError):
            raise  # the hook's own
        raise deadline.error("commit", hint="a worker or a hook did not finish") from exc


def current_deadline() -> Deadline:
    """Return the deadline of the current push."""
    return _deadline.get(None) or Deadline.after(default_timeout())


@contextmanager
def _limited(timeout: float | None) -> Iterator[None]:
    """Set the deadline of what is awaited inside."""
    seconds = default_timeout() if timeout is None else check_timeout(timeout, f"timeout={timeout!r}")
    token = _deadline.set(Deadline.after(seconds))
    try:
        yield
    finally:
        with suppress(ValueError):  # an abandoned coroutine is closed in another context than its own
            _deadline.reset(token)


class WeightUpdaterBase(ABC):
    """Pushes a policy's weights to workers, one push after the other.

    A push calls these methods, in this order:

    - :meth:`_get_server_weights`, if no weights were given;
    - :meth:`_maybe_map_weights`, which converts them;
    - :meth:`all_worker_ids`, if no workers were given;
    - for each worker :meth:`_skip_update`, and unless it returns True :meth:`_sync_weights_with_worker`;
    - the hooks of :meth:`register_post_hook`.

    A subclass must implement :meth:`_sync_weights_with_worker`. All of these methods, and the hooks, may be
    plain functions or coroutine functions. A subclass need not call ``super().__init__()``.
    """

    _may_lack_weights: ClassVar[bool] = False
    _collector_refs: tuple[Callable[[], Any], ...] = ()
    _hooks: list[Callable[[], Any]] | None = None

    # -- methods for subclasses ------------------------------------------------------------------------

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> Any:
        """Update one worker; without ``worker_id``, all of them."""

    def _get_server_weights(self) -> Any:
        """Return the updater's own weights; None if it has none."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Convert weights to the form that is pushed: a module to a TensorDict of its weights. All else is
        unchanged.

        Raises:
            WeightSourceError: the weights are neither a module nor a TensorDict nor a dict.
        """
        lacking = policy_or_weights is None and self._may_lack_weights
        if lacking or isinstance(policy_or_weights, TensorDictBase | dict):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            return TensorDict.from_module(policy_or_weights).data
        raise WeightSourceError(
            "policy_or_weights: expected an nn.Module, a TensorDict or a dict (or None, if the updater "
            f"has its own weights), got {type(policy_or_weights).__name__}"
        )

    def all_worker_ids(self) -> Sequence[WorkerId] | None:
        """Return the ids of all workers; None if workers have no ids."""
        return None

    def _skip_update(self, worker_id: WorkerId) -> Any:
        """Return whether this push skips a worker."""
        return False

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self | None:
        """Return an updater for this policy; None if the class needs more than a policy."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Set up the updater. For subclasses that are set up after their construction."""

    # -- collectors and hooks --------------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Add a weak reference to a collector, or to another object that contains the workers."""
        self._collector_refs = (*self._collector_refs, weakref.ref(collector))

    @property
    def collector(self) -> Any:
        """The collector; None if none is registered or it was garbage-collected.

        Raises:
            InvalidArgumentError: several collectors are registered.
        """
        refs = self._collector_refs
        if len(refs) > 1:
            raise InvalidArgumentError(f"{len(refs)} collectors are registered: use `collectors`")
        return refs[0]() if refs else None

    @property
    def collectors(self) -> list[Any] | None:
        """The collectors in order of registration, None for one that was garbage-collected; None if none was
        registered."""
        return [ref() for ref in self._collector_refs] if self._collector_refs else None

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """The hooks that each push calls at its end, in order."""
        if self._hooks is None:
            self._hooks = []
        return self._hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Add a hook: ``hook()`` is called at the end of each push, after the hooks added before."""
        self.post_hooks.append(hook)

    # -- pushing ---------------------------------------------------------------------------------------

    async def push_weights(
        self, policy_or_weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Update workers, then call the hooks.

        Args:
            policy_or_weights: an ``nn.Module``, a TensorDict or a dict; None: the updater's own weights.
            worker_ids: a worker, several, or None for all.
            timeout: seconds for the whole push; None: the environment variable ``AIOSYNC_TIMEOUT``, else 120.

        Raises:
            WeightSourceError: invalid weights, or none.
            SyncTimeoutError: a worker or a hook did not finish in time.
        """
        await self._push(policy_or_weights, worker_ids, timeout)

    async def __call__(
        self, policy_or_weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Same as :meth:`push_weights`."""
        await self._push(policy_or_weights, worker_ids, timeout)

    async def increment_version(self, *, timeout: float | None = None) -> None:
        """Increment the policy version of each registered collector. ``timeout``: seconds."""
        with _limited(timeout):
            for collector in self.collectors or ():
                if collector is not None:
                    await self._settle(collector.increment_version())

    async def aclose(self) -> None:
        """Release all resources; idempotent."""

    async def _push(
        self, policy_or_weights: Any, worker_ids: WorkerIds, timeout: float | None, **how: Any
    ) -> None:
        with _limited(timeout):
            # Otherwise workers could get a part of each of two pushes.
            with vars(self).setdefault("_pushing", PushLock()).turn() as turn:
                await self._wait_for(turn)
                pushing = self._push_weights(
                    policy_or_weights=policy_or_weights, worker_ids=worker_ids, **how
                )
                if inspect.iscoroutine(pushing):  # a subclass may override it with a plain function
                    await pushing
            for hook in self.post_hooks:
                await self._settle(hook())

    async def _wait_for(self, turn: Turn) -> None:
        if not turn.done():
            await bounded(asyncio.wrap_future(turn))

    async def _push_weights(self, *, policy_or_weights: Any, worker_ids: WorkerIds) -> None:
        """Push once, without the hooks."""
        weights = await self._mapped(policy_or_weights)
        workers = self._workers(worker_ids)
        if workers is None:
            await self._settle(self._sync_weights_with_worker(server_weights=weights))
            return
        for worker in workers:
            if not await self._settle(self._skip_update(worker)):
                await self._settle(self._sync_weights_with_worker(worker_id=worker, server_weights=weights))

    async def _mapped(self, weights: Any) -> Any:
        """Return the given weights, or the updater's own, in the form that is pushed."""
        if weights is None:
            weights = await self._settle(self._get_server_weights())
        return await self._settle(self._maybe_map_weights(weights))

    def _workers(self, worker_ids: WorkerIds) -> Sequence[WorkerId] | None:
        if worker_ids is None:
            return self.all_worker_ids()
        return [worker_ids] if isinstance(worker_ids, int | torch.device) else list(worker_ids)

    async def _settle(self, result: Any) -> Any:
        """Return the result of a method that may be a plain function or a coroutine function; await it if
        needed."""
        return await bounded(result) if inspect.isawaitable(result) else result


# -- updaters of weights that this process can write to ---------------------------------------------------


async def _apply(destination: Any, weights: Any) -> None:
    """Write weights in place, in a thread: all that are given, or none if one does not fit."""
    work = partial(WeightStrategy().apply_weights, destination, weights, strict=False)
    await offloaded(work, "aiosync-updater")


class VanillaWeightUpdater(WeightUpdaterBase):
    """Updates one local policy in place.

    Args:
        weight_getter: returns the weights if none are given; None: a push without weights does nothing.
        policy_weights: the policy's own weights, as a TensorDict; written in place.
    """

    _may_lack_weights = True

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: TensorDictBase
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self | None:
        """Return an updater of this policy's parameters and buffers."""
        return cls(policy_weights=TensorDict.from_module(policy).lock_())

    def _get_server_weights(self) -> Any:
        return self.weight_getter() if self.weight_getter is not None else None

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if server_weights is not None:
            await _apply(self.policy_weights, server_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Updates weights that worker processes share with this process, one worker after the other, in place. A
    worker may see half an update.

    Args:
        get_server_weights: returns the weights if none are given; None, or if it returns None: a push without
            weights does nothing.
        policy_weights: worker (a device or an index) -> its weights as a TensorDict; written in place.
    """

    _may_lack_weights = True

    def __init__(
        self, *, get_server_weights: Callable[[], Any] | None, policy_weights: Mapping[Any, TensorDictBase]
    ) -> None:
        self.weights_getter = get_server_weights
        self._policy_weights = dict(policy_weights)

    def all_worker_ids(self) -> list[Any]:
        """Return the devices or indices."""
        return list(self._policy_weights)

    def _get_server_weights(self) -> Any:
        return self.weights_getter() if self.weights_getter is not None else None

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if worker_id not in self._policy_weights:
            raise UnknownWorkerError(worker_id, list(self._policy_weights))
        if server_weights is not None:
            await _apply(self._policy_weights[worker_id], server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """For workers that update themselves: a push only checks that weights are given."""

    _may_lack_weights = True

    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> None:
        if server_weights is None:
            raise NotInitializedError(
                "a RemoteModuleWeightUpdater has no weights of its own: call push_weights(weights)"
            )
