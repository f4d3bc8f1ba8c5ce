"""The calls of a collector that send or receive weights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.versions import AgeLimit, PolicyVersions
from aiosync.collectors.worker import POLICY, cancel_all, policy_schemes
from aiosync.errors import InvalidArgumentError, NotConnectedError, NotInitializedError, WorkerLostError
from aiosync.receiver.listeners import in_format
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.joint import atomic
from aiosync.transports._offload import abandonable
from aiosync.weights.resolve import resolve_model
from aiosync.weights.strategy import WeightStrategy

Weights: TypeAlias = Mapping[str, Any]
"""Model id -> its weights; None: those of the trainer's model."""

WorkerIds: TypeAlias = int | Sequence[int] | None
"""One worker, several, or None for all."""


class Controls:
    """Base of the collectors: the calls that send or receive weights.

    A collector has weight sync schemes, or a weight updater. It has the models, so it is the context of all
    schemes.
    """

    config: CollectorConfig
    num_workers: int
    policy: Any  # the trainer's
    _pool: Pool | None = None

    def _set_up_schemes(self, default: WeightSyncScheme) -> None:
        """Take schemes from the options. ``default``: the policy's, if none is given and it has weights."""
        config = self.config.weights
        self._updater = _make_updater(config.weight_updater)
        if self._updater is not None:
            self._updater.register_collector(self)
        self._schemes: dict[str, WeightSyncScheme] = dict(config.weight_sync_schemes or {})
        if config.weight_sync_schemes is None and self._updater is None and _has_weights(self.policy):
            self._schemes[POLICY] = default
        self._default = default
        self._upstream = dict(config.weight_recv_schemes or {})
        self._following = AsyncExitStack()  # disconnects weight_recv_schemes
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
            AttributeError: there is no such model.
        """
        return self.policy if model_id == POLICY else resolve_model(self, model_id)

    def _init_senders(self, ctx: BaseContext | None) -> None:
        """Initialise every scheme as a sender that is not one yet. Called before workers get the schemes.
        ``ctx`` is multiprocessing's context of the workers, if they are processes."""
        for model_id, scheme in self._schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self, ctx=ctx)
            elif scheme.model_id is None:
                scheme.model_id = model_id

    async def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Make this collector a worker of another collector, or of a trainer; as ``weight_recv_schemes=``.

        Args:
            weight_recv_schemes: model id -> scheme. A scheme that received a model until now is closed.
            synchronize_weights: connect the schemes, if this collector is connected; otherwise
                :meth:`receive_weights` connects them.
            timeout: seconds.

        Raises:
            Exception: what ``init_on_receiver`` and ``connect`` of a scheme raise.
        """
        for model_id, scheme in weight_recv_schemes.items():
            previous = self._upstream.get(model_id)
            if previous is not None and previous is not scheme:
                await previous.aclose()
            self._init_receiver(model_id, scheme)
            self._upstream[model_id] = scheme
        if synchronize_weights and self._pool is not None:
            await self._connect_receivers(self._connected_pool, self._deadline(timeout))

    def _init_receiver(self, model_id: str, scheme: WeightSyncScheme) -> None:
        if not scheme.initialized_on_receiver:
            index = self.config.weights.worker_idx
            scheme.init_on_receiver(model_id=model_id, context=self, worker_idx=index)

    async def _connect_receivers(self, pool: Pool, deadline: Deadline) -> None:
        """Connect those of ``weight_recv_schemes`` that are not: this collector becomes a worker of another
        collector. Raises what ``connect`` of a scheme raises."""
        for model_id, scheme in self._upstream.items():
            if scheme.synchronized_on_receiver:
                continue
            self._init_receiver(model_id, scheme)
            self._following.push_async_callback(scheme.aclose)
            await scheme.connect(timeout=deadline.remaining())
            receiving = asyncio.create_task(_receive_until_closed(scheme, pool), name="aiosync-following")
            self._following.push_async_callback(cancel_all, receiving)

    async def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        model_id: str = POLICY,
        worker_ids: int | Sequence[int] | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send weights to the workers.

        Args:
            policy_or_weights: a module, TensorDict or dict; None: the trainer's policy.
            model_id: the model that these weights belong to.
            worker_ids: a worker or several; None: all.
            weights_dict: model id -> weights. Each worker applies all of them or none.
            timeout: seconds.

        Raises:
            Exception: as :meth:`aiosync.WeightSyncScheme.send`. (A lost worker that is started again is no
                error: it begins with these weights.)
        """
        given = weights_dict if weights_dict is not None else {model_id: policy_or_weights}
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

    async def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Update this collector's own policy.

        Args:
            policy_or_weights: a module, TensorDict or dict to apply to the policy in this process;
                :meth:`update_policy_weights_` sends it to the workers. None: wait for an update through
                ``weight_recv_schemes``, which also reaches the workers. Returns without one at the timeout.
            weights: the same, as a keyword.
            policy: the same, as a keyword.
            timeout: seconds.

        Raises:
            InvalidArgumentError: weights were given twice, or although there are ``weight_recv_schemes``.
            NotInitializedError: neither weights nor ``weight_recv_schemes`` were given, or this process has
                no policy.
            LayoutMismatchError: the weights do not fit the policy.
        """
        given = [each for each in (policy_or_weights, weights, policy) if each is not None]
        if len(given) > 1:
            raise InvalidArgumentError("got several of policy_or_weights, weights and policy: expected one")
        policy_or_weights = given[0] if given else None
        deadline = self._deadline(timeout)
        if self._upstream and policy_or_weights is not None:
            raise InvalidArgumentError(
                "this collector has weight_recv_schemes: call receive_weights() without weights"
            )
        if self._upstream:
            await self._connect_receivers(self._connected_pool, deadline)
            for scheme in self._upstream.values():
                await scheme.receive(deadline.remaining())
            return
        if policy_or_weights is None:
            raise NotInitializedError(
                "receive_weights() needs weights, or a collector with weight_recv_schemes="
            )
        model = self.policy
        if not isinstance(model, nn.Module):
            raise NotInitializedError("receive_weights() needs a collector whose policy is a module")
        strategy = WeightStrategy(peft="as_is")
        strategy.apply_weights(model, strategy.extract_weights(policy_or_weights))

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
        if limit is not None and replay_buffer is not None:
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
    def worker_idx(self) -> int | None:
        """The index of this collector among the workers of another collector."""
        return self.config.weights.worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        weights = replace(self.config.weights, worker_idx=value)
        self.config = replace(self.config, weights=weights)

    @property
    def weight_updater(self) -> Any:
        """The updater that is used instead of schemes; None: there is none."""
        return self._updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._updater = _make_updater(value)
        if self._updater is not None:
            self._updater.register_collector(self)

    async def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the updater's ``init`` with these arguments; without an updater do nothing."""
        done = None if self._updater is None else self._updater.init(*args, **kwargs)
        if inspect.isawaitable(done):
            await done

    # -- sending ---------------------------------------------------------------------------------------

    async def _send_by_schemes(self, pool: Pool, given: Weights, ids: WorkerIds, seconds: float) -> None:
        if not given.keys() <= self._schemes.keys():
            unknown = sorted(given.keys() - self._schemes.keys())
            raise InvalidArgumentError(
                f"{', '.join(unknown)}: this collector has no scheme for such a model; expected some of "
                f"{', '.join(self._schemes) or 'none'}"
            )
        serving = list(pool.workers)
        try:
            if len(given) == 1:
                ((name, weights),) = given.items()
                if weights is None and self._schemes[name] is self._default:
                    weights = self.get_model(name)  # the scheme would find the same, more slowly
                ids = ids if ids is None or isinstance(ids, int) else list(ids)
                await self._schemes[name].send(weights, ids, timeout=seconds)
                return
            if ids is not None:
                raise InvalidArgumentError(
                    "weights_dict: expected no worker_ids: several models go to all workers"
                )
            chosen = {self._schemes[name]: weights for name, weights in given.items()}
            async with atomic(*chosen, timeout=seconds) as update:
                for scheme, weights in chosen.items():
                    update.send(scheme, weights)
        except WorkerLostError as exc:
            await pool.raise_unless_replaced([serving[index] for index in exc.workers], exc)

    async def _push_by_updater(self, pool: Pool, given: Weights, ids: WorkerIds, seconds: float) -> None:
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


async def _receive_until_closed(scheme: WeightSyncScheme, pool: Pool) -> None:
    """Receive until the sender closes. If the sender is lost, the collector's next call raises."""
    receiver = scheme.get_receiver()
    await receiver.run()
    if receiver.lost:
        pool.fail(WorkerLostError((), receiver.ended or "unknown"))


def _has_weights(policy: Any) -> bool:
    return isinstance(policy, nn.Module) and bool([*policy.parameters(), *policy.buffers()])


def _make_updater(given: Any) -> Any:
    is_one = callable(getattr(given, "push_weights", None)) and not isinstance(given, type)
    made = given() if callable(given) and not is_one else given
    if made is not None and not callable(getattr(made, "push_weights", None)):
        raise InvalidArgumentError(
            f"weight_updater: expected an updater with push_weights(), or a function that returns one; got "
            f"{type(made).__name__}"
        )
    return made
