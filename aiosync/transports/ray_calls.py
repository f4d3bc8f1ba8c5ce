"""Calls of Ray actors that are awaited: Ray says when an answer is there, and no thread waits for it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import NotInitializedError, RemoteApplyError, SyncTimeoutError, WorkerLostError
from aiosync.transports._offload import handover

__all__ = ["ActorCall", "ray_here"]


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


class ActorCall:
    """``function(actor, *args)`` in an actor's process, under way. An actor runs one such call after the
    other, as it runs its methods; an async one on its event loop. It may be called twice.

    Args:
        worker: which worker that is, for messages.
        handle: the actor's.
        function: of a module that can be imported there.
        args: its further arguments.
    """

    def __init__(self, worker: int, handle: Any, function: Callable[..., Any], *args: Any) -> None:
        self._worker = worker
        self._exceptions = ray_here().exceptions
        self._answer: asyncio.Future[Any]
        self._answer, settle = handover()
        # An actor whose process has died is asked again when Ray has started it again, if it does.
        pending = handle.__ray_call__.options(max_task_retries=-1).remote(function, *args)
        pending.future().add_done_callback(lambda done: settle(done.result))

    def on_answer(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call back on this event loop with what was raised, as :meth:`answer` raises it."""

        def tell(future: asyncio.Future[Any]) -> None:
            if not future.cancelled():
                callback(self._translated(future.exception()))

        self._answer.add_done_callback(tell)

    async def answer(self, deadline: Deadline) -> Any:
        """What the function returned.

        Raises:
            RemoteApplyError: it raised; with the exception's type, message and traceback.
            WorkerLostError: the actor is gone.
            SyncTimeoutError: it did not answer in time.
        """
        await asyncio.wait([self._answer], timeout=deadline.remaining())
        if not self._answer.done():
            hint = "the actor did not answer a call: it may be busy in one of its methods"
            raise SyncTimeoutError("connect", seconds=deadline.seconds, workers=[self._worker], hint=hint)
        error = self._translated(self._answer.exception())
        if error is not None:
            raise error
        return self._answer.result()

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
