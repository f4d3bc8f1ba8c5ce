"""Multiprocessing queues and pipes, used alone."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.multiprocess import MultiProcessWeightSyncScheme
from aiosync.schemes.standalone.base import StandaloneTransport, init_sender
from aiosync.schemes.standalone.queues import PrivateCopyScheme, announce, check_queue, take_recipe
from aiosync.schemes.state import Secret


class MPTransport(StandaloneTransport):
    """Sends weights to one worker process on this machine, without a scheme.

    Create one on each side, over the same queue or over the two ends of a pipe, or pass the transport to
    ``Process(args=...)``. The weights are not sent through the queue or pipe: the worker maps the sender's
    copy of them, copy-on-write, or copies that if it has less than 2 MiB. Without a queue and a pipe every
    call does nothing.

    Args:
        weight_queue: a queue of ``multiprocessing`` from the sender to this worker alone, by which the worker
            finds the sender; or one end of a duplex ``multiprocessing.Pipe``.
        ack_queue: as in torchrl; not used, because the worker acknowledges over its connection.
        timeout: seconds that a call may take by default.
        pipe: one end of a duplex ``multiprocessing.Pipe``, in place of a queue.

    Raises:
        InvalidArgumentError: ``weight_queue`` is neither a queue nor a pipe, or both are given.
    """

    def __init__(
        self,
        weight_queue: Any = None,
        ack_queue: Any = None,
        timeout: float = 10.0,
        *,
        pipe: Connection[Any, Any] | None = None,
    ) -> None:
        super().__init__(timeout)
        if isinstance(weight_queue, Connection) and pipe is None:
            weight_queue, pipe = None, weight_queue
        if weight_queue is not None and pipe is not None:
            raise InvalidArgumentError("give weight_queue= or pipe=, not both")
        for name, queue in (("weight_queue", weight_queue), ("ack_queue", ack_queue)):
            if queue is not None:
                check_queue(name, queue)
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self.pipe = pipe

    @property
    def _may_send(self) -> bool:
        return self.weight_queue is not None or self.pipe is not None

    @property
    def _may_receive(self) -> bool:
        return self._may_send

    @property
    def _finds_another(self) -> bool:
        return self.pipe is None

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        if self.pipe is not None:
            return init_sender(_PipeScheme(self.pipe), model)
        return init_sender(PrivateCopyScheme(), model)

    async def _make_receiver(self) -> WeightSyncScheme:
        if self.pipe is not None:
            return _PipeScheme(self.pipe)
        return await take_recipe(self.weight_queue)

    async def _announce(self, scheme: WeightSyncScheme, first: bool) -> None:
        if isinstance(scheme, PrivateCopyScheme) and not scheme.sender_transports:
            announce(self.weight_queue, scheme, first=first)


class _PipeScheme(MultiProcessWeightSyncScheme):
    """A scheme over one pipe. Who has an end of the pipe needs no token."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        super().__init__(pipes=[pipe])
        self._token = Secret(b"")
        self._end = pipe

    def init_on_receiver(self, **arguments: Any) -> None:
        super().init_on_receiver(pipe=self._end, **arguments)
