"""Calls of the methods of Ray actors. Weights are put into the object store once for all actors.

No thread blocks until the answer of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync.errors import (
    InvalidArgumentError,
    NotInitializedError,
    Phase,
    RemoteApplyError,
    WorkerLostError,
)
from aiosync.transports._offload import DetachedThread, detached
from aiosync.transports.ray import ray_here
from aiosync.transports.ray.object_store import as_tensor, packed, put
from aiosync.transports.remote_calls import PendingCall, RemoteObject
from aiosync.transports.torch_distributed.store import first_line
from aiosync.weights.flatten import named_tensors
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import nested_tensordict
from aiosync.weights.target import receiver_tensors

UpdateMethod: TypeAlias = Literal["tensordict", "state_dict"]
"""The form in which an actor accepts weights."""


def handle_of(actor: Any) -> Any:
    """Return the handle of an actor, given the handle or an object that has it as ``_actor``."""
    return getattr(actor, "_actor", actor)


def in_actor(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Start ``function(actor, *args)`` in an actor's process; returns Ray's reference to the result.

    An actor runs such calls like its methods. A call may run twice: if the actor's process dies, Ray repeats
    the call after it has restarted the actor.
    """
    ray_here()
    return handle.__ray_call__.options(max_task_retries=-1).remote(function, *args)


class ActorCall(PendingCall):
    """A pending call of an actor: ``pending`` is Ray's reference to the result."""

    hint = "the actor did not answer a call: it may be busy in one of its methods, or still starting"

    def __init__(self, worker: int, pending: Any, deadline: Deadline, phase: Phase = "connect") -> None:
        super().__init__([worker], deadline)
        self.phase = phase
        self._exceptions = ray_here().exceptions
        pending.future().add_done_callback(lambda done: self._resolve(done.result))

    def _read(self) -> Any:
        try:
            return self._answer.result()
        except self._exceptions.RayTaskError as exc:
            cause = getattr(exc, "cause", None) or exc
            kind = f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins.")
            raise RemoteApplyError(self._workers[0], -1, kind, str(cause), str(exc)) from None
        except self._exceptions.RayError as exc:
            raise WorkerLostError(self._workers, f"Ray says: {first_line(exc)}") from None


@dataclass(frozen=True, eq=False)
class PutWeights:
    """Weights in the object store. They stay there as long as this object exists."""

    # Ray's reference. An actor's method that is called with it gets a TensorDict or a dict, whose tensors
    # view the store. The method must not write to them.
    ref: Any
    form: UpdateMethod


class _Packed:
    """Weights as one flat array, which Ray stores without pickling it. Unpickling gives the weights again."""

    def __init__(self, layout: Layout, buffer: Tensor, parameters: Sequence[str], form: UpdateMethod) -> None:
        self._parts = layout.to_wire(), buffer.numpy(), tuple(parameters), form

    def __reduce__(self) -> Any:
        return _unpack, self._parts


def _unpack(wire: object, array: Any, parameters: Sequence[str], form: UpdateMethod) -> Any:
    views = dict(Layout.from_wire(wire).views(as_tensor(array)))
    if form == "state_dict":
        return views
    made: dict[int, nn.Parameter] = {}  # tied names share one parameter
    for name in parameters:
        at = views[name].data_ptr()
        if at not in made:
            made[at] = nn.Parameter(views[name], requires_grad=False)
        views[name] = made[at]
    return nested_tensordict(views)


async def put_weights(
    weights: Any, form: UpdateMethod = "tensordict", tensor_transport: str = "object_store"
) -> PutWeights:
    """Put an ``nn.Module``, a TensorDict or a dict into the object store, for any number of actors.

    ``form`` is what the actors' methods get. ``tensor_transport`` is Ray's transport of the tensors. Raises
    InvalidArgumentError for weights of another type or without tensors, and as :func:`ray_here`.
    """
    ray_here()

    def pack() -> Any:
        layout, buffer = packed(named_tensors(weights))
        if tensor_transport == "object_store":
            return put(_Packed(layout, buffer, _parameters(weights, layout), form), tensor_transport)
        views = dict(layout.views(buffer))
        return put(views if form == "state_dict" else nested_tensordict(views), tensor_transport)

    thread = DetachedThread("aiosync-ray")
    try:
        return PutWeights(await detached(thread, pack), form)
    finally:
        thread.close()


