"""Copying many tensors at once, in pieces small enough to be given up in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["INLINE_LIMIT", "copy_pairs", "nbytes_of"]

INLINE_LIMIT = 256 * 1024
"""Bytes up to which a copy takes less time than handing it to a thread and back."""

_PIECE = 32 * 1024 * 1024


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that these tensors hold."""
    return sum(t.nbytes for t in tensors)


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]], cancelled: Callable[[], bool] = lambda: False) -> bool:
    """Copy each second tensor into the first, converting dtype and device; returns whether it finished.

    Args:
        pairs: (destination, source) of equal shapes.
        cancelled: asked before each piece of some tens of megabytes; true ends the copy there.
    """
    if not pairs:
        return True
    small = nbytes_of(destination for destination, _ in pairs) <= _PIECE
    with torch.no_grad():
        for batch in [pairs] if small else _batches(pairs):
            if cancelled():
                return False
            torch._foreach_copy_([d for d, _ in batch], [s for _, s in batch])
    for device in {t.device for pair in pairs for t in pair if t.is_cuda}:
        # A copy on a device is only begun by now; whoever is told next reads from another stream.
        torch.cuda.current_stream(device).synchronize()
    return True


def _batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        for piece in _pieces(*pair):
            batch.append(piece)
            size += piece[0].nbytes
            if size >= _PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(destination: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    source = source.detach()
    if destination.nbytes <= 2 * _PIECE or not (destination.is_contiguous() and source.is_contiguous()):
        yield destination, source
        return
    step = _PIECE // destination.element_size()
    yield from zip(destination.view(-1).split(step), source.view(-1).split(step), strict=True)
