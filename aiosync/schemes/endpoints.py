"""A scheme's live endpoints and their properties."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, ClassVar

from aiosync._endpoint import Endpoint
from aiosync.errors import ForkedEndpointError, NotConnectedError, NotInitializedError
from aiosync.events import SchemeStats
from aiosync.receiver.applier import WeightApplier
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.listeners import in_format
from aiosync.receiver.served_model import ServedModel
from aiosync.reports import WorkerState
from aiosync.schemes.initialization import SchemeRecipe
from aiosync.schemes.null_endpoint import NullEndpoint
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.sharded.gather import ShardContributor
from aiosync.transports.base import Listener, Transport

__all__ = ["SchemeEndpoints"]


class SchemeEndpoints(SchemeRecipe):
    """Creates and returns a scheme's endpoints in this process."""

    _sender_type: ClassVar[type[WeightSender]] = WeightSender
    _receiver_type: ClassVar[type[WeightReceiver]] = WeightReceiver

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._role} model_id={self._model_id!r} version={self.version}>"

    def create_sender(self) -> WeightSender:
        """Return the sending endpoint, created by the first call (usually from :meth:`connect`).

        Raises:
            NotInitializedError: ``init_on_sender`` was not called.
        """
        if self._plan is None or self._listener is None:
            raise NotInitializedError("call init_on_sender() first")
        if not isinstance(self._endpoint, WeightSender):
            leader, self._leader = self._leader, None
            self._endpoint = self._sender_type(
                self._spec,
                self._weight_source(self._plan),
                self._model_id,
                self._listener,
                self._token,
                transfer=self._make_transfer(),
                events=self._events,
                leader=leader,
            )
        return self._endpoint

    def create_receiver(self, *, worker_idx: int | None = None) -> WeightReceiver:
        """Return the receiving endpoint, created by the first call (usually from :meth:`connect`).

        Raises:
            NotInitializedError: ``init_on_receiver`` was not called, or no worker index is known.
        """
        if self._role != "receiver":
            raise NotInitializedError("call init_on_receiver() first")
        if worker_idx is not None:
            self._worker_idx = self._index_of(worker_idx)
        if self._worker_idx is None and not self._elastic:
            raise NotInitializedError("a receiver needs its worker_idx, here or in init_on_receiver()")
        asked = -1 if self._worker_idx is None else self._worker_idx
        if not isinstance(self._endpoint, WeightReceiver):
            served = ServedModel(self._model, self._follower, may_view=self._may_view, bind=self._bind)
            applier = WeightApplier(served, self._strategy, self._model_id, asked, self._make_transfer())
            self._endpoint = self._receiver_type(
                applier,
                self._model_id,
                asked,
                partial(self.create_transport, worker_idx=asked),
                self._token,
                reconnect_for=self._reconnect_for,
                on_sender_close=self._on_sender_close,
                events=self._events,
            )
        return self._endpoint

    def get_sender(self) -> WeightSender:
        """Return the connected sending endpoint.

        Raises:
            NotConnectedError: this process has none.
        """
        endpoint = self._sending()
        if not isinstance(endpoint, WeightSender):
            raise NotConnectedError("this scheme has no sender here: rank 0 sends, or nothing is sent")
        return endpoint

    def _sending(self) -> WeightSender | ShardContributor | NullEndpoint:
        """Return the connected endpoint of the sender's side, of any type."""
        endpoint = self._endpoint
        if self._pid != os.getpid():
            self._check_process()
        if not self._synchronized or not isinstance(endpoint, WeightSender | ShardContributor | NullEndpoint):
            what = "connect()" if self._role == "sender" else "init_on_sender() and connect()"
            raise NotConnectedError(f"this scheme is not a connected sender: call {what} first")
        return endpoint

    def get_receiver(self) -> WeightReceiver:
        """Return the connected receiving endpoint.

        Raises:
            NotConnectedError: this process has none.
        """
        endpoint = self._receiving()
        if not isinstance(endpoint, WeightReceiver):
            raise NotConnectedError("this scheme has no receiver: nothing is sent")
        return endpoint

    def _receiving(self) -> WeightReceiver | NullEndpoint:
        """Return the connected endpoint of a worker's side, of any type."""
        self._check_process()
        endpoint = self._endpoint
        if not self._synchronized or not isinstance(endpoint, WeightReceiver | NullEndpoint):
            what = "connect()" if self._role == "receiver" else "init_on_receiver() and connect()"
            raise NotConnectedError(f"this scheme is not a connected receiver: call {what} first")
        return endpoint

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedEndpointError(
                "this endpoint was connected in another process and does not survive a fork: "
                "call init_on_receiver() and connect() here"
            )

    # -- properties ----------------------------------------------------------------------------------

    @property
    def stats(self) -> SchemeStats:
        """Counters and timings of the connected endpoint; empty before ``connect``."""
        return self._endpoint.stats

    @property
    def version(self) -> int:
        """The version last published (sender) or current (receiver), also after :meth:`aclose`; -1 before
        ``connect``."""
        return self._last_version if type(self._endpoint) is Endpoint else self._endpoint.version

    @property
    def workers(self) -> dict[int, WorkerState]:
        """On the sender: worker -> whether it is connected, its version and its lag. Else empty."""
        return self._endpoint.workers

    @property
    def ended(self) -> str | None:
        """On a receiver: why no more updates will come, also after :meth:`aclose`; None while there is a
        sender."""
        return self._last_ended if type(self._endpoint) is Endpoint else self._endpoint.ended

    @property
    def worker_versions(self) -> dict[int, int]:
        """On the sender: worker -> the version that it last acknowledged, or -1. Else empty."""
        return {worker: state.version for worker, state in self._endpoint.workers.items()}

    @property
    def weights(self) -> Any:
        """The current weights (receiver) or those last published (sender), in the strategy's form; before
        ``connect`` the model's. Read only."""
        found = self._endpoint.weights_in_use
        if found is not None:
            return in_format(self._strategy, found)
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @property
    def sender_transports(self) -> dict[int, Transport]:
        """On the sender: worker -> its connection, for the connected workers."""
        return self._endpoint.transports

    @property
    def receiver_transport(self) -> Transport | None:
        """On a receiver: the connection to the sender."""
        return self._endpoint.transport if isinstance(self._endpoint, WeightReceiver) else None

    @property
    def shared_transport(self) -> Listener | None:
        """On the sender: the listener that its workers connect to."""
        return self._listener

    @property
    def initialized_on_sender(self) -> bool:
        """Whether ``init_on_sender`` was called."""
        return self._role == "sender"

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether ``init_on_receiver`` was called."""
        return self._role == "receiver"

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect`` succeeded, on the sender."""
        return self._synchronized and self._role == "sender"

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect`` succeeded, on a receiver."""
        return self._synchronized and self._role == "receiver"
