"""Async Ray actors that have their worker on their own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiosync.errors import NotConnectedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.enlisted import enlist

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

    async def _receive_weights_from(
        self, scheme: WeightSyncScheme, model_id: str | None, worker_idx: int
    ) -> None:
        """Called by the sender, of its actors that have it."""
        if enlist(self, scheme, model_id, worker_idx, own_loop=True):
            _endpoints_of(self)[model_id or "policy"] = OnOwnLoop(scheme)

    def pinned(self, model_id: str = "policy", *, timeout: float | None = None) -> Any:
        """Keep the version in service for the length of the body: ``async with self.pinned() as version``.

        Put it around inference that awaits in its middle or runs in a thread, or whose result is to say which
        version acted. When the sender has gone, the model keeps its last version, and nothing is to be kept
        out any more.

        Args:
            model_id: the model's name.
            timeout: seconds; None: the scheme's.

        Raises:
            NotConnectedError: no sender has made this actor a worker for that model.
            SyncTimeoutError: a waiting commit was held up by other bodies until the timeout.
        """
        return _pinned(self._scheme_of(model_id), timeout)

    def weight_version(self, model_id: str = "policy") -> int:
        """The version in service; -1 as long as no sender has connected."""
        found = _endpoints_of(self).get(model_id)
        return found.version if found is not None else -1

    @property
    def policy_version(self) -> int:
        """The version of ``"policy"`` in service; -1 as long as no sender has connected."""
        return self.weight_version()

    def _scheme_of(self, model_id: str) -> OnOwnLoop:
        found = _endpoints_of(self).get(model_id)
        if found is None:
            raise NotConnectedError(f"no sender of {model_id!r} has connected to this actor yet")
        return found


class OnOwnLoop:
    """An actor's worker, on the actor's loop.

    Args:
        scheme: initialised on the receiver.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self.scheme = scheme
        self._receiver = scheme.create_receiver()

    @property
    def version(self) -> int:
        """The version in service, or that was when the sender went."""
        return self._receiver.version

    @property
    def live(self) -> bool:
        """Whether the sender is there."""
        return self.scheme.synchronized_on_receiver


def _endpoints_of(actor: WeightActorMixin) -> dict[str, OnOwnLoop]:
    found: dict[str, OnOwnLoop] = vars(actor).setdefault("_aiosync_endpoints", {})
    return found


@asynccontextmanager
async def _pinned(endpoint: OnOwnLoop, timeout: float | None) -> AsyncIterator[int]:
    if not endpoint.live:
        yield endpoint.version
        return
    async with endpoint.scheme.pinned(timeout) as version:
        yield version
