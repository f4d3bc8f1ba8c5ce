"""What all weight updaters have in common. Source of names and behaviour: torchrl's WeightUpdaterBase."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from aiosync._deadline import Deadline, check_timeout, default_timeout
from aiosync.errors import InvalidArgumentError, SyncTimeoutError, WeightSourceError

__all__ = ["WeightUpdaterBase", "WorkerId", "WorkerIds", "bounded", "remaining"]

WorkerId: TypeAlias = "int | torch.device"
"""What a worker goes by."""

WorkerIds: TypeAlias = "WorkerId | Sequence[WorkerId] | None"
"""One worker, several, or None for all."""

_deadline: ContextVar[Deadline] = ContextVar("_deadline")


async def bounded(result: Any) -> Any:
    """Await what a hook returned, within the deadline of the call that asked for it.

    Raises:
        SyncTimeoutError: it passed.
    """
    deadline = _current()
    try:
        async with asyncio.timeout(deadline.remaining()) as limit:
            return await result
    except TimeoutError as exc:
        if not limit.expired() or isinstance(exc, SyncTimeoutError):
            raise  # the hook's own
        raise deadline.error("commit", hint="a worker, or a hook, did not come to an end") from exc


def remaining() -> float:
    """Seconds that the call has which asked for this."""
    return _current().remaining()


@contextmanager
def _limited(timeout: float | None) -> Iterator[None]:
    """The deadline of what is awaited inside."""
    token = _deadline.set(_after(timeout))
    try:
        yield
    finally:
        _deadline.reset(token)


def _current() -> Deadline:
    return _deadline.get(None) or _after(None)


class WeightUpdaterBase(ABC):
    """Pushes a policy's weights to workers.

    A subclass says how one worker is updated, :meth:`_sync_weights_with_worker`, and perhaps where weights
    come from (:meth:`_get_server_weights`), what is made of them (:meth:`_maybe_map_weights`), which workers
    there are (:meth:`all_worker_ids`) and which are left out now (:meth:`_skip_update`). All of these, and
    hooks, may be plain functions or coroutine functions. ``super().__init__()`` need not be called.
    """

    _may_lack_weights: ClassVar[bool] = False
    _collector_refs: list[Callable[[], Any]] | None = None
    _hooks: list[Callable[[], Any]] | None = None

    # -- what a subclass fills in ----------------------------------------------------------------------

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> Any:
        """Bring one worker up to date; without ``worker_id``, all there is."""

    def _get_server_weights(self) -> Any:
        """The weights, where none were given; None: there are none."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """What is pushed, of what was given or got: a module's weights as a TensorDict, all else as it is.

        Raises:
            WeightSourceError: it is neither a module nor a TensorDict nor a dict.
        """
        if isinstance(policy_or_weights, TensorDictBase | dict) or (
            policy_or_weights is None and self._may_lack_weights
        ):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            return TensorDict.from_module(policy_or_weights).data
        raise WeightSourceError(
            "policy_or_weights: expected an nn.Module, a TensorDict or a dict (or None, where the updater "
            f"has weights of its own), got {type(policy_or_weights).__name__}"
        )

    def all_worker_ids(self) -> Sequence[WorkerId] | None:
        """The workers; None: there is nothing to tell apart."""
        return None

    def _skip_update(self, worker_id: WorkerId) -> Any:
        """Whether a worker is left out this time."""
        return False

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self | None:
        """An updater for this policy, or None if one cannot be made of that alone."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """For subclasses that are set up later."""
        return

    # -- collectors and hooks --------------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Refer weakly to a collector, or to another object that contains the workers."""
        if self._collector_refs is None:
            self._collector_refs = []
        self._collector_refs.append(weakref.ref(collector))

    @property
    def collector(self) -> Any:
        """The collector; None: there is none, or it is gone.

        Raises:
            InvalidArgumentError: there are several.
        """
        refs = self._collector_refs or []
        if len(refs) > 1:
            raise InvalidArgumentError(f"{len(refs)} collectors are registered: see collectors")
        return refs[0]() if refs else None

    @property
    def collectors(self) -> list[Any] | None:
        """The collectors in the order in which they came, None for one that is gone; None: none came."""
        return [ref() for ref in self._collector_refs] if self._collector_refs else None

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called after each push, in order."""
        if self._hooks is None:
            self._hooks = []
        return self._hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Have ``hook()`` called after each push, after those that were registered before."""
        self.post_hooks.append(hook)

    # -- pushing ---------------------------------------------------------------------------------------

    async def push_weights(
        self, policy_or_weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Bring workers up to date, then call the hooks.

        Args:
            policy_or_weights: an ``nn.Module``, a TensorDict or a dict; None: the updater's own.
            worker_ids: a worker, several, or None for all.
            timeout: seconds for all of it; None: the environment's ``AIOSYNC_TIMEOUT``, else 120.

        Raises:
            WeightSourceError: these are no weights, or there are none.
            SyncTimeoutError: a worker, or a hook, did not come to an end.
        """
        await self._push(policy_or_weights, worker_ids, timeout)

    async def __call__(
        self, policy_or_weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """The same as :meth:`push_weights`."""
        await self._push(policy_or_weights, worker_ids, timeout)

    async def increment_version(self, *, timeout: float | None = None) -> None:
        """Have each collector count its policy's version up."""
        with _limited(timeout):
            for collector in self.collectors or ():
                if collector is not None:
                    await self._settle(collector.increment_version())

    async def aclose(self) -> None:
        """Let go of everything; idempotent."""
        return

    async def _push(
        self, policy_or_weights: Any, worker_ids: WorkerIds, timeout: float | None, **how: Any
    ) -> None:
        with _limited(timeout):
            pushing = self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids, **how)
            if inspect.iscoroutine(pushing):  # a subclass may have it as a plain function
                await pushing
            for hook in self.post_hooks:
                await self._settle(hook())

    async def _push_weights(self, *, policy_or_weights: Any, worker_ids: WorkerIds) -> None:
        """One push; hooks apart."""
        weights = policy_or_weights
        if weights is None:
            weights = await self._settle(self._get_server_weights())
        weights = await self._settle(self._maybe_map_weights(weights))
        workers = self._workers(worker_ids)
        if workers is None:
            await self._settle(self._sync_weights_with_worker(server_weights=weights))
            return
        for worker in workers:
            if not await self._settle(self._skip_update(worker)):
                await self._settle(self._sync_weights_with_worker(worker_id=worker, server_weights=weights))

    def _workers(self, worker_ids: WorkerIds) -> Sequence[WorkerId] | None:
        if worker_ids is None:
            return self.all_worker_ids()
        return [worker_ids] if isinstance(worker_ids, int | torch.device) else list(worker_ids)

    async def _settle(self, result: Any) -> Any:
        """What a hook has returned, or what came of it if that can be awaited."""
        return await bounded(result) if inspect.isawaitable(result) else result


def _after(timeout: float | None) -> Deadline:
    return Deadline.after(
        default_timeout() if timeout is None else check_timeout(timeout, f"timeout={timeout!r}")
    )
