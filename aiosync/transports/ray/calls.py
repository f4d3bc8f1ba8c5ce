"""Calls of Ray actors that are awaited: Ray says when an answer is there, and no thread waits for it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import (
    NotInitializedError,
    Phase,
    RemoteApplyError,
    SyncTimeoutError,
    WorkerLostError,
)
from aiosync.transports._offload import handover

__all__ = ["ActorCall", "handle_of", "in_actor", "ray_here"]


def ray_here() -> Any:
    """Ray, in a process that takes part in a cluster.

    Raises:
        NotInitializedError: it does not.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        installed = importlib.util.find_spec("ray") is not None
        how = "call ray.init() first" if installed else "pip install 'aiosync[ray]', and call ray.init()"
        raise NotInitializedError(f"this process takes no part in a Ray cluster: {how}")
    return ray


def handle_of(actor: Any) -> Any:
    """The handle of an actor, given that or what has it as ``_actor``."""
    return getattr(actor, "_actor", actor)


def in_actor(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Begin ``function(actor, *args)`` in an actor's process; gives Ray's reference to the answer.

    An actor runs one such call after the other, as it runs its methods; an async one on its event loop. It
    may be called twice: an actor whose process has died is asked again when Ray has started it again.

    Raises:
        NotInitializedError: this process takes no part in a cluster.
    """
    ray_here()
    return handle.__ray_call__.options(max_task_retries=-1).remote(function, *args)


class ActorCall:
    """A call of an actor's, under way. No thread waits for its answer.

    Args:
        worker: which worker that is, for messages.
        pending: Ray's reference to the answer.
        deadline: for the answer.
        phase: what is waited for, for messages.
    """

    def __init__(self, worker: int, pending: Any, deadline: Deadline, phase: Phase = "connect") -> None:
        self._worker = worker
        self._deadline = deadline
        self._phase: Phase = phase
        self._exceptions = ray_here().exceptions
        self._answer: asyncio.Future[Any]
        self._answer, settle = handover()
        pending.future().add_done_callback(lambda done: settle(done.result))

    async def answer(self, deadline: Deadline | None = None) -> Any:
        """What it returned. Given up, it can be asked for again.

        Args:
            deadline: another than the call's own.

        Raises:
            RemoteApplyError: it raised; with the exception's type, message and traceback.
            WorkerLostError: the actor is gone.
            SyncTimeoutError: it did not answer in time.
        """
        deadline = deadline or self._deadline
        await asyncio.wait([self._answer], timeout=deadline.remaining())
        if not self._answer.done():
            hint = "the actor did not answer a call: it may be busy in one of its methods"
            raise SyncTimeoutError(self._phase, seconds=deadline.seconds, workers=[self._worker], hint=hint)
        error = self._translated(self._answer.exception())
        if error is not None:
            raise error
        return self._answer.result()

    def forget(self) -> None:
        """The answer is not needed any more."""
        self._answer.cancel()

    def _translated(self, error: BaseException | None) -> BaseException | None:
        if isinstance(error, self._exceptions.RayTaskError):
            cause = getattr(error, "cause", None) or error
            kind = f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins.")
            return RemoteApplyError(self._worker, -1, kind, str(cause), str(error))
        if isinstance(error, self._exceptions.RayError):
            return WorkerLostError([self._worker], f"Ray says: {_first_line(error)}")
        return error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or repr(error)
