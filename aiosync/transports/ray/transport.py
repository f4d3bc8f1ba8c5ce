"""The way to one Ray actor, by calling its methods; weights are put in the store once for all actors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.transports._offload import DetachedThread, detached
from aiosync.transports.ray.calls import ActorCall, handle_of, ray_here
from aiosync.transports.ray.object_store import as_tensor, packed, put
from aiosync.transports.remote_calls import CallingTransport
from aiosync.weights.flatten import named_tensors
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import nested_tensordict
from aiosync.weights.target import receiver_tensors

__all__ = ["PutWeights", "RayActorTransport", "RayTransport", "UpdateMethod", "put_weights"]

UpdateMethod: TypeAlias = Literal["tensordict", "state_dict"]
"""In which form an actor takes weights."""


class PutWeights:
    """Weights in the object store, for as long as this is kept.

    Attributes:
        ref: Ray's reference; an actor's method that is called with it gets a TensorDict or a dict, whose
            tensors view the store: they are to be read only.
        form: which of the two.
    """

    def __init__(self, ref: Any, form: UpdateMethod) -> None:
        self.ref = ref
        self.form: UpdateMethod = form


class _Packed:
    """One flat array in place of many tensors: Ray moves its bytes as they are. Arrives as what it was made
    of."""

    def __init__(self, layout: Layout, buffer: Tensor, parameters: Sequence[str], form: UpdateMethod) -> None:
        self._parts = layout.to_wire(), buffer.numpy(), tuple(parameters), form

    def __reduce__(self) -> Any:
        return _unpack, self._parts


def _unpack(wire: object, array: Any, parameters: Sequence[str], form: UpdateMethod) -> Any:
    views = dict(Layout.from_wire(wire).views(as_tensor(array)))
    if form == "state_dict":
        return views
    made: dict[int, nn.Parameter] = {}  # tied ones stay one
    for name in parameters:
        at = views[name].data_ptr()
        if at not in made:
            made[at] = nn.Parameter(views[name], requires_grad=False)
        views[name] = made[at]
    return nested_tensordict(views)


async def put_weights(
    weights: Any, form: UpdateMethod = "tensordict", tensor_transport: str = "object_store"
) -> PutWeights:
    """Put weights in the object store, in one piece, to hand them to any number of actors.

    Args:
        weights: an ``nn.Module``, a TensorDict or a dict.
        form: what methods are to get.
        tensor_transport: how Ray moves it.

    Raises:
        NotInitializedError: this process takes no part in a Ray cluster.
        InvalidArgumentError, UnsupportedTensorError: these are no weights, or none that can be sent.
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
    """The entries that are parameters where they come from, and are to be where they go."""
    if not isinstance(weights, nn.Module | TensorDictBase):
        return []
    live = receiver_tensors(weights)
    known = {*layout.names, *layout.aliases}
    return [name for name, tensor in live.items() if isinstance(tensor, nn.Parameter) and name in known]


class RayTransport(CallingTransport):
    """The way to one Ray actor (a remote collector, say): its methods are called there, and awaited here.

    Weights go to ``update_policy_weights_(weights)``, as a TensorDict whose tensors view the object store:
    the actor is to read them only, and copy what it wants to change.

    Args:
        remote_actor: its handle.
        tensor_transport: how Ray moves weights, ``"object_store"`` or ``"nixl"``.
        worker_idx: which worker it is, for messages.
    """

    _method: ClassVar[str] = "update_policy_weights_"

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

    def _begin(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> ActorCall:
        ray_here()
        try:
            remote = getattr(self._actor, method)
        except AttributeError:
            raise InvalidArgumentError(f"the actor of worker {self.worker_idx} has no {method}()") from None
        return ActorCall(self.worker_idx, remote.remote(*args, **kwargs), deadline, "ack")

    async def _begin_weights(self, weights: Any, deadline: Deadline) -> ActorCall:
        if not isinstance(weights, PutWeights):
            try:
                async with asyncio.timeout(deadline.remaining()):
                    weights = await put_weights(weights, self._form, self._tensor_transport)
            except TimeoutError:
                raise deadline.error("stage", hint="Ray's object store did not take the weights") from None
        return self._hand_over(weights, deadline)

    def _hand_over(self, weights: PutWeights, deadline: Deadline) -> ActorCall:
        return self._begin(self._method, (weights.ref,), {}, deadline)

    async def _result(self, begun: ActorCall, deadline: Deadline | None = None) -> Any:
        return await begun.answer(deadline)

    def _forget(self, begun: ActorCall) -> None:
        begun.forget()


class RayActorTransport(RayTransport):
    """The way to an actor that holds a model: weights go to its ``_update_weights_tensordict(params=)`` or
    ``_update_weights_state_dict(state_dict=)``.

    Args:
        actor_ref: its handle, or what has that as ``_actor``.
        update_method: which of the two: ``"tensordict"`` or ``"state_dict"``.
        tensor_transport: how Ray moves weights, ``"object_store"`` or ``"nixl"``.
        worker_idx: which worker it is, for messages.

    Raises:
        InvalidArgumentError: another method.
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
            raise InvalidArgumentError(
                f"update_method={update_method!r}: expected 'tensordict' or 'state_dict'"
            )
        self._form = update_method

    def _hand_over(self, weights: PutWeights, deadline: Deadline) -> ActorCall:
        if weights.form != self._form:
            raise InvalidArgumentError(f"this actor takes a {self._form}, and a {weights.form} was put")
        argument = "params" if self._form == "tensordict" else "state_dict"
        return self._begin(f"_update_weights_{self._form}", (), {argument: weights.ref}, deadline)
