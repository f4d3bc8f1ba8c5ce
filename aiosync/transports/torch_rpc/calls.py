"""Awaitable calls of torch.distributed.rpc.

Calls should be few and short, and none may stay pending. The reasons: an agent of torch RPC runs incoming
calls in a few threads, which the job's own calls may occupy; it reports a peer's death only to pending calls;
and ``rpc.shutdown()`` waits for all pending calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from aiosync._deadline import Deadline
from aiosync.errors import NotInitializedError, WorkerLostError
from aiosync.transports.remote_calls import PendingCall
from aiosync.transports.torch_distributed.store import first_line, without_prefix

_api: Any = rpc.api
# Seconds that an agent keeps a call pending beyond our deadline, or if no answer is awaited.
_SHORTLY = 10.0


def agent_here() -> Any:
    """Return this process's RPC agent. Raises NotInitializedError if torch RPC is not initialised."""
    if not is_member():
        raise NotInitializedError(
            "torch RPC is not initialised in this process: call torch.distributed.rpc.init_rpc() first"
        )
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


class Call(PendingCall):
    """A pending call of a function in another process, which can import the function's module.

    ``to`` is the process's name in torch RPC, or its WorkerInfo. Raises as :func:`agent_here`.
    """

    def __init__(
        self, to: Any, function: Callable[..., Any], args: Sequence[Any], deadline: Deadline
    ) -> None:
        agent_here()
        super().__init__(deadline)
        self._name = str(getattr(to, "name", to))
        try:
            # The agent cancels the call too, after our deadline.
            limit = deadline.remaining() + _SHORTLY
            pending = rpc.rpc_async(to, function, args=args, timeout=limit)
            pending.add_done_callback(lambda done: self._resolve(done.wait))
        except RuntimeError as exc:  # no process has that name, or the agent knows that the process is gone
            self._answer.set_exception(exc)

    async def answer(self, deadline: Deadline | None = None) -> Any:
        late = await self._wait(deadline)
        if late is not None:
            raise late.error("connect", hint=f"{self._name} did not answer a call of torch RPC")
        try:
            return self._answer.result()
        except RuntimeError as exc:
            reason = f"a call of torch RPC to {self._name} failed: {first_line(exc)}"
            raise WorkerLostError((), reason) from exc


def notify(to: str, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in another process without waiting. Does nothing if the process is gone."""
    with suppress(RuntimeError):
        rpc.rpc_async(to, function, args=args, timeout=_SHORTLY)
