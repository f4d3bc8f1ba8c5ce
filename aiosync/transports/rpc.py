"""Objects of other processes, reached by torch.distributed.rpc."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import RemoteApplyError, SyncTimeoutError, WorkerError, WorkerLostError
from aiosync.transports._offload import offloaded
from aiosync.transports.rpc_calls import Call, is_member
from aiosync.weights.strategy import to_tensordict

__all__ = ["RPCTransport"]


@dataclass(frozen=True)
class _Raised:
    """An exception, as far as another process can understand it."""

    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class _Method:
    """A method by its name, looked up where it is called."""

    owner: type[Any] | None
    name: str

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.owner or type(target), self.name)(target, *args, **kwargs)


def _apply(rref: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with an object that this process owns."""
    try:
        result = function(rref.local_value(), *args, **kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except Exception as exc:  # noqa: BLE001 - raised where the call came from
        kind = f"{type(exc).__module__}.{type(exc).__qualname__}"
        return _Raised(kind.removeprefix("builtins."), str(exc), "".join(traceback.format_exception(exc)))


async def _awaited(result: Any) -> Any:
    return await result


class RPCTransport:
    """The way to one remote object of torch RPC (a collector, say): its methods are called there, and awaited
    here. No thread waits for an answer.

    Args:
        collector_info: the WorkerInfo, or the name, of the process that owns it.
        collector_rref: the RRef to it.
        collector_class: its class, whose methods are called; None: that of the object.
        worker_idx: which worker it is, for messages.
    """

    def __init__(
        self,
        collector_info: Any,
        collector_rref: Any,
        collector_class: type[Any] | None = None,
        *,
        worker_idx: int = 0,
    ) -> None:
        self.worker_idx = worker_idx
        self._info = collector_info
        self._rref = collector_rref
        self._class = collector_class
        self._sent: Call | None = None
        self._closed = False

    def check_connection(self) -> bool:
        """Whether it can be called, as far as is known without asking it."""
        return not self._closed and is_member()

    async def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call a method of the object; a coroutine is run to its end there, in an event loop of its own.

        Args:
            method: its name.
            args: its arguments.
            kwargs: its further arguments.
            timeout: seconds.

        Raises:
            RemoteApplyError: it raised; with the exception's type, message and traceback.
            WorkerLostError: the process is gone.
            SyncTimeoutError: it did not answer in time.
        """
        return await self.apply(self._method(method), *args, timeout=timeout, **kwargs)

    async def apply(self, function: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call ``function(object, *args)`` where the object is; otherwise the same as :meth:`call`.

        Args:
            function: of a module that can be imported there.
            args: its arguments.
            kwargs: its further arguments.
            timeout: seconds.
        """
        return await self._result(self._begin(function, args, kwargs, Deadline.after(timeout)))

    async def send_weights(self, weights: Any, *, timeout: float) -> None:
        """Call the object's ``update_policy_weights_(weights)``, or, with no weights, its
        ``_receive_weights_scheme()``, which fetches them.

        Args:
            weights: an ``nn.Module``, TensorDict or dict; copied to CPU memory first. None: none.
            timeout: seconds.

        Raises:
            As :meth:`call`.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        await self.wait_ack()
        if earlier is not None:
            raise earlier

    async def send_weights_async(self, weights: Any, *, timeout: float) -> None:
        """The same without waiting for the answer; :meth:`wait_ack` does. Waits for what was sent before: the
        older weights are not to come last. What that raised is raised when these have been sent.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        if earlier is not None:
            raise earlier

    async def wait_ack(self) -> None:
        """Wait for the answer to what :meth:`send_weights_async` sent, and raise what was raised there."""
        if self._sent is not None:
            await self._acknowledged(None)

    async def _send(self, weights: Any, deadline: Deadline) -> WorkerError | None:
        earlier = None
        if self._sent is not None:
            try:
                await self._acknowledged(deadline)
            except WorkerError as exc:
                earlier = exc
        if weights is None:
            self._sent = self._begin(self._method("_receive_weights_scheme"), (), {}, deadline)
        else:
            copied = await offloaded(lambda: to_tensordict(weights).cpu().clone(), "aiosync-rpc")
            self._sent = self._begin(self._method("update_policy_weights_"), (copied,), {}, deadline)
        return earlier

    async def _acknowledged(self, deadline: Deadline | None) -> None:
        """Given up, it is still the one that the next waits for."""
        assert self._sent is not None
        try:
            await self._result(self._sent, deadline)
        except WorkerError:
            self._sent = None
            raise
        self._sent = None

    def _method(self, name: str) -> _Method:
        return _Method(self._class, name)

    def _begin(self, function: Callable[..., Any], args: Any, kwargs: Any, deadline: Deadline) -> Call:
        return Call(self._info, _apply, (self._rref, function, args, kwargs), deadline)

    async def _result(self, begun: Call, deadline: Deadline | None = None) -> Any:
        try:
            result = await begun.answer(deadline)
        except SyncTimeoutError as exc:
            hint = "it did not answer a call of torch RPC"
            raise SyncTimeoutError("ack", seconds=exc.seconds, workers=[self.worker_idx], hint=hint) from exc
        except WorkerLostError as exc:
            raise WorkerLostError([self.worker_idx], exc.reason) from exc
        if isinstance(result, _Raised):
            raise RemoteApplyError(self.worker_idx, -1, result.kind, result.message, result.trace)
        return result

    async def aclose(self) -> None:
        """Let go of it; idempotent. The object stays, and nobody hears what it still answers."""
        self._closed = True
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.forget()
