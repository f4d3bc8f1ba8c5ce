"""The calls of a collector that send or receive weights."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from multiprocessing.context import BaseContext
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.versions import AgeLimit, PolicyVersions
from aiosync.collectors.weight_sources import (
    PoliciesMadeHere,
    Weights,
    WorkersOrDevices,
    has_weights,
    indices_of,
    make_updater,
    weights_by_model,
)
from aiosync.collectors.worker import policy_schemes
from aiosync.collectors.worker_spec import POLICY
from aiosync.errors import (
    InvalidArgumentError,
    NotConnectedError,
    UnknownModelError,
    WorkerLostError,
)
from aiosync.events import logger
from aiosync.receiver.listeners import in_format
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.joint import atomic
from aiosync.transports._offload import abandonable
from aiosync.weights.resolve import resolve_model
from aiosync.weights.strategy import WeightStrategy


class Controls:
    """Base of the collectors: the calls that send or receive weights.

    A collector has weight sync schemes, or a weight updater. It has the models, so it is the context of all
    schemes.
    """

    config: CollectorConfig
    num_workers: int
    policy: Any  # the trainer's
    policy_factory: list[Callable[[], Any] | None]  # one per worker
    _pool: Pool | None = None

    def _set_up_schemes(self, default: WeightSyncScheme) -> None:
        """Take schemes from the options. ``default``: the policy's, if none is given and it has weights."""
        config = self.config.weights
        self._updater = make_updater(config.weight_updater)
        if self._updater is not None:
            self._updater.register_collector(self)
        self._schemes: dict[str, WeightSyncScheme] = dict(config.weight_sync_schemes or {})
        self._default = default
        self._why_no_default = ""  # why the policy's weights cannot be sent; for an error message
        self._ask_factory = False  # the policy of policy_factory decides whether there is a default scheme
        if not self._schemes and self._updater is None:
            self._ask_factory = self.policy is None and all(self.policy_factory)
            if has_weights(self.policy):
                self._schemes[POLICY] = default
        self._upstream = dict(config.weight_recv_schemes or {})
        self._following = AsyncExitStack()  # disconnects weight_recv_schemes
        self._sending = AsyncExitStack()  # closes the schemes that send, once the workers have ended
        self._versions = PolicyVersions(self.config.policy.track_policy_version)
        self._extra_updates = self._versions.first  # updates of the policy that no scheme counts
        self._age_limit: AgeLimit | None = None

    @property
    def _connected_pool(self) -> Pool:
        if self._pool is None:
            raise NotConnectedError("no workers: call connect() first, or use `async with`")
        self._pool.check()
        return self._pool

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self.config.processes.seconds if timeout is None else timeout)

    def get_model(self, model_id: str = POLICY) -> Any:
        """Return the trainer's model with this id.

        Raises:
            InvalidArgumentError: ``model_id`` is ``"policy"``, and the collector has no policy.
            AttributeError: there is no such model.
        """
        if model_id != POLICY:
            return resolve_model(self, model_id)
        if self.policy is None:
            raise InvalidArgumentError(
                "model_id='policy': this collector has no policy in this process: give policy="
            )
        return self.policy

    def _init_senders(self, ctx: BaseContext | None) -> None:
        """Initialise every scheme as a sender that is not one yet. Called before workers get the schemes.
        ``ctx`` is multiprocessing's context of the workers, if they are processes."""
        if self._ask_factory:
            self._init_by_factory(ctx)
        for model_id, scheme in self._schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self, ctx=ctx)
            elif scheme.model_id is None:
                scheme.model_id = model_id
            self._sending.push_async_callback(scheme.aclose)

    def _init_by_factory(self, ctx: BaseContext | None) -> None:
        """Send the weights of the policy that ``policy_factory`` makes in this process, if it has any.

        They are version 0 of all workers, whose policies may begin with random weights. A factory that fails
        here may succeed in the workers, so its error is raised by the first update only.
        """
        try:
            made = PoliciesMadeHere(self.policy_factory, self.num_workers, self.policy_device)
        except Exception as exc:  # noqa: BLE001 - any exception of the factory
            self._why_no_default = f"policy_factory failed in this process: {type(exc).__name__}: {exc}"
            logger.warning("%s; no weights can be sent to the workers", self._why_no_default)
            return
        if made.can_be_sent:
            self._default.init_on_sender(model_id=POLICY, context=made, ctx=ctx)
            self._schemes[POLICY] = self._default
        else:
            self._why_no_default = "policy_factory returns no modules with the same weights in all workers"

    async def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: WorkersOrDevices = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Send weights to the workers.

        Args:
            policy_or_weights: a module, TensorDict or dict; None: the trainer's policy.
            weights: the same, as a keyword.
            policy: the same, as a keyword.
            worker_ids: a worker or several, by their indices or by the devices of their policies; None: all.
            model_id: the model that these weights belong to; None: ``"policy"``.
            weights_dict: model id -> weights. Each worker applies all of them or none.
            timeout: seconds.
            policy_weights: deprecated name of ``policy_or_weights``.

        Raises:
            InvalidArgumentError: arguments that exclude each other.
            UnknownModelError: no scheme sends this model.
            UnknownWorkerError: there is no such worker.
            Exception: as :meth:`aiosync.WeightSyncScheme.send`. (A lost worker that is started again is no
                error: it begins with these weights.)
        """
        if policy_weights is not None:
            warnings.warn(
                "policy_weights is deprecated: use policy_or_weights", DeprecationWarning, stacklevel=2
            )
        sources = {"weights": weights, "policy": policy, "policy_weights": policy_weights}
        given = weights_by_model(policy_or_weights, sources, model_id, weights_dict)
        seconds = self.config.processes.seconds if timeout is None else timeout
        send = self._send_by_schemes if self._updater is None else self._push_by_updater
        try:
            await send(self._connected_pool, given, worker_ids, seconds)
        finally:
            self._name_versions()  # a version of which one worker failed was published too

    @property
    def _version_number(self) -> int:
        """The number of the newest version, that workers tag frames with; 0 if the policy has no weights."""
        versions = [scheme.version for scheme in policy_schemes(self._schemes)]  # -1: not connected yet
        return self._extra_updates + max([0, *versions])

    def _name_versions(self) -> None:
        if self._versions.tracker is not None:
            self._versions.advance(self._version_number)
        if self._age_limit is not None:
            self._age_limit.update()

    @property
    def policy_version(self) -> Any:
        """The newest version of the policy: an integer; or a string, if ``track_policy_version`` is a tracker
        of UUIDs; or None with ``track_policy_version=False``. 0 if the policy has no weights."""
        self._name_versions()
        return self._versions.name(self._version_number)

    def get_policy_version(self) -> Any:
        """Return :attr:`policy_version`."""
        return self.policy_version

    @property
    def policy_version_tracker(self) -> Any:
        """The tracker that ``track_policy_version`` was given; None: there is none."""
        return self._versions.tracker

    @property
    def acknowledged_versions(self) -> dict[int, Any]:
        """Worker -> the version of the policy that it has acknowledged last; None: it has acknowledged none.

        Raises:
            NotConnectedError: the workers have not been started.
        """
        self._connected_pool  # noqa: B018 - raises
        self._name_versions()
        states = [scheme.get_sender().workers for scheme in policy_schemes(self._schemes)]
        found: dict[int, Any] = {}
        for worker in range(self.num_workers):
            version = max((each[worker].version for each in states if worker in each), default=0)
            found[worker] = None if version < 0 else self._versions.name(self._extra_updates + version)
        return found

    async def increment_version(self, timeout: float | None = None) -> None:
        """Increment the policy's version, after weights reached the workers without this collector. Later
        frames are tagged with the new version. ``timeout``: seconds.
        """
        await self._count_update(self._connected_pool, self._deadline(timeout))

    async def _count_update(self, pool: Pool, deadline: Deadline) -> None:
        self._extra_updates += 1
        await self._publish_extra_updates(pool, deadline)

    async def _publish_extra_updates(self, pool: Pool, deadline: Deadline) -> None:
        pool.extra_updates = self._extra_updates
        self._name_versions()
        each = {worker.index: [self._extra_updates] for worker in pool.workers}
        await pool.call("set_extra_updates", each, deadline)

    def _published_weights(self, model_id: str) -> dict[str, Tensor] | None:
        """Return a copy of the weights that were sent last, by their names; None if none were sent."""
        scheme = self._schemes.get(model_id)
        if scheme is None or scheme.version < 0:
            return None
        published = scheme.get_sender().weights_in_use
        return None if published is None else {name: value.clone() for name, value in published.items()}

    def _limit_age(self) -> None:
        """Let ``max_staleness`` hold for what the replay buffer samples."""
        limit, replay_buffer = self.config.weights.max_staleness, self.config.replay.replay_buffer
        if replay_buffer is not None:
            self._age_limit = AgeLimit(replay_buffer, limit, lambda: self._version_number)

    def get_cached_weights(self, model_id: str = POLICY) -> TensorDictBase | None:
        """Return a copy of the weights that were sent last; None if none were sent."""
        published = self._published_weights(model_id)
        if published is None:
            return None
        found = in_format(WeightStrategy(extract_as="tensordict"), published)
        assert isinstance(found, TensorDictBase)
        return found

    @property
    def policy_device(self) -> list[Any] | None:
        """The device of each worker's policy; None if no device was given."""
        each = [self.config.devices.of(worker).policy for worker in range(self.num_workers)]
        return each if any(device is not None for device in each) else None

    @property
    def weight_updater(self) -> Any:
        """The updater that is used instead of schemes; None: there is none."""
        return self._updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._updater = make_updater(value)
        if self._updater is not None:
            self._updater.register_collector(self)

    async def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the updater's ``init`` with these arguments; without an updater do nothing."""
        done = None if self._updater is None else self._updater.init(*args, **kwargs)
        if inspect.isawaitable(done):
            await done

    # -- sending ---------------------------------------------------------------------------------------

    async def _send_by_schemes(
        self, pool: Pool, given: Weights, ids: WorkersOrDevices, seconds: float
    ) -> None:
        if not given.keys() <= self._schemes.keys():
            unknown = sorted(given.keys() - self._schemes.keys())
            raise UnknownModelError(unknown, list(self._schemes), self._why_no_default)
        if ids is not None:
            ids = indices_of(ids, self.policy_device, self.num_workers)
        serving = list(pool.workers)
        try:
            if len(given) == 1:
                ((name, weights),) = given.items()
                if weights is None and self.policy is not None and self._schemes[name] is self._default:
                    weights = self.get_model(name)  # the scheme would find the same, more slowly
                await self._schemes[name].send(weights, ids, timeout=seconds)
                return
            chosen = {self._schemes[name]: weights for name, weights in given.items()}
            async with atomic(*chosen, worker_ids=ids, timeout=seconds) as update:
                for scheme, weights in chosen.items():
                    update.send(scheme, weights)
        except WorkerLostError as exc:
            await pool.raise_unless_replaced([serving[index] for index in exc.workers], exc)

    async def _push_by_updater(
        self, pool: Pool, given: Weights, ids: WorkersOrDevices, seconds: float
    ) -> None:
        if given.keys() != {POLICY}:
            raise InvalidArgumentError(
                f"a weight_updater updates {POLICY!r} only, got {', '.join(sorted(given))}"
            )
        push, weights, deadline = self._updater.push_weights, given[POLICY], Deadline.after(seconds)
        if inspect.iscoroutinefunction(push):
            await push(weights, ids, timeout=deadline.remaining())
        else:
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await abandonable(lambda: push(weights, ids), "aiosync-updater")
            except TimeoutError as exc:
                raise deadline.error("commit", hint="the updater has not returned") from exc
        await self._count_update(pool, deadline)
