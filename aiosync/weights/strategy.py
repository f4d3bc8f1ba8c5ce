"""Extract weights from a model, and apply weights to a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, get_args

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError, LayoutMismatchError
from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import WeightSource, named_tensors, optional_names
from aiosync.weights.layout import Layout
from aiosync.weights.peft import PeftMode, base_parameters, check_mode, has_adapters
from aiosync.weights.target import Slot, WeightTarget, receiver_slots, write
from aiosync.weights.tensors import memory_key, untied
from aiosync.weights.walk import extra_state_root, is_extra_state

StrategyName: TypeAlias = Literal["tensordict", "state_dict"]
"""The formats in which weights are extracted."""


class WeightStrategy:
    """Extracts weights from models in one format, and applies weights in any format.

    Args:
        extract_as: ``"tensordict"`` for a nested TensorDict, or ``"state_dict"`` for a flat dict with dotted
            keys. Both have the same names and values, and both can be applied to every destination.
        peft: which entries of a model with adapters (PEFT, LoRA) are extracted. Other models are extracted
            whole.

            ``"merged"``
                The names and values of the base model with its active adapters merged into it. The merge is
                done on a copy. A model has adapters here if it has ``merge_and_unload``.
            ``"as_is"``
                All entries of the model's own ``state_dict()``, base and adapters.
            ``"adapter"``
                The same without the frozen parameters of the base model. What is trained is extracted:
                adapters, ``modules_to_save``, and parameters of the base that require gradients.

    Raises:
        InvalidArgumentError: ``extract_as`` or ``peft`` has another value; or ``peft="adapter"``, and xxhash
            is not installed.
    """

    # A user's strategy need not call our __init__.
    peft: PeftMode = "merged"

    def __init__(self, extract_as: StrategyName = "tensordict", peft: PeftMode = "merged") -> None:
        if extract_as not in get_args(StrategyName):
            raise InvalidArgumentError(
                f"unknown strategy {extract_as!r}: expected 'tensordict' or 'state_dict'"
            )
        check_mode(peft)
        self.extract_as: StrategyName = extract_as
        self.peft = peft

    def __repr__(self) -> str:
        peft = "" if self.peft == "merged" else f", peft={self.peft!r}"
        return f"WeightStrategy(extract_as={self.extract_as!r}{peft})"

    def extract_weights(self, source: WeightSource) -> TensorDictBase | dict[str, Tensor]:
        """Return the weights of a module, a TensorDict or a dict (flat, nested or mixed).

        The tensors are detached and share the source's memory. Clone them to keep their values. Merged
        weights are in a copy.

        Returns:
            A TensorDict of batch size ``[]``, or a flat dict, according to ``extract_as``.

        Raises:
            UnsupportedTensorError: an entry cannot be sent.
            InvalidArgumentError: the source has another type, or its keys give no names.
        """
        named = named_tensors(source, peft=self.peft)
        return nested_tensordict(named) if self.extract_as == "tensordict" else named

    def apply_weights(
        self,
        destination: WeightTarget,
        weights: WeightSource | None,
        inplace: bool = True,
        *,
        strict: bool = True,
    ) -> None:
        """Write weights into a module, a TensorDict or a dict: all of them, or none.

        All values are checked before any is written. They are converted to the destination's floating dtype
        and moved to its device. Parameters stay the same registered objects and keep ``requires_grad``.
        Tensors on ``meta`` are allocated on the device of the weights. ``weights`` is neither changed nor
        kept.

        A module's extra state is written into a TensorDict or dict if the destination has that extra state
        already; else it is ignored.

        Args:
            destination: a module, a TensorDict or a dict.
            weights: weights in any form. None: nothing is written.
            inplace: whether to write into the destination's memory, as CUDA graphs and code with raw pointers
                require. If not, each tensor is pointed at new memory and stays the same object, and views of
                the old memory keep the old values.
            strict: whether every name of the destination must be given. If not, a subset suffices. With
                ``peft="adapter"`` the parameters of a module's base model may be omitted in any case.

        Raises:
            LayoutMismatchError: names, shapes or dtypes differ, or tied names of the destination were given
                different values. The destination is unchanged.
            UnsupportedTensorError: an entry of the weights or of the destination has no dense values.
            InvalidArgumentError: the weights or the destination have another type.
            Exception: any exception of a module's ``set_extra_state``. The destination is unchanged.
        """
        if weights is None:
            return
        values = named_tensors(weights, peft=self.peft)
        slots = {slot.name: slot for slot in receiver_slots(destination)}
        module = destination if isinstance(destination, nn.Module) else None
        if isinstance(destination, TensorDictBase | Mapping):
            module = None
            roots = {extra_state_root(name) for name in slots if is_extra_state(name)}
            values = {
                name: value
                for name, value in values.items()
                if not is_extra_state(name) or extra_state_root(name) in roots
            }
        optional = optional_names(module)
        if module is not None and self.peft == "adapter" and has_adapters(module):
            optional |= base_parameters(module).keys()
        _check(values, slots, optional, strict=strict)
        extra = nullcontext() if module is None else applying_extra_state(module, values, merge=not strict)
        with extra:
            write([(slots[name], value) for name, value in values.items() if name in slots], inplace=inplace)


def get_strategy(name: str | WeightStrategy, peft: PeftMode = "merged") -> WeightStrategy:
    """Return the strategy with this name; a strategy object unchanged. Raises as :class:`WeightStrategy`."""
    if not isinstance(name, WeightStrategy):
        return WeightStrategy(name, peft)  # type: ignore[arg-type]
    if peft not in ("merged", name.peft):
        raise InvalidArgumentError(f"peft={peft!r}, but strategy= is a {name!r}: set peft in one of the two")
    return name


def to_tensordict(weights: WeightSource) -> TensorDictBase:
    """Return weights in any form as a nested TensorDict of batch size ``[]``, detached and sharing memory.
    Raises as :func:`.named_tensors` and :func:`nested_tensordict`."""
    return nested_tensordict(named_tensors(weights))


def nested_tensordict(named: Mapping[str, Tensor]) -> TensorDictBase:
    """Return a nested TensorDict of batch size ``[]`` with these tensors, from dotted names -> tensors.

    Raises:
        InvalidArgumentError: a name is both a tensor and the start of another name.
    """
    nested: dict[str, Any] = {}
    for name, tensor in named.items():
        *parents, last = name.split(".")
        node: Any = nested
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise InvalidArgumentError(f"weight {name!r} lies below a tensor, not a group")
        if last in node:
            raise InvalidArgumentError(f"weight {name!r} is both a tensor and a group of tensors")
        node[last] = tensor
    return TensorDict(nested, batch_size=[])


def _check(
    values: Mapping[str, Tensor], slots: Mapping[str, Slot], optional: frozenset[str], *, strict: bool
) -> None:
    tensors = {name: slot.tensor for name, slot in slots.items()}
    Layout.of(values).check_receiver(tensors, optional=optional, strict=strict)
    first: dict[object, str] = {}
    ties = {name: first.setdefault(memory_key(t), name) for name, t in tensors.items()}
    ties = {name: primary for name, primary in ties.items() if name != primary}
    if differing := untied(values, ties, {name: tensors[name].dtype for name in ties}):
        raise LayoutMismatchError(differing=differing)
