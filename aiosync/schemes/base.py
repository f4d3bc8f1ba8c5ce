"""The scheme: the recipe for keeping one model's weights in step, and the way to its live endpoints."""

from __future__ import annotations

import os
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.context import BaseContext, get_spawning_popen
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import (
    AlreadyConnectedError,
    ForkedEndpointError,
    InvalidArgumentError,
    NotConnectedError,
    NotInitializedError,
)
from aiosync.schemes.cascade import in_format
from aiosync.schemes.plan import SenderArguments, SenderPlan, make_plan, model_of
from aiosync.schemes.receiver import WeightReceiver
from aiosync.schemes.report import SendReport
from aiosync.schemes.sender import WeightSender
from aiosync.schemes.sources import gather_sources
from aiosync.schemes.spec import OnFailure, SchemeSpec, StrategyName
from aiosync.schemes.stats import EventHook, EventSource, SchemeStats
from aiosync.transports.base import Listener, Transport
from aiosync.weights.binding import CommitMode
from aiosync.weights.resolve import resolve_model
from aiosync.weights.segment import Segment
from aiosync.weights.strategy import WeightStrategy

__all__ = ["WeightSyncBackend", "WeightSyncScheme"]

WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "memory"
]

S = TypeVar("S", bound="type[WeightSyncScheme]")


