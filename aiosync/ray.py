"""Async Ray actors that have their worker on their own event loop."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from functools import partial

from aiosync._deadline import Deadline, default_timeout
from aiosync.errors import NotConnectedError
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.schemes.attach import keep, serve, take_seat
from aiosync.schemes.ray import RayWeightSyncScheme

__all__ = ["WeightActorMixin"]


class WeightActorMixin:
    """For async actors: updates are received on the actor's own event loop, and committed between its awaits.
    (An actor with this among its bases is an async one; its plain methods run on the loop too.)

    Such an actor has the model, as ``self.policy`` or by ``get_model(model_id)``, and is given to
    :meth:`RayWeightSyncScheme.init_on_sender` as all others are. The sender's ``connect`` makes it a worker::

        @ray.remote
        class Roller(WeightActorMixin):
            def __init__(self):
                self.policy = make_policy()

            async def rollout(self, steps):
                async with self.pinned() as version:
                    actions = self.policy(observations)
                ...
                return batch, version
    """

    _aiosync_endpoints: dict[str, WeightReceiver] | None = None  # model id -> its receiver

    async def _receive_weights_from(
        self, scheme: RayWeightSyncScheme, model_id: str | None, worker_idx: int
    ) -> None:
        """Called by the sender, of its actors that have it."""
        self._join(scheme, model_id, worker_idx)

    def _join(self, scheme: RayWeightSyncScheme, model_id: str | None, worker_idx: int) -> None:
        again = partial(self._join, scheme, model_id, worker_idx)
        seat = take_seat(self, scheme, model_id, worker_idx, again)
        if seat is None:
            return
        receiver = scheme.create_receiver()
        endpoints = self._aiosync_endpoints
        if endpoints is None:
            # Not by vars(self), which would make each later access to the actor's attributes slower.
            endpoints = {}
            object.__setattr__(self, "_aiosync_endpoints", endpoints)
        before = endpoints.get(model_id or "policy")
        if before is not None:
            receiver.model_applier.gate = before.model_applier.gate  # it may be pinned by that
        endpoints[model_id or "policy"] = receiver
        keep(asyncio.get_running_loop().create_task(serve(scheme, seat)))

    def pinned(
        self, model_id: str = "policy", *, timeout: float | None = None
    ) -> AbstractAsyncContextManager[int]:
        """Keep the current version until the body ends: ``async with self.pinned() as version``.

        Use it around inference that awaits or runs in a thread, or that must report the version that acted.
        When the sender has gone, the model keeps its last version. ``timeout``: seconds; None: the
        environment's ``AIOSYNC_TIMEOUT``, else 120.

        Raises:
            NotConnectedError: no sender has made this actor a worker for that model.
            SyncTimeoutError: other bodies blocked a waiting commit until the timeout.
        """
        found = (self._aiosync_endpoints or {}).get(model_id)
        if found is None:
            raise NotConnectedError(f"no sender of {model_id!r} has connected to this actor yet")
        deadline = Deadline.after(default_timeout() if timeout is None else timeout)
        return found.model_applier.gate.pinned(deadline, found.applier)

    def weight_version(self, model_id: str = "policy") -> int:
        """The current version; -1 as long as no sender has connected."""
        found = (self._aiosync_endpoints or {}).get(model_id)
        return found.version if found is not None else -1

    @property
    def policy_version(self) -> int:
        """The current version of ``"policy"``; -1 as long as no sender has connected."""
        return self.weight_version()
