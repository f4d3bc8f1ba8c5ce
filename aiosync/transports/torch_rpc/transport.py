"""Awaitable calls of torch.distributed.rpc, and of the methods of objects in other processes.

Calls should be few and short, and none may stay pending. The reasons: an agent of torch RPC runs incoming
calls in a few threads, which the job's own calls may occupy; it reports a peer's death only to pending calls;
and ``rpc.shutdown()`` waits for all pending calls.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from aiosync._deadline import Deadline
from aiosync.errors import NotInitializedError, RemoteApplyError, WorkerLostError
from aiosync.transports._offload import Offloader
from aiosync.transports.remote_calls import PendingCall, RemoteObject
from aiosync.transports.torch_distributed.store import first_line, without_prefix
from aiosync.weights.devices import cuda_devices
from aiosync.weights.strategy import to_tensordict

_api: Any = rpc.api
# Seconds that an agent keeps a call pending beyond our deadline, or if no answer is awaited.
_SHORTLY = 10.0


def agent_here() -> Any:
    """Return this process's RPC agent. Raises NotInitializedError if torch RPC is not initialised."""
    if not is_member():
        hint = "call torch.distributed.rpc.init_rpc() first"
        raise NotInitializedError(f"torch RPC is not initialised in this process: {hint}")
    return _api._get_current_rpc_agent()


def is_member() -> bool:
    """Return whether torch RPC is initialised in this process."""
    return dist.is_available() and rpc.is_available() and _api._is_current_rpc_agent_set()


def store_here() -> Any:
    """Return the store that torch RPC was initialised with."""
    return without_prefix(agent_here().store)


def rank_here() -> int:
    """Return this process's rank in torch RPC; -1 if torch RPC is not initialised."""
    return int(rpc.get_worker_info().id) if is_member() else -1


@dataclass(frozen=True)
class _Raised:
    """An exception of a remote call, as text."""

    kind: str
    message: str
    trace: str


class Call(PendingCall):
    """A pending call of a function in another process, which can import the function's module.

    ``to`` is the process's name in torch RPC, or its WorkerInfo. ``workers`` are those that errors name.
    """

    def __init__(
        self,
        to: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        deadline: Deadline,
        workers: Sequence[int] = (),
    ) -> None:
        agent_here()
        super().__init__(workers, deadline)
        self.phase = "ack" if workers else "connect"
        self._name = str(getattr(to, "name", to))
        self.hint = f"{self._name} did not answer a call of torch RPC"
        try:
            # The agent cancels the call too, after our deadline.
            limit = deadline.remaining() + _SHORTLY
            pending = rpc.rpc_async(to, function, args=args, timeout=limit)
            pending.add_done_callback(lambda done: self._resolve(done.wait))
        except RuntimeError as exc:  # no process has that name, or the agent knows that the process is gone
            self._answer.set_exception(exc)

    def _read(self) -> Any:
        try:
            result = self._answer.result()
        except RuntimeError as exc:
            reason = f"a call of torch RPC to {self._name} failed: {first_line(exc)}"
            raise WorkerLostError(self._workers, reason) from exc
        if isinstance(result, _Raised):
            raise RemoteApplyError(self._workers[0], -1, result.kind, result.message, result.trace)
        return result


def notify(to: str, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in another process without waiting. Does nothing if the process is gone."""
    with suppress(RuntimeError):
        rpc.rpc_async(to, function, args=args, timeout=_SHORTLY)


def _call_method(target: Any, owner: type[Any] | None, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method that is looked up by name in the process that calls it."""
    return getattr(owner or type(target), name)(target, *args, **kwargs)


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


class RPCObject(RemoteObject):
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
            Exception: as :meth:`call`.
        """
        return await self._apply(function, args, kwargs, Deadline.after(timeout)).answer()

    def _start_call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> Call:
        return self._apply(_call_method, (self._class, method, *args), kwargs, deadline)

    async def _start_weights(self, weights: Any, deadline: Deadline) -> Call:
        given = to_tensordict(weights)
        with closing(Offloader("aiosync-rpc")) as offloader:
            await offloader.settle_until(cuda_devices(given.values(True, True)), deadline)
            copied = await offloader.run(lambda _: given.cpu().clone())
        return self._start_call("update_policy_weights_", (copied,), {}, deadline)

    def _apply(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> Call:
        return Call(self._info, _apply, (self._rref, function, args, kwargs), deadline, [self.worker_idx])
