"""A source's tensors by name, and their match to a layout: both cached while the same module is sent."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.weights.flatten import check_sendable, named_tensors
from aiosync.weights.layout import Layout
from aiosync.weights.sharded import is_sharded, reshard
from aiosync.weights.tensors import check_dense
from aiosync.weights.walk import Structure, has_extra_state, is_transient, join, leaves, modules


class Fit:
    """A source's tensors, matched to the entries of a layout.

    Attributes:
        pairs: (entry name, tensor) in buffer order.
        nbytes: size of these entries in the layout, in bytes.
        whole: whether ``pairs`` has every entry.
        sharded: whether any tensor is a DTensor.

    Raises as :meth:`Layout.fit`.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
        self.pairs = layout.fit(tensors, strict=strict)
        self.nbytes = sum(layout[name].nbytes for name, _ in self.pairs)
        self.whole = len(self.pairs) == len(layout)
        self.sharded = any(is_sharded(tensor) for _, tensor in self.pairs)
        self._layout = layout
        self._looks = [(tensor.dtype, tensor.shape, False) for _, tensor in self.pairs]
        # Tied names with separate memory may have different values the next time.
        self._lasting = (
            strict
            and self.whole
            and all(
                tensors[alias] is tensors.get(name)
                for alias, name in layout.aliases.items()
                if alias in tensors
            )
        )

    def holds(self, layout: Layout) -> bool:
        """Return whether this match is still valid for ``layout``.

        A tensor's ``.data`` may have been replaced by data of another dtype or shape, or on ``meta``.
        """
        if not self._lasting or layout is not self._layout:
            return False
        return [(tensor.dtype, tensor.shape, tensor.is_meta) for _, tensor in self.pairs] == self._looks


class KnownTensors(dict[str, Tensor]):
    """Names -> tensors that are not changed, with their last match in ``fitted``."""

    fitted: Fit | None = None


def fit(layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> Fit:
    """Match a source's tensors to a layout, or return the last match if it is still valid. Raises as
    :meth:`Layout.fit`."""
    if not isinstance(tensors, KnownTensors):
        return Fit(layout, tensors, strict=strict)
    found = tensors.fitted  # read once: another thread may send the same module with another layout
    if found is None or not found.holds(layout):
        found = tensors.fitted = Fit(layout, tensors, strict=strict)
    return found


class _Index:
    """The result of a walk through a module, and the structure for which it is valid."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = KnownTensors()
        self.spread = reshard(module)
        self.structure = Structure(module)
        self.reusable = self.structure.comparable
        own = {id(part) for part in module.modules()}
        for prefix, part in modules(module, merge=True) if self.reusable else ():
            # An adapter's merged copy is not a part of the module, and is made again at each walk.
            if id(part) not in own or isinstance(part, TensorDictBase) or has_extra_state(part):
                self.reusable = False
                return
            check_sendable(prefix, part)
            for key, tensor in leaves(part):
                if not is_transient(part, key):
                    name = join(prefix, key)
                    check_dense(name, tensor, allow_meta=False)
                    self.tensors[name] = tensor


_known: WeakKeyDictionary[nn.Module, _Index] = WeakKeyDictionary()


def known_tensors(module: nn.Module) -> KnownTensors | None:
    """Return the cached result of :func:`module_tensors`; None: there is none, or it is no longer valid."""
    index = _known.get(module)
    if index is None:
        return None
    if index.spread:
        reshard(module)
    return index.tensors if index.structure.unchanged() else None


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's names -> tensors; otherwise as :func:`named_tensors`.

    If the result can be cached, the tensors are the parameters themselves, not detached.
    """
    tensors = known_tensors(module)
    if tensors is not None:
        return tensors
    index = _Index(module)
    if not index.reusable:
        _known.pop(module, None)
        return named_tensors(module)
    _known[module] = index
    return index.tensors
