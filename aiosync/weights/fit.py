"""Match a source's tensors to a layout, and reuse the match when the same module is sent again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aiosync.weights.layout import Layout
from aiosync.weights.sharded import is_sharded


class Fit:
    """A source's tensors, matched to the entries of a layout.

    Args:
        layout: the layout.
        tensors: the source's names -> tensors; see :meth:`Layout.fit`.
        strict: whether every name must be given.

    Attributes:
        pairs: (entry name, tensor) in buffer order.
        nbytes: size of these entries in the layout, in bytes.
        whole: whether ``pairs`` has every entry.
        sharded: whether any tensor is a DTensor.

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
    """Match a source's tensors to a layout, or return the last match if it is still valid.

    Raises:
        As :meth:`Layout.fit`.
    """
    if not isinstance(tensors, KnownTensors):
        return Fit(layout, tensors, strict=strict)
    found = tensors.fitted  # read once: another thread may send the same module with another layout
    if found is None or not found.holds(layout):
        found = tensors.fitted = Fit(layout, tensors, strict=strict)
    return found
