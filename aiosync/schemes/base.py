"""The scheme: the recipe for keeping one model's weights in step, and the way to its live endpoints."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, Self

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint
from aiosync._resource import AsyncResource
from aiosync.errors import (
    AlreadyConnectedError,
    ForkedEndpointError,
    InvalidArgumentError,
    NotInitializedError,
)
from aiosync.receiver.listeners import in_format, weakly
from aiosync.reports import SendReport
from aiosync.schemes.contexts import listener_for, watching_start
from aiosync.schemes.endpoints import SchemeEndpoints
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.sharded.gather import ShardContributor
from aiosync.sender.worker_plan import SenderPlan, model_of
from aiosync.weights.strategy import WeightStrategy

__all__ = ["WeightSyncBackend", "WeightSyncScheme"]

WeightSyncBackend = Literal[
    "none",
    "direct",
    "shared",
    "thread",
    "process",
    "multiprocessing",
    "tcp",
    "distributed",
    "rpc",
    "ray",
    "ray_module",
    "memory",
]


class WeightSyncScheme(SchemeEndpoints, AsyncResource):
    """Keeps ONE model's weights in workers in step with a trainer's.

    A scheme is a recipe: it can be pickled, and each process makes of it the one endpoint that it
    needs. In the trainer call :meth:`init_on_sender`, hand the scheme to the workers, :meth:`connect`
    and :meth:`send`. In a worker call :meth:`init_on_receiver` and :meth:`connect`, and run
    :meth:`receiving` beside the environment loop.

    Weights must not be changed while a ``send`` is under way: it copies them in another thread.

    Args:
        strategy: ``"tensordict"`` or ``"state_dict"``: the form in which weights are handed to the
            context and returned by :meth:`receive`.
        sync: whether :meth:`send` waits by default until the workers have applied the weights.
        timeout: seconds that a call may take by default; None: the environment's
            ``AIOSYNC_TIMEOUT``, else 120.
        cast: a floating dtype to which floating tensors are narrowed on the way.
        commit: ``"flip"`` re-points a worker's parameters at the new memory, in microseconds;
            ``"copy"`` writes into the memory that they have (for CUDA graphs and raw pointers), which
            takes one copy of the weights on the worker's loop.
        on_failure: ``"raise"``: a send updates the healthy workers and then raises; ``"drop"``: workers
            that were lost or missed the deadline leave the set, and the report lists them.
        per_worker_weights: whether each worker has a copy of its own, and may get weights of its own
            (``send({0: w0, 1: w1})``).
        max_slots: how many versions the shared memory may hold, at least 2. A worker that hangs, or
            that later sends are not addressed to, does not count.
        first_version: the number of the first version that a sender publishes, an integer >= 0. A trainer
            that goes on from a checkpoint gives the number after the one that it saved.
        min_workers: on the sender, how many workers :meth:`connect` waits for: an integer >= 0; None: all of
            ``num_workers``, or 1 where they are taken as they come. With 0 ``async with scheme`` starts with
            no worker there.
    """

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """Make the scheme that goes by this name.

        Args:
            backend: ``none`` or ``direct``, ``shared`` or ``thread``, ``process`` or
                ``multiprocessing``, ``tcp``, ``distributed``, ``rpc``, ``ray``, ``ray_module``, ``memory``.
            kwargs: its constructor's arguments.

        Raises:
            InvalidArgumentError: there is no such backend.
        """
        try:
            found = cls._registry[backend]
        except KeyError:
            raise InvalidArgumentError(
                f"unknown backend {backend!r}: expected one of {', '.join(sorted(cls._registry))}"
            ) from None
        assert issubclass(found, WeightSyncScheme)
        return found(**kwargs)

    # -- connect -------------------------------------------------------------------------------------

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        min_workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Meet the other side. The sender hands out version 0 and waits until every worker runs on it;
        a worker puts it in service.

        Args:
            worker_idx: on a worker, its index, if ``init_on_receiver`` was not told.
            weights: on the sender, what to send as version 0 instead of what ``init_on_sender`` said.
            min_workers: on the sender, how many workers are enough; None: the scheme's ``min_workers``. The
                others may come later.
            timeout: seconds; None: the scheme's.

        Raises:
            NotInitializedError: neither ``init_on_sender`` nor ``init_on_receiver`` was called.
            AlreadyConnectedError: connected already.
            SyncTimeoutError: the other side did not come; on the sender ``connect`` may be called again.
            LayoutMismatchError: the weights do not fit the worker's model; both sides are told.
            WorkerLostError, HandshakeError: on a worker, there is no sender or it refused.
        """
        deadline = self._deadline(timeout)
        if self._pid != os.getpid():
            raise ForkedEndpointError(
                "this scheme was initialised in the parent process: call init_on_receiver() here first"
            )
        if self._synchronized:
            raise AlreadyConnectedError("connect() was called before and succeeded")
        if self._plan is not None:
            if worker_idx is not None:
                raise InvalidArgumentError("worker_idx belongs to a receiver; this is the sender")
            await self._connect_sender(self._plan, weights, min_workers, deadline)
        elif self._role == "receiver":
            if weights is not None or min_workers is not None:
                raise InvalidArgumentError("weights and min_workers belong to the sender; this is a receiver")
            receiver = self.create_receiver(worker_idx=worker_idx)
            try:
                await receiver.connect(deadline)
            except BaseException:
                self._endpoint = Endpoint()
                raise
            self._worker_idx = receiver.worker_idx
        else:
            raise NotInitializedError("call init_on_sender() or init_on_receiver() before connect()")
        self._synchronized = True

    async def _connect_sender(
        self, plan: SenderPlan, weights: Any, min_workers: int | None, deadline: Deadline
    ) -> None:
        if isinstance(self._endpoint, ShardContributor):
            await self._endpoint.connect(weights, deadline)
            return
        sender = self.create_sender()
        enough = self._spec.min_workers if min_workers is None else min_workers
        if enough is None and plan.elastic:
            enough = 1
        with watching_start(self.context, sender.registry):
            await sender.connect(weights, deadline, min_workers=enough, before=self._before_connect)

    async def _before_connect(self, weights: Any, deadline: Deadline) -> Any:
        """What else the sender has to do; returns what to send as version 0, if it was given or found."""
        return weights

    # -- sending -------------------------------------------------------------------------------------

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        wait: bool | None = None,
        strict: bool = True,
        timeout: float | None = None,
    ) -> SendReport:
        """Publish the next version.

        Where workers refuse, are lost or do not answer in time, the others are updated all the same; the
        error that is raised then says in its ``report`` who.

        Args:
            weights: an ``nn.Module``, TensorDict, dict (flat or nested), a dotted path on the context,
                or None for the model or context that ``init_on_sender`` was given. With
                ``per_worker_weights`` also a dict of worker -> weights.
            worker_ids: whom to update: None for all, an index or a list.
            wait: whether to return only when they have applied it; None: the scheme's ``sync``.
            strict: whether every entry has to be there. Otherwise a subset will do (adapters, one
                head), and the rest keep their values.
            timeout: seconds; None: the scheme's.

        Returns:
            What each worker did. Without waiting, that it was told.

        Raises:
            NotConnectedError: ``connect`` first.
            UnknownWorkerError: a worker that this scheme does not serve.
            LayoutMismatchError: the weights do not fit; found here, nothing was sent.
            RemoteApplyError, LayoutMismatchError: a worker refused and kept what it had.
            WorkerLostError: workers are gone.
            SyncTimeoutError: workers did not answer in time.
        """
        deadline = Deadline.after(self._spec.seconds(timeout))
        wait = self._spec.sync if wait is None else wait
        return await self._sending().send(weights, worker_ids, wait=wait, strict=strict, deadline=deadline)

    async def wait_ack(
        self, worker_ids: int | list[int] | None = None, timeout: float | None = None
    ) -> SendReport:
        """Wait until workers run on what was last published to them. Raises as :meth:`send` does, also
        for what they refused since."""
        return await self._sending().wait_ack(worker_ids, self._deadline(timeout))

    def prepare_weights(
        self,
        weights: Any = None,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """The weights that :meth:`send` would send, in the strategy's form, not copied.

        Args:
            weights: as for :meth:`send`.
            model_id: the model to take where no weights are given; None: this one's.
            strategy: how to extract them; None: the scheme's.
            context: where to look models up; None: the scheme's.

        Raises:
            InvalidArgumentError: there is nothing to send.
            AttributeError: the context has no such model.
        """
        if context is not None and (weights is None or isinstance(weights, str)):
            name = weights or model_id or self._model_id
            if name is None:
                raise InvalidArgumentError("context= needs model_id=, the name of the model on it")
            weights = model_of(context, name)
        return (strategy or self._strategy).extract_weights(self._resolve(weights))

    # -- receiving -----------------------------------------------------------------------------------

    def receiving(self) -> AbstractAsyncContextManager[None]:
        """Run the receiver task beside the body: ``async with scheme.receiving(): ...``.

        Updates are committed on this event loop, between the body's awaits.

        Raises:
            NotConnectedError: ``connect`` first.
            WorkerLostError: the sender went without a goodbye, or let this worker go: the body is cancelled.
                (With a goodbye it goes on; see :attr:`ended`.)
        """
        return self._receiving().receiving()

    async def receive(self, timeout: float | None = None) -> Any:
        """The weights of an update that no call before has returned, once they are in service, or None if
        none came in time. Beside :meth:`receiving` several may have come meanwhile: it is the newest.

        Returns:
            A TensorDict or dict, by the strategy, that views the weights in service; read only, and only
            until the next version or the end of this endpoint.

        Raises:
            NotConnectedError: ``connect`` first.
            WorkerLostError: the sender has gone.
        """
        receiver = self._receiving()
        views = await receiver.receive(Deadline.after(self._spec.seconds(timeout)))
        return None if views is None else in_format(self._strategy, views)

    @asynccontextmanager
    async def pinned(self, timeout: float | None = None) -> AsyncIterator[int]:
        """Keep the version in service for the length of the body: ``async with scheme.pinned() as version``.

        Put it around whatever awaits in the middle of a forward pass, or runs it in a thread. A commit
        that waits lets no new body begin, so keep it short.

        Raises:
            NotConnectedError: ``connect`` first.
            SyncTimeoutError: a waiting commit was held up by other bodies until the timeout.
        """
        async with self._receiving().pinned(self._deadline(timeout)) as version:
            yield version

    async def rebind(self, *, model: Any = None, context: Any = None) -> None:
        """On a connected receiver: go on with another model (a copy on another device, say), which gets the
        weights in service; or tell another context of updates from now on. What is not given stays.

        Args:
            model: an ``nn.Module``, TensorDict or dict with the names and shapes of the one before.
            context: as for :meth:`init_on_receiver`; the model is not looked up there.

        Raises:
            NotConnectedError: ``connect`` first.
            LayoutMismatchError: the sender's weights do not fit the model; the one before goes on.
        """
        receiver, before = self._receiving(), self._model
        follower, may_view = self._follower, self._may_view
        if context is not None:
            follower = listener_for(context, self._model_id)
            may_view = not follower.writes
        self._model = before if model is None else model
        try:
            await receiver.rebind(self._model, follower, may_view=may_view)
        except BaseException:
            self._model = before
            raise
        if context is not None:
            self._context = weakly(context)
        self._follower, self._may_view = follower, may_view

    async def wait_closed(self) -> None:
        """On a receiver: wait until the sender has gone. Has no deadline: cancel it to stop waiting."""
        await self._receiving().wait_closed()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to this receiver's model by hand. No version is counted.

        Raises:
            NotInitializedError: not a receiver, or one without a model.
            LayoutMismatchError: they do not fit.
        """
        if self._role != "receiver" or self.model is None:
            raise NotInitializedError("apply_weights() needs init_on_receiver() with a model")
        self._strategy.apply_weights(self.model, weights, inplace=inplace)

    # -- closing -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close this process's endpoint; idempotent. Other endpoints stay open: when a worker closes,
        its siblings stay connected. The model keeps its version, in memory of its own.

        Raises:
            WrongEventLoopError: the endpoint was connected on another event loop. If that loop is closed, the
                endpoint has been released as far as that is possible without it.
        """
        endpoint, listener, leader = self._endpoint, self._listener, self._leader
        if self._pid != os.getpid():
            self._forget_runtime()
            return
        endpoint.check_alive()
        self._last_version, self._last_ended = self.version, self.ended
        self._endpoint, self._listener, self._leader = Endpoint(), None, None
        self._role, self._synchronized = "recipe", False
        self._plan = self._context = None
        try:
            if listener is not None and not isinstance(endpoint, WeightSender):
                listener.close()  # the sender closes its own
            await endpoint.aclose()
        finally:
            if leader is not None:
                leader.close()
            self._release()

    async def shutdown(self) -> None:
        """The same as :meth:`aclose`."""
        await self.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.aclose()  # __aexit__ does not run if __aenter__ raises
            raise
        return self

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._spec.seconds(timeout))
