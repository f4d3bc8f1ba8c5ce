"""A source fitted to a layout; for a module that is sent again and again, found again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aiosync.weights.layout import Layout
from aiosync.weights.sharded import is_sharded

__all__ = ["Fit", "KnownTensors", "fit"]


class Fit:
    """What of a source goes where.

    Args:
        layout: the layout.
        tensors: the source; see :meth:`Layout.fit`.
        strict: whether every name has to be there.

    Attributes:
        pairs: (entry name, tensor) in buffer order.
        nbytes: bytes that these take in the layout.
        whole: whether every entry is among them.
        sharded: whether any is spread over ranks.

    Raises:
        As :meth:`Layout.fit`.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
        self.pairs = layout.fit(tensors, strict=strict)
        self.nbytes = sum(layout[name].nbytes for name, _ in self.pairs)
        self.whole = len(self.pairs) == len(layout)
        self.sharded = any(is_sharded(tensor) for _, tensor in self.pairs)
        self._layout = layout
        self._looks = [(tensor.dtype, tensor.shape, False) for _, tensor in self.pairs]
        # Separate memory for what is one tensor in the layout may differ the next time.
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
        """Whether the same tensors still fit this layout: what is in them may have been replaced, by what has
        another dtype or shape, or no values."""
        if not self._lasting or layout is not self._layout:
            return False
        return [(tensor.dtype, tensor.shape, tensor.is_meta) for _, tensor in self.pairs] == self._looks


class KnownTensors(dict[str, Tensor]):
    """Names and tensors that are not changed, and how they fitted the last time."""

    fitted: Fit | None = None


def fit(layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> Fit:
    """Fit a source to a layout.

    Raises:
        As :meth:`Layout.fit`.
    """
    if not isinstance(tensors, KnownTensors):
        return Fit(layout, tensors, strict=strict)
    found = tensors.fitted  # read once: another thread may send the same module by another layout
    if found is None or not found.holds(layout):
        found = tensors.fitted = Fit(layout, tensors, strict=strict)
    return found