def _parameters(weights: Any, layout: Layout) -> list[str]:
    """Return the names of the entries that are parameters of ``weights``."""
    if not isinstance(weights, nn.Module | TensorDictBase):
        return []
    live = receiver_tensors(weights)
    known = {*layout.names, *layout.aliases}
    return [name for name, tensor in live.items() if isinstance(tensor, nn.Parameter) and name in known]


class RayActor(RemoteObject):
    """Calls methods of one Ray actor, such as a remote collector, and awaits their results.

    Weights are passed to ``update_policy_weights_(weights)``, as a TensorDict whose tensors view the object
    store. The actor must not write to them. It has to copy what it wants to change.

    Args:
        remote_actor: the actor's handle.
        tensor_transport: Ray's transport of the tensors, ``"object_store"`` or ``"nixl"``.
        worker_idx: the index of the actor's worker, for messages.
    """

    def __init__(
        self, remote_actor: Any, *, tensor_transport: str = "object_store", worker_idx: int = 0
    ) -> None:
        super().__init__(worker_idx)
        self._actor = remote_actor
        self._form: UpdateMethod = "tensordict"
        self._tensor_transport = tensor_transport

    def check_connection(self) -> bool:
        try:
            ray_here()
        except NotInitializedError:
            return False
        return not self._closed

    def _start_call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> ActorCall:
        ray_here()
        try:
            remote = getattr(self._actor, method)
        except AttributeError:
            raise InvalidArgumentError(f"the actor of worker {self.worker_idx} has no {method}()") from None
        return ActorCall(self.worker_idx, remote.remote(*args, **kwargs), deadline, "ack")

    async def _start_weights(self, weights: Any, deadline: Deadline) -> ActorCall:
        if not isinstance(weights, PutWeights):
            try:
                async with asyncio.timeout(deadline.remaining()):
                    weights = await put_weights(weights, self._form, self._tensor_transport)
            except TimeoutError:
                raise deadline.error("stage", hint="Ray's object store did not take the weights") from None
        return self._call_with(weights, deadline)

    def _call_with(self, weights: PutWeights, deadline: Deadline) -> ActorCall:
        return self._start_call("update_policy_weights_", (weights.ref,), {}, deadline)


class RayModuleActor(RayActor):
    """Calls methods of a Ray actor that holds a model.

    Weights are passed to the actor's ``_update_weights_tensordict(params=)`` or
    ``_update_weights_state_dict(state_dict=)``.

    Args:
        actor_ref: the actor's handle, or an object that has it as ``_actor``.
        update_method: ``"tensordict"`` or ``"state_dict"``.
        tensor_transport: Ray's transport of the tensors, ``"object_store"`` or ``"nixl"``.
        worker_idx: the index of the actor's worker, for messages.

    Raises:
        InvalidArgumentError: ``update_method`` has another value.
    """

    def __init__(
        self,
        actor_ref: Any,
        update_method: UpdateMethod = "tensordict",
        tensor_transport: str = "object_store",
        *,
        worker_idx: int = 0,
    ) -> None:
        super().__init__(handle_of(actor_ref), tensor_transport=tensor_transport, worker_idx=worker_idx)
        if update_method not in ("tensordict", "state_dict"):
            expected = "expected 'tensordict' or 'state_dict'"
            raise InvalidArgumentError(f"update_method={update_method!r}: {expected}")
        self._form = update_method

    def _call_with(self, weights: PutWeights, deadline: Deadline) -> ActorCall:
        if weights.form != self._form:
            expected = f"weights that were put as {self._form!r} for this actor"
            raise InvalidArgumentError(f"expected {expected}, got {weights.form!r}")
        argument = "params" if self._form == "tensordict" else "state_dict"
        return self._start_call(f"_update_weights_{self._form}", (), {argument: weights.ref}, deadline)
