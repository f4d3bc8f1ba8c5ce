"""The base class of schemes: the recipe for synchronising one model's weights, and its live endpoints."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from tensordict import TensorDictBase
from torch import Tensor

from aiosync._deadline import Deadline, seconds_of
from aiosync._endpoint import AsyncResource, Endpoint
from aiosync._options import check_count
from aiosync.errors import (
    AlreadyConnectedError,
    ForkedEndpointError,
    InvalidArgumentError,
    NotConnectedError,
    NotInitializedError,
)
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.listeners import in_format, weakly
from aiosync.reports import SendReport
from aiosync.schemes.contexts import listener_for, watching_start
from aiosync.schemes.recipe import SchemeRecipe
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.sharded.gather import ShardContributor
from aiosync.sender.worker_plan import SenderPlan

if TYPE_CHECKING:
    from aiosync.schemes.none import NullEndpoint

_SENDING = (WeightSender, ShardContributor)


class WeightSyncScheme(SchemeRecipe, AsyncResource):
    """Synchronises ONE model's weights from a trainer to its workers.

    A scheme is a recipe: it can be pickled, and each process creates one endpoint from it. In the trainer
    call :meth:`init_on_sender`, pass the scheme to the workers, then :meth:`connect` and :meth:`send`. In a
    worker call :meth:`init_on_receiver` and :meth:`connect`, and run :meth:`receiving` around the
    environment loop.

    Do not change the weights while a ``send`` is running: it copies them in another thread.

    Args:
        strategy: ``"tensordict"`` or ``"state_dict"``: the form of the weights that the context is given
            and that :meth:`receive` returns.
        sync: whether :meth:`send` waits by default until the workers have applied the weights.
        timeout: seconds that a call may take by default; None: the environment's
            ``AIOSYNC_TIMEOUT``, else 120.
        cast: a floating dtype to which floating tensors are narrowed before they are sent.
        commit: ``"flip"`` re-points a worker's parameters at the new memory, in microseconds;
            ``"copy"`` writes into the parameters' memory (for CUDA graphs and raw pointers), which
            takes one copy of the weights on the worker's loop.
        on_failure: ``"raise"``: a send updates the healthy workers and then raises; ``"drop"``: the sender
            removes workers that were lost or missed the deadline, and the report lists them.
        per_worker_weights: whether each worker has a separate copy, and may be sent different weights
            (``send({0: w0, 1: w1})``).
        max_slots: how many versions the shared memory may hold, at least 2. Versions that are kept only
            for hung workers, or for workers that later sends do not address, do not count.
        first_version: the number of the first version that a sender publishes, an integer >= 0. A trainer
            that resumes from a checkpoint gives the number after the saved one.
        min_workers: on the sender, how many workers :meth:`connect` waits for: an integer >= 0; None: all of
            ``num_workers``, or 1 if the number of workers is not fixed. With 0 ``async with scheme`` does
            not wait for any worker.
        peft: how a model with adapters (PEFT) is sent, as in :class:`~aiosync.WeightStrategy`: ``"merged"``,
            ``"as_is"``, or ``"adapter"``, where only what is trained is sent, and a worker with another base
            model is refused.
    """

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """Create the scheme with this backend name; raise InvalidArgumentError if there is none.

        Args:
            backend: ``none`` or ``direct``, ``shared`` or ``thread``, ``process`` or
                ``multiprocessing``, ``tcp``, ``distributed``, ``rpc``, ``ray``, ``ray_module``, ``memory``.
            kwargs: the constructor's arguments.
        """
        found = cls._registry.get(backend)
        if found is None:
            raise InvalidArgumentError(
                f"unknown backend {backend!r}: expected one of {', '.join(sorted(cls._registry))}"
            )
        assert issubclass(found, WeightSyncScheme)
        return found(**kwargs)

    # -- endpoints -----------------------------------------------------------------------------------

    def get_sender(self) -> WeightSender:
        """Return the sending endpoint, which can send once :meth:`connect` was called.

        Raises:
            NotConnectedError: this process has none: ``init_on_sender`` was not called here, or another rank
                sends.
        """
        if self._pid == os.getpid() and self._plan is not None and self._listener is not None:
            return self.create_sender()
        endpoint = self._sending()
        if not isinstance(endpoint, WeightSender):
            raise NotConnectedError("this scheme has no sender here: rank 0 sends")
        return endpoint

    def get_receiver(self) -> WeightReceiver:
        """Return the receiving endpoint, which can receive once :meth:`connect` was called.

        Raises:
            NotConnectedError: this process has none: ``init_on_receiver`` was not called here.
            NotInitializedError: this worker's index is not known yet.
        """
        if self._pid == os.getpid() and self._role == "receiver":
            return self.create_receiver()
        endpoint = self._receiving()
        assert isinstance(endpoint, WeightReceiver)
        return endpoint

    def _sending(self) -> WeightSender | ShardContributor | NullEndpoint:
        """Return the connected endpoint of the sender's side. The endpoint checks its event loop itself."""
        endpoint = self._endpoint
        connected = self._synchronized or endpoint.is_matched
        if self._pid != os.getpid() or not connected or not isinstance(endpoint, _SENDING):
            raise self._not_connected("sender")
        return endpoint

    def _receiving(self) -> WeightReceiver | NullEndpoint:
        """Return the connected endpoint of a worker's side. The endpoint checks its event loop itself."""
        endpoint = self._endpoint
        if self._pid != os.getpid() or not self._synchronized or not isinstance(endpoint, WeightReceiver):
            raise self._not_connected("receiver")
        return endpoint

    def _not_connected(self, side: str) -> NotConnectedError:
        if self._pid != os.getpid():
            return ForkedEndpointError(
                "this endpoint was connected in another process and does not survive a fork: "
                "call init_on_receiver() and connect() here"
            )
        what = "connect()" if self._role == side else f"init_on_{side}() and connect()"
        return NotConnectedError(f"this scheme is not a connected {side}: call {what} first")

    # -- connect -------------------------------------------------------------------------------------

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        min_workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connect to the other side.

        The sender publishes version 0 and waits until the workers have applied it. A worker applies it.

        Args:
            worker_idx: on a worker, its index, if ``init_on_receiver`` was not given one.
            weights: on the sender, the weights of version 0; None: those of ``init_on_sender``.
            min_workers: on the sender, how many workers to wait for; None: the scheme's ``min_workers``. The
                others may connect later.
            timeout: seconds; None: the scheme's.

        Raises:
            NotInitializedError: neither ``init_on_sender`` nor ``init_on_receiver`` was called.
            AlreadyConnectedError: the scheme is connected already.
            SyncTimeoutError: the other side did not connect; on the sender ``connect`` may be called again.
            LayoutMismatchError: the weights do not fit the worker's model; both sides raise it.
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
            if min_workers is not None:
                check_count("min_workers", min_workers)
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
        """Prepare the workers before the sender connects; return the weights of version 0, or None."""
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
        """Publish the next version, and return the result of each worker: without ``wait``, whether it was
        notified.

        If workers refuse, are lost or do not answer in time, the others are updated all the same. The
        raised error's ``report`` lists the result of each worker.

        Args:
            weights: an ``nn.Module``, TensorDict, dict (flat or nested), a dotted path on the context,
                or None for the model or context that ``init_on_sender`` was given. With
                ``per_worker_weights`` also a dict of worker -> weights.
            worker_ids: the workers to update: None for all, an index or a list.
            wait: whether to wait until they have applied the version; None: the scheme's ``sync``.
            strict: whether every entry must be given. With False a subset is enough (adapters, one
                head), and the other entries keep their values.
            timeout: seconds; None: the scheme's.

        Raises:
            NotConnectedError: the scheme is not connected.
            UnknownWorkerError: ``worker_ids`` has a worker that this scheme does not serve.
            LayoutMismatchError: the weights do not fit the layout; nothing was sent.
            RemoteApplyError, LayoutMismatchError: a worker refused and kept its version.
            WorkerLostError: workers were lost.
            SyncTimeoutError: workers did not answer in time.
        """
        deadline = Deadline.after(seconds_of(timeout, self._spec.timeout))
        wait, sender = self._spec.sync if wait is None else wait, self._sending()
        return await sender.send_until(weights, worker_ids, wait=wait, strict=strict, deadline=deadline)

    async def wait_ack(
        self, worker_ids: int | list[int] | None = None, timeout: float | None = None
    ) -> SendReport:
        """Wait until workers have applied the last version published to them.

        Raises as :meth:`send` does, also for updates that workers have refused since the last call.
        """
        return await self._sending().wait_ack_until(worker_ids, self._deadline(timeout))

    # -- receiving -----------------------------------------------------------------------------------

    def receiving(self) -> AbstractAsyncContextManager[None]:
        """Run the receiver task beside the body: ``async with scheme.receiving(): ...``.

        Updates are committed on this event loop, while the body awaits.

        Raises:
            NotConnectedError: the scheme is not connected.
            WorkerLostError: the sender was lost, or removed this worker, or the receiver task failed: the
                body is cancelled. (If the sender closed in order, the body continues; see :attr:`ended`.)
        """
        return self._receiving().receiving()

    async def receive(self, timeout: float | None = None) -> TensorDictBase | dict[str, Tensor] | None:
        """Wait for the next update and return its weights once they are applied; None if none came in time.

        No update is returned twice. If :meth:`receiving` has applied several, this returns the newest. The
        TensorDict or dict (by the strategy) views the current weights. It is read only, and valid until the
        next version or until this endpoint is closed.

        Raises:
            NotConnectedError: the scheme is not connected.
            WorkerLostError: the sender has gone.
        """
        receiver = self._receiving()
        views = await receiver.receive_until(Deadline.after(self._spec.seconds(timeout)))
        return None if views is None else in_format(self._strategy, views)

    @asynccontextmanager
    async def pinned(self, timeout: float | None = None) -> AsyncIterator[int]:
        """Keep the current version until the body ends: ``async with scheme.pinned() as version``.

        Use it around a forward pass that awaits or runs in a thread. Keep the body short: while a commit
        waits, no other body can begin.

        Raises:
            NotConnectedError: the scheme is not connected.
            SyncTimeoutError: other bodies blocked a waiting commit until the timeout.
        """
        async with self._receiving().pinned(self._deadline(timeout)) as version:
            yield version

    async def rebind(self, *, model: Any = None, context: Any = None) -> None:
        """Replace a connected receiver's model (by a copy on another device, say), its context, or both.

        The new model gets the current weights. The new context is notified of all later updates.

        Args:
            model: an ``nn.Module``, TensorDict or dict with the old model's names and shapes; None: keep it.
            context: as for :meth:`init_on_receiver`, but the model is not looked up on it; None: keep it.

        Raises:
            NotConnectedError: the scheme is not connected.
            LayoutMismatchError: the sender's weights do not fit the model; the old model stays.
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
        """Apply weights to this receiver's model by hand. No version is counted. ``inplace``: whether to
        write into the model's memory, unless updates let the model view the sender's, which other workers
        read: the model gets memory of its own then.

        Raises:
            NotInitializedError: this is not a receiver, or it has no model.
            LayoutMismatchError: the weights do not fit the model.
        """
        if self._role != "receiver" or self.model is None:
            raise NotInitializedError("apply_weights() needs init_on_receiver() with a model")
        if isinstance(self._endpoint, WeightReceiver):
            inplace = inplace and self._endpoint.keeps_memory
        self._strategy.apply_weights(self.model, weights, inplace=inplace)

    # -- closing -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close this process's endpoint; idempotent. Other workers stay connected.

        A receiver's model keeps its version, in private memory.

        Raises:
            WrongEventLoopError: the endpoint was connected on another event loop. If that loop is closed, the
                endpoint has been released as far as possible without it.
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
                listener.close()  # a WeightSender closes its listener itself
            await endpoint.aclose()
        finally:
            if leader is not None:
                leader.close()
            self._release()

    async def shutdown(self) -> None:
        """Alias of :meth:`aclose`."""
        await self.aclose()

    async def __aenter__(self) -> Self:
        connected = self._synchronized
        try:
            await self.connect()
        except BaseException:
            if not connected:
                await self.aclose()  # __aexit__ does not run if __aenter__ raises
            raise
        return self

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._spec.seconds(timeout))
