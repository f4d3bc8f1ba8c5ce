"""Objects of other processes, reached by torch.distributed.rpc."""

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


class RPCTransport(CallingTransport):
    """The way to one remote object of torch RPC (a collector, say): its methods are called there, and awaited
    here. No thread waits for an answer.

    A coroutine is run there in an event loop of its own. Weights go to ``update_policy_weights_(weights)``.

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
        super().__init__(worker_idx)
        self._info = collector_info
        self._rref = collector_rref
        self._class = collector_class

    def check_connection(self) -> bool:
        return not self._closed and is_member()

    async def apply(self, function: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call ``function(object, *args)`` where the object is; otherwise the same as :meth:`call`.

        Args:
            function: of a module that can be imported there.
            args: its arguments.
            kwargs: its further arguments.
            timeout: seconds.
        """
        return await self._result(self._apply(function, args, kwargs, Deadline.after(timeout)))

    def _begin(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline) -> Call:
        return self._apply(_Method(self._class, method), args, kwargs, deadline)

    async def _begin_weights(self, weights: Any, deadline: Deadline) -> Call:
        copied = await offloaded(lambda: to_tensordict(weights).cpu().clone(), "aiosync-rpc")
        return self._begin("update_policy_weights_", (copied,), {}, deadline)

    def _apply(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        deadline: Deadline,
    ) -> Call:
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

    def _forget(self, begun: Call) -> None:
        begun.forget()
