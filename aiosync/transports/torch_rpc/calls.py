"""Calls of torch.distributed.rpc that are awaited.

An agent of torch RPC runs what comes in on a few threads, which the job's own calls may keep busy; that a
peer has died it tells only those who wait for an answer; and ``rpc.shutdown()`` waits until no call is
pending. So calls are to be short and few, and none may be left pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from aiosync._deadline import Deadline
from aiosync.errors import NotInitializedError, WorkerLostError
from aiosync.transports._offload import handover
from aiosync.transports.torch_distributed.store import first_line

__all__ = ["Call", "agent_here", "is_member", "rank_here", "store_here", "tell"]

_api: Any = rpc.api
_SHORTLY = 10.0
"""Seconds that a call may take whose answer is not waited for."""


def agent_here() -> Any:
    """This process's agent.

    Raises:
        NotInitializedError: there is none.
    """
    if not is_member():
        raise NotInitializedError(
            "torch RPC is not initialised in this process: call torch.distributed.rpc.init_rpc() first"
        )
    return _api._get_current_rpc_agent()


def is_member() -> bool:
    """Whether this process takes part in torch RPC."""
    return dist.is_available() and rpc.is_available() and _api._is_current_rpc_agent_set()


def store_here() -> Any:
    """The store that the members of torch RPC met in."""
    store = agent_here().store
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def rank_here() -> int:
    """This process's rank in torch RPC; -1 if it takes no part."""
    return int(rpc.get_worker_info().id) if is_member() else -1


class Call:
    """A call of a function in another process, under way. No thread waits for its answer.

    Args:
        to: a name in torch RPC, or a WorkerInfo.
        function: of a module that can be imported there.
        args: its arguments.
        deadline: for the answer.

    Raises:
        NotInitializedError: this process takes no part in torch RPC.
    """

    def __init__(
        self, to: Any, function: Callable[..., Any], args: Sequence[Any], deadline: Deadline
    ) -> None:
        agent_here()
        self._name = str(getattr(to, "name", to))
        self._deadline = deadline
        self._answer: asyncio.Future[Any]
        self._answer, settle = handover()
        try:
            # The agent is to give it up too, but after us.
            limit = deadline.remaining() + _SHORTLY
            pending = rpc.rpc_async(to, function, args=args, timeout=limit)
            pending.add_done_callback(lambda done: settle(done.wait))
        except RuntimeError as exc:  # no process has that name, or the agent knows already that it is gone
            self._answer.set_exception(exc)

    async def answer(self, deadline: Deadline | None = None) -> Any:
        """What the function returned. Given up, it can be asked for again.

        Args:
            deadline: another than the call's own.

        Raises:
            WorkerLostError: the process takes no part, or no more.
            SyncTimeoutError: it did not answer in time.
        """
        deadline = deadline or self._deadline
        await asyncio.wait([self._answer], timeout=deadline.remaining())
        if not self._answer.done():
            hint = f"{self._name} did not answer a call of torch RPC"
            raise deadline.error("connect", hint=hint)
        try:
            return self._answer.result()
        except RuntimeError as exc:
            reason = f"a call of torch RPC to {self._name} failed: {first_line(exc)}"
            raise WorkerLostError((), reason) from exc

    def forget(self) -> None:
        """The answer is not needed any more."""
        self._answer.cancel()


def tell(to: str, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in another process, which may be gone, and do not wait for it."""
    with suppress(RuntimeError):
        rpc.rpc_async(to, function, args=args, timeout=_SHORTLY)
