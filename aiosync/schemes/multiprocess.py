"""Weights over multiprocessing queues, or over the caller's pipes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Unpack

from aiosync._options import CopyOptions, StrategyName
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.contexts import adapter_for
from aiosync.transfer.base import Transfer
from aiosync.transfer.mapped import PrivatelyMappedTransfer
from aiosync.transports.base import FramedTransport, Listener
from aiosync.transports.mp.base import PipeConnection
from aiosync.transports.mp.pipes import ConnectionPipe, PipeListener, UnexpectedMessage
from aiosync.transports.mp.queues import QueueListener, QueuePair, QueuePipe


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Copies the weights once per update into a buffer, which each worker maps copy-on-write.

    A worker may write into its parameters: only the pages that it writes are copied, and they are private to
    it. If the buffer has less than 2 MiB or is on a CUDA device, or the system is not Linux, each worker
    copies it into a back slot.

    Memory: as :class:`~aiosync.SharedMemWeightSyncScheme`, and in a worker the pages that it writes, at most
    once per buffer; two slots if it copies.

    A process that a worker forks sees a model of 2 MiB or more change with the worker's updates, unless it
    has a copy of the model or the worker uses ``commit="copy"``.

    A process can only be given queues while it is being started, so pass the scheme to ``Process``
    after ``init_on_sender``. A worker that was killed can be started again in the same way. The
    queues pickle each message, as all of ``multiprocessing`` does; they are inherited, and no other
    process can write to them.

    Args:
        pipes: in place of queues, one end of a duplex ``multiprocessing.Pipe`` per worker, in order
            (or a context that has ``pipes``). They are watched without a thread and stay open.
        on_other_message: takes (worker, message) for each message on a pipe that is not aiosync's; on a
            receiver the worker is its own index.
        options: see :class:`~aiosync.WeightSyncScheme`.
    """

    backends = ("process", "multiprocessing")
    _on_one_machine = True

    def __init__(
        self,
        strategy: StrategyName = "tensordict",
        sync: bool = True,
        *,
        pipes: Sequence[Connection[Any, Any]] | None = None,
        on_other_message: Callable[[int, Any], None] | None = None,
        **options: Unpack[CopyOptions],
    ) -> None:
        super().__init__(strategy, sync, **options)
        self._pipes = pipes
        self.on_other_message = on_other_message
        self._pipe: Connection[Any, Any] | None = None
        self._pairs: dict[int, QueuePair] = {}

    def init_on_sender(
        self, *, pipes: Sequence[Connection[Any, Any]] | None = None, **arguments: Any
    ) -> None:
        """See :meth:`WeightSyncScheme.init_on_sender`; also takes ``pipes``, one end per worker: they are as
        many as the workers."""
        context = arguments.get("context")
        given = pipes if pipes is not None else self._pipes
        if given is None and adapter_for(context) is None:
            # (The pipes of torchrl's collectors carry its commands.)
            given = getattr(context, "pipes", None)
        self._pipes = given
        counts = ("context", "params_map", "devices", "num_workers")
        if given is not None and all(arguments.get(name) is None for name in counts):
            arguments["num_workers"] = len(given)
        super().init_on_sender(**arguments)

    def init_on_receiver(self, *, pipe: Connection[Any, Any] | None = None, **arguments: Any) -> None:
        """See :meth:`WeightSyncScheme.init_on_receiver`; also takes ``pipe``, this worker's end."""
        context = arguments.get("context")
        super().init_on_receiver(**arguments)
        self._pipe = pipe if pipe is not None else getattr(context, "pipe", None)

    init_on_worker = init_on_receiver

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        workers = sorted(workers)
        if self._pipes is None:
            return QueueListener(workers, ctx or multiprocessing.get_context("spawn"))
        if workers != list(range(len(self._pipes))):
            raise InvalidArgumentError(
                f"pipes: expected one per worker, {len(workers)}, got {len(self._pipes)}"
            )
        return PipeListener(self._pipes, self._other)

    def _make_transfer(self) -> Transfer:
        return PrivatelyMappedTransfer()

    def _other(self, worker: int, message: Any) -> None:
        if self.on_other_message is None:
            raise UnexpectedMessage(
                f"worker {worker}'s pipe brought a message that is not aiosync's, and there is no "
                "on_other_message to take it"
            )
        self.on_other_message(worker, message)

    def create_transport(self, *, worker_idx: int) -> FramedTransport:
        if self._pipe is not None:
            return PipeConnection(ConnectionPipe(self._pipe, partial(self._other, worker_idx)))
        pair = self._pairs.pop(worker_idx, None)
        # Close the other workers' queues: an end that stays open here would hide their death.
        self._release()
        if pair is None:
            raise NotInitializedError(
                f"there are no queues for worker {worker_idx}: call init_on_sender() first, then pass "
                "the scheme to Process(args=...), which is the only way that queues can travel"
            )
        self._pairs[worker_idx] = pair
        return PipeConnection(QueuePipe(pair, pair.to_worker, pair.to_sender))

    def _release(self) -> None:
        for worker, pair in list(self._pairs.items()):
            if pair.owner != os.getpid():  # in the sender's process the listener closes them
                pair.close()
                del self._pairs[worker]

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        listener = self._listener
        pairs = dict(listener.pairs) if isinstance(listener, QueueListener) else self._pairs
        return {"pairs": pairs if inherit else {}, "on_other": self.on_other_message}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        self._pairs = dict(recipe["pairs"])
        self.on_other_message = recipe["on_other"]
        self._pipes = self._pipe = None