class WeightSyncScheme(ABC):
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
    """

    backends: ClassVar[tuple[str, ...]] = ()
    _registry: ClassVar[dict[str, type[WeightSyncScheme]]] = {}
    _holds: ClassVar[bool] = True

    def __init__(
        self,
        strategy: StrategyName = "tensordict",
        sync: bool = True,
        *,
        timeout: float | None = None,
        cast: torch.dtype | None = None,
        commit: CommitMode = "flip",
        on_failure: OnFailure = "raise",
        per_worker_weights: bool = False,
        max_slots: int = 3,
    ) -> None:
        spec = SchemeSpec(
            strategy, sync, timeout, cast, commit, on_failure, per_worker_weights, max_slots
        )
        self._start(spec, None, secrets.token_bytes(32), None)

    def _start(
        self, spec: SchemeSpec, model_id: str | None, token: bytes, strategy: WeightStrategy | None
    ) -> None:
        self._spec = spec
        self._model_id = model_id
        self._token = token
        self._strategy = strategy or spec.make_strategy()
        self._events = EventSource()
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        self._pid = os.getpid()
        self._model: Any = None
        self._context: Callable[[], Any] | None = None
        self._worker_idx: int | None = None
        self._plan: SenderPlan | None = None
        self._listener: Listener | None = None
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._receiver_initialized = False
        self._synchronized = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("backends", ()):
            WeightSyncScheme._registry[name] = cls

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """Make the scheme that goes by this name.

        Args:
            backend: ``none`` or ``direct``, ``shared`` or ``thread``, ``process`` or
                ``multiprocessing``, ``memory``.
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
        return found(**kwargs)

    # -- what a scheme is made of: filled in by its file ---------------------------------------------

    @abstractmethod
    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        """Where workers will connect; from now on the recipe says how to get there."""

    @abstractmethod
    def create_transport(self, *, worker_idx: int) -> Transport:
        """A worker's way to the sender, not open yet."""

    def _allocate(self, nbytes: int, device: torch.device) -> Segment:
        """Memory for a slot."""
        return Segment.shared(nbytes, device)

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        """What else of the scheme is copied, and how a worker finds the sender.

        ``inherit``: the copy is for this process, or for one that is just being started, so it may
        hold what can only be inherited.
        """
        return {}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        """Take in what :meth:`_recipe` gave."""

    # -- pickling ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self._state(inherit=get_spawning_popen() is not None)

    def _state(self, *, inherit: bool) -> dict[str, Any]:
        return {
            "spec": self._spec,
            "model_id": self._model_id,
            "token": self._token,
            "strategy": self._strategy,
            "recipe": self._recipe(inherit=inherit),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["spec"], state["model_id"], state["token"], state["strategy"])
        self._restore(state["recipe"])

    def __copy__(self) -> Self:
        """A copy of the recipe, for another endpoint in this process."""
        twin = type(self).__new__(type(self))
        twin.__setstate__(self._state(inherit=True))
        return twin

    def __repr__(self) -> str:
        role = "sender" if self._plan else "receiver" if self._receiver_initialized else "recipe"
        return f"<{type(self).__name__} {role} model_id={self._model_id!r} version={self.version}>"

    # -- initialisation ------------------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        params_map: Mapping[int, Any] | None = None,
        devices: list[Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
        ctx: BaseContext | None = None,
    ) -> None:
        """Say whom to send to and what. Nothing is sent yet, but workers may already connect.

        Give one of: ``params_map``; ``context`` with ``model_id``; ``model`` or ``weights`` with
        ``devices``, with ``device_map_fn`` and ``num_workers``, or with ``num_workers`` alone (CPU).

        Args:
            model_id: the model's name; on a context, the way to it (``"policy"``, ``"env.net"``).
            context: an object with ``get_model(model_id)`` or the model as an attribute,
                ``policy_device`` (one, or one per worker), ``num_workers``, ``policy_factory``.
            model: an ``nn.Module`` to send the weights of.
            weights: a TensorDict or dict to send instead of a module's.
            params_map: worker -> weights; workers with the very same weights share one copy.
            devices: one per worker; workers on the same share one copy.
            device_map_fn: takes (worker, weights) and returns the worker's weights, at each send.
            num_workers: how many workers, numbered from 0.
            ctx: the multiprocessing context of the queues (MultiProcess only); default spawn, whose
                queues work under every start method.

        Raises:
            InvalidArgumentError: a mix that makes no sense; the message names what clashes.
            AlreadyConnectedError: this scheme has a live endpoint.
        """
        self._check_no_endpoint()
        self._forget_runtime()
        arguments = SenderArguments(
            model_id, context, model, weights, params_map, devices, device_map_fn, num_workers
        )
        self._plan = make_plan(arguments, per_worker=self._spec.per_worker_weights)
        self._model_id = model_id
        self._model = model
        self.context = context
        self._listener = self._make_listener(self._plan.workers, ctx)

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Say which model of this process to keep in step.

        Args:
            model_id: the model's name, as the sender calls it.
            context: an object that has the model, ``worker_idx``, and perhaps
                ``update_policy_weights_`` (sync or async), which is told of each update.
            model: an ``nn.Module``, TensorDict or dict; with neither model nor context the weights
                are only returned by :meth:`receive`.
            worker_idx: this worker's index; may also be given to :meth:`connect`.

        Raises:
            InvalidArgumentError: ``context`` without ``model_id``, or a worker index that is none.
            AlreadyConnectedError: this object has a live endpoint; give the receiver a copy of its own.
        """
        self._check_no_endpoint()
        if self._listener is not None:
            self._become_receiver(self._listener)
        if context is not None:
            if model_id is None:
                raise InvalidArgumentError("context= needs model_id=, the name of the model on it")
            if model is None:
                model = model_of(context, model_id)
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        self._model_id = model_id
        self._model = model
        self.context = context
        self._worker_idx = _checked_index(worker_idx)
        self._receiver_initialized = True

    init_on_worker = init_on_receiver

    def _become_receiver(self, listener: Listener) -> None:
        """A sender's object in a forked child, or one that was never connected."""
        recipe = self._recipe(inherit=True)
        if self._pid != os.getpid():
            listener.forget()
        else:
            listener.close()
        self._forget_runtime()
        self._restore(recipe)

    def _check_no_endpoint(self) -> None:
        if self._pid != os.getpid():
            return  # what is live belongs to the parent; this process starts from the recipe
        if self._sender is not None or self._receiver is not None:
            raise AlreadyConnectedError(
                "this scheme object has a live endpoint; aclose() it first, or use a copy of the scheme"
            )

    # -- connect -------------------------------------------------------------------------------------

    async def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, timeout: float | None = None
    ) -> None:
        """Meet the other side. The sender hands out version 0 and waits until every worker runs on it;
        a worker puts it in service.

        Args:
            worker_idx: on a worker, its index, if ``init_on_receiver`` was not told.
            weights: on the sender, what to send as version 0 instead of what ``init_on_sender`` said.
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
            sender = self.create_sender()
            await sender.connect(await self._sources(weights, sender.roster.workers), deadline)
        elif self._receiver_initialized:
            if weights is not None:
                raise InvalidArgumentError("weights belong to the sender; this is a receiver")
            receiver = self.create_receiver(worker_idx=worker_idx)
            try:
                await receiver.connect(deadline)
            except BaseException:
                self._receiver = None
                raise
        else:
            raise NotInitializedError("call init_on_sender() or init_on_receiver() before connect()")
        self._synchronized = True

    def create_sender(self) -> WeightSender:
        """The live sending endpoint; :meth:`connect` makes it, and makes it once.

        Raises:
            NotInitializedError: ``init_on_sender`` was not called.
        """
        if self._plan is None or self._listener is None:
            raise NotInitializedError("call init_on_sender() first")
        if self._sender is None:
            self._sender = WeightSender(
                self._spec,
                self._plan,
                self._model_id,
                self._listener,
                self._token,
                allocate=self._allocate,
                holds=self._holds,
                events=self._events,
            )
        return self._sender

    def create_receiver(self, *, worker_idx: int | None = None) -> WeightReceiver:
        """The live receiving endpoint; :meth:`connect` makes it, and makes it once.

        Raises:
            NotInitializedError: ``init_on_receiver`` was not called, or no worker index is known.
        """
        if not self._receiver_initialized:
            raise NotInitializedError("call init_on_receiver() first")
        if worker_idx is not None:
            self._worker_idx = _checked_index(worker_idx)
        if self._worker_idx is None:
            raise NotInitializedError("a receiver needs its worker_idx, here or in init_on_receiver()")
        if self._receiver is None:
            self._receiver = WeightReceiver(
                self._spec,
                self._strategy,
                self._model,
                self._model_id,
                self._worker_idx,
                self.create_transport(worker_idx=self._worker_idx),
                self._token,
                holds=self._holds,
                context=self.context,
                events=self._events,
            )
        return self._receiver

    def get_sender(self) -> WeightSender:
        """The live sending endpoint.

        Raises:
            NotConnectedError: there is none in this process.
        """
        self._check_process()
        if self._sender is None or not self._synchronized:
            what = "connect()" if self._plan is not None else "init_on_sender() and connect()"
            raise NotConnectedError(f"this scheme is not a connected sender: call {what} first")
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The live receiving endpoint.

        Raises:
            NotConnectedError: there is none in this process.
        """
        self._check_process()
        if self._receiver is None or not self._synchronized:
            what = "connect()" if self._receiver_initialized else "init_on_receiver() and connect()"
            raise NotConnectedError(f"this scheme is not a connected receiver: call {what} first")
        return self._receiver

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedEndpointError(
                "this endpoint was connected in another process and does not survive a fork: "
                "call init_on_receiver() and connect() here"
            )

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
            In these three cases the other workers have been updated, and the error's ``report`` says who.
        """
        sender = self.get_sender()
        deadline = self._deadline(timeout)
        targets = sender.roster.resolve(worker_ids)
        if worker_ids is None and _is_per_worker(weights):
            targets = sender.roster.resolve(list(weights))
        sources = await self._sources(weights, targets)
        return await sender.send(
            sources,
            targets,
            wait=self._spec.sync if wait is None else wait,
            strict=strict,
            deadline=deadline,
        )

    async def wait_ack(
        self, worker_ids: int | list[int] | None = None, timeout: float | None = None
    ) -> SendReport:
        """Wait until workers run on what was last published to them. Raises as :meth:`send` does, also
        for what they refused since."""
        sender = self.get_sender()
        return await sender.wait_ack(sender.roster.resolve(worker_ids), self._deadline(timeout))

    def prepare_weights(self, weights: Any = None) -> Any:
        """The weights that :meth:`send` would send, in the strategy's form, not copied.

        Raises:
            InvalidArgumentError: there is nothing to send.
        """
        return self._strategy.extract_weights(self._resolve(weights))

    async def _sources(self, weights: Any, targets: Iterable[int]) -> dict[int, Mapping[str, Tensor]]:
        plan = self._plan
        assert plan is not None
        given = None if weights is None else weights if _is_per_worker(weights) else self._resolve(weights)
        if given is None and plan.weights is None and all(g.weights is None for g in plan.groups):
            given = self._resolve(None)
        return await gather_sources(plan, given, set(targets), self._strategy)

    def _resolve(self, weights: Any) -> Any:
        """A source given as itself, as a dotted path, or not at all."""
        if isinstance(weights, str):
            if self.context is None:
                raise InvalidArgumentError(f"weights={weights!r} is a path, and there is no context")
            return resolve_model(self.context, weights)
        if weights is not None:
            return weights
        if self._plan is not None and self._plan.weights is not None and self._model is None:
            return self._plan.weights
        model = self.model
        if model is None:
            raise InvalidArgumentError("no weights were given, and there is no model to take them from")
        return model

    # -- receiving -----------------------------------------------------------------------------------

    def receiving(self) -> AbstractAsyncContextManager[None]:
        """Run the receiver task beside the body: ``async with scheme.receiving(): ...``.

        Updates are committed on this event loop, between the body's awaits.

        Raises:
            NotConnectedError: ``connect`` first.
            WorkerLostError: when the body is done, if the sender went without a goodbye.
        """
        return self.get_receiver().receiving()

    async def receive(self, timeout: float | None = None) -> Any:
        """The next update's weights once they are in service, or None if none came in time.

        Returns:
            A TensorDict or dict, by the strategy, that views the weights in service; read only.

        Raises:
            NotConnectedError: ``connect`` first.
            WorkerLostError: the sender has gone.
        """
        receiver = self.get_receiver()
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
        receiver = self.get_receiver()
        async with receiver.pinned(self._deadline(timeout)) as version:
            yield version

    async def wait_closed(self) -> None:
        """On a receiver: wait until the sender has gone. Has no deadline: cancel it to stop waiting."""
        await self.get_receiver().wait_closed()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to this receiver's model by hand. No version is counted.

        Raises:
            NotInitializedError: not a receiver, or one without a model.
            LayoutMismatchError: they do not fit.
        """
        if not self._receiver_initialized or self.model is None:
            raise NotInitializedError("apply_weights() needs init_on_receiver() with a model")
        self._strategy.apply_weights(self.model, weights, inplace=inplace)

    # -- closing -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close this process's endpoint; idempotent. Nobody else's: a worker that closes leaves its
        siblings connected, and a model keeps the version that it has."""
        sender, receiver, listener = self._sender, self._receiver, self._listener
        if self._pid != os.getpid():
            self._forget_runtime()
            return
        self._synchronized = False
        self._sender = self._receiver = self._listener = None
        self._plan = None
        self._receiver_initialized = False
        if sender is not None:
            await sender.aclose()
        elif listener is not None:
            listener.close()
        if receiver is not None:
            await receiver.aclose()

    async def shutdown(self) -> None:
        """The same as :meth:`aclose`."""
        await self.aclose()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- what can be asked ---------------------------------------------------------------------------

    def on_event(self, hook: EventHook) -> Callable[[], None]:
        """Call ``hook`` with a :class:`~aiosync.SyncEvent` for whatever happens here; returns what ends that."""
        return self._events.register(hook)

    @property
    def stats(self) -> SchemeStats:
        """Figures of the live endpoint; empty before ``connect``."""
        if self._sender is not None:
            return self._sender.stats
        return self._receiver.stats if self._receiver is not None else SchemeStats()

    @property
    def version(self) -> int:
        """The version last published (sender) or in service (receiver); -1 before ``connect``."""
        if self._sender is not None:
            return self._sender.version
        return self._receiver.version if self._receiver is not None else -1

    @property
    def worker_versions(self) -> dict[int, int]:
        """On the sender: worker -> the version it last acknowledged, -1 for none."""
        roster = self.get_sender().roster
        return {worker: roster.version_of(worker) for worker in sorted(roster.workers)}

    @property
    def timeout(self) -> float:
        """Seconds that a call may take where it does not say otherwise."""
        return self._spec.seconds(None)

    @property
    def sync(self) -> bool:
        """Whether ``send`` waits by default."""
        return self._spec.sync

    @property
    def model_id(self) -> str | None:
        """The model's name."""
        return self._model_id

    @model_id.setter
    def model_id(self, model_id: str | None) -> None:
        self._model_id = model_id

    @property
    def model(self) -> Any:
        """The model: as given, or found on the context by ``model_id``; None if there is neither."""
        if self._model is None and self._model_id is not None and self.context is not None:
            return model_of(self.context, self._model_id)
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    @property
    def context(self) -> Any:
        """The context, as long as somebody else keeps it alive."""
        return self._context() if self._context is not None else None

    @context.setter
    def context(self, context: Any) -> None:
        self._context = None if context is None else _weakly(context)

    @property
    def worker_idx(self) -> int | None:
        """This worker's index; None on the sender."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self._plan is not None and worker_idx is not None:
            raise NotInitializedError("worker_idx belongs to a receiver; this is the sender")
        self._worker_idx = _checked_index(worker_idx)

    @property
    def weights(self) -> Any:
        """The weights in service here (receiver) or last published (sender), in the strategy's form;
        before ``connect`` the model's own. Read only."""
        if self._receiver is not None and self._receiver.weights:
            return in_format(self._strategy, self._receiver.weights)
        if self._sender is not None:
            published = self._sender.published()
            if published is not None:
                return in_format(self._strategy, published)
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are extracted and applied; one of your own is used as it is."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: WeightStrategy) -> None:
        self._strategy = strategy

    @property
    def strategy_str(self) -> str:
        """The strategy's name."""
        return self._strategy.extract_as

    @property
    def sender_transports(self) -> dict[int, Transport]:
        """On the sender: worker -> its connection, for those that are connected."""
        if self._sender is None:
            return {}
        return {w: link.transport for w, link in sorted(self._sender.roster.links.items())}

    @property
    def receiver_transport(self) -> Transport | None:
        """On a receiver: its connection."""
        return self._receiver.transport if self._receiver is not None else None

    @property
    def shared_transport(self) -> Listener | None:
        """On the sender: where its workers connect."""
        return self._listener

    @property
    def initialized_on_sender(self) -> bool:
        """Whether ``init_on_sender`` was called."""
        return self._plan is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether ``init_on_receiver`` was called."""
        return self._receiver_initialized

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect`` succeeded, on the sender."""
        return self._synchronized and self._sender is not None

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect`` succeeded, on a receiver."""
        return self._synchronized and self._receiver is not None

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._spec.seconds(timeout))


def _checked_index(worker_idx: int | None) -> int | None:
    if worker_idx is None:
        return None
    if isinstance(worker_idx, bool) or not isinstance(worker_idx, int) or worker_idx < 0:
        raise InvalidArgumentError(f"worker_idx: expected an integer >= 0, got {worker_idx!r}")
    return worker_idx


def _is_per_worker(weights: Any) -> bool:
    return (
        isinstance(weights, Mapping)
        and bool(weights)
        and all(isinstance(key, int) for key in weights)
    )


def _weakly(context: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(context)
    except TypeError:
        return lambda: context
