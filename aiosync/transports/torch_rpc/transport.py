"""Calls of objects in other processes, by torch.distributed.rpc."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import RemoteApplyError, SyncTimeoutError, WorkerLostError
from aiosync.transports._offload import offloaded
from aiosync.transports.remote_calls import CallingTransport
from aiosync.transports.torch_rpc.calls import Call, is_member
from aiosync.weights.strategy import to_tensordict


@dataclass(frozen=True)
class _Raised:
    """An exception of a remote call, as text."""

    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class _Method:
    """A method that is looked up by name in the process that calls it."""

    owner: type[Any] | None
    name: str

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.owner or type(target), self.name)(target, *args, **kwargs)


def _apply(rref: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` with the object of ``rref``, in the process that owns the object."""
    try:
        result = function(rref.local_value(), *args, **kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except Exception as exc:  # noqa: BLE001 - raised where the call came from
        kind = f"{type(exc).__module__}.{type(exc).__qualname__}"
        return _Raised(kind.removeprefix("builtins."), str(exc), "".join(traceback.format_exception(exc)))


async def _awaited(result: Any) -> Any:
    return await result


class RPCTransport(CallingTransport):
    """Calls methods of one remote object, such as a collector, by torch RPC, and awaits their results.

    No thread blocks until the answer. The remote process runs a coroutine in a new event loop. Weights are
    passed to ``update_policy_weights_(weights)``.

    Args:
        collector_info: the WorkerInfo, or the name, of the process that owns the object.
        collector_rref: the RRef of the object.
        collector_class: the class whose methods are called. None: the object's class.
        worker_idx: the index of the object's worker, for messages.
    """

    def __init__(
        self,
        collector_info: Any,
        collector_rref: Any,
        collector_class: type[Any] | None = None,
        *,
        worker_idx: int = 0,
    ) -> None:
        super().__init__(worker_idx)
        self._info = collector_info
        self._rref = collector_rref
        self._class = collector_class

    def check_connection(self) -> bool:
        return not self._closed and is_member()

    async def apply(self, function: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call ``function(object, *args, **kwargs)`` in the object's process, and return its result.

        Args:
            function: a function of a module that the process can import.
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: seconds.

        Raises:
            As :meth:`call`.
        """
        return await self._result(self._apply(function, args, kwargs, Deadline.after(timeout)))

    def _start_call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> Call:
        return self._apply(_Method(self._class, method), args, kwargs, deadline)

    async def _start_weights(self, weights: Any, deadline: Deadline) -> Call:
        copied = await offloaded(lambda: to_tensordict(weights).cpu().clone(), "aiosync-rpc")
        return self._start_call("update_policy_weights_", (copied,), {}, deadline)

    def _apply(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> Call:
        return Call(self._info, _apply, (self._rref, function, args, kwargs), deadline)

    async def _result(self, call: Call, deadline: Deadline | None = None) -> Any:
        try:
            result = await call.answer(deadline)
        except SyncTimeoutError as exc:
            hint = "it did not answer a call of torch RPC"
            raise SyncTimeoutError("ack", seconds=exc.seconds, workers=[self.worker_idx], hint=hint) from exc
        except WorkerLostError as exc:
            raise WorkerLostError([self.worker_idx], exc.reason) from exc
        if isinstance(result, _Raised):
            raise RemoteApplyError(self.worker_idx, -1, result.kind, result.message, result.trace)
        return result
