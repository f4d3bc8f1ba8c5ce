"""Awaitable calls of Ray actors. No thread blocks until the answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import NotInitializedError, Phase, RemoteApplyError, SyncTimeoutError, WorkerLostError
from aiosync.transports.remote_calls import PendingCall
from aiosync.transports.torch_distributed.store import first_line


def ray_here() -> Any:
    """Return the module ``ray``. Raises NotInitializedError if this process is not connected to a cluster."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        installed = importlib.util.find_spec("ray") is not None
        how = "call ray.init() first" if installed else "pip install 'aiosync[ray]', and call ray.init()"
        raise NotInitializedError(f"this process is not connected to a Ray cluster: {how}")
    return ray


def handle_of(actor: Any) -> Any:
    """Return the handle of an actor, given the handle or an object that has it as ``_actor``."""
    return getattr(actor, "_actor", actor)


def in_actor(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Start ``function(actor, *args)`` in an actor's process; returns Ray's reference to the result.

    An actor runs such calls one after the other, like its methods; an async actor runs them on its event
    loop. A call may run twice: if the actor's process dies, Ray repeats the call after it has restarted the
    actor. Raises as :func:`ray_here`.
    """
    ray_here()
    return handle.__ray_call__.options(max_task_retries=-1).remote(function, *args)


class ActorCall(PendingCall):
    """A pending call of an actor: ``pending`` is Ray's reference to the result.

    ``phase`` is the one that a timeout's error names.
    """

    def __init__(self, worker: int, pending: Any, deadline: Deadline, phase: Phase = "connect") -> None:
        super().__init__(deadline)
        self._worker = worker
        self._phase: Phase = phase
        self._exceptions = ray_here().exceptions
        pending.future().add_done_callback(lambda done: self._resolve(done.result))

    async def answer(self, deadline: Deadline | None = None) -> Any:
        late = await self._wait(deadline)
        if late is not None:
            hint = "the actor did not answer a call: it may be busy in one of its methods"
            raise SyncTimeoutError(self._phase, seconds=late.seconds, workers=[self._worker], hint=hint)
        error = self._translate(self._answer.exception())
        if error is not None:
            raise error
        return self._answer.result()

    def _translate(self, error: BaseException | None) -> BaseException | None:
        if isinstance(error, self._exceptions.RayTaskError):
            cause = getattr(error, "cause", None) or error
            kind = f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins.")
            return RemoteApplyError(self._worker, -1, kind, str(cause), str(error))
        if isinstance(error, self._exceptions.RayError):
            return WorkerLostError([self._worker], f"Ray says: {first_line(error)}")
        return error
