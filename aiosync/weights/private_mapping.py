"""Another process's memory, mapped so that what this process writes into it stays its own.

Pages are the owner's until this process writes into them, and copies of its own from then on: these show
nothing of what the owner writes later, until they are given back.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["AVAILABLE", "PrivateMapping"]

AVAILABLE = sys.platform == "linux"
"""Whether the system shows what the owner writes to who has mapped it so, and can be given a copy back."""

_PAGE = mmap.PAGESIZE
_ENTRY = 8
_MANY = 256
"""Runs of pages from which on it takes less time to give everything back."""


class PrivateMapping:
    """A file's first bytes.

    Args:
        fd: the file; not needed any longer afterwards.
        nbytes: how many.

    Attributes:
        buffer: they, shape ``(nbytes,)``, dtype ``uint8``; it keeps them mapped.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE)
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)

    def renew(self) -> None:
        """Show the owner's bytes again, wherever this process wrote. Blocking: some hundredths of a
        millisecond per megabyte, and more where it wrote.

        Raises:
            OSError: this process has its memory locked.
        """
        for start, nbytes in self._written():
            self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)
            self.buffer[
                start : start + nbytes : _PAGE
            ].sum()  # has the pages mapped here, not in a forward pass

    def written(self, ranges: Mapping[str, tuple[int, int]]) -> list[str]:
        """The names of those (first byte, number of bytes) in whose pages this process may have written."""
        own = _own_pages(self.buffer)
        if own is None:
            return list(ranges)
        return [
            name
            for name, (start, nbytes) in ranges.items()
            if own[start // _PAGE : -(-(start + nbytes) // _PAGE)].any()
        ]

    def _written(self) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of each run of pages that are this process's own."""
        own = _own_pages(self.buffer)
        if own is not None:
            edges = torch.diff(own.to(torch.int8), prepend=_ZERO, append=_ZERO)
            starts, ends = [(edges == step).nonzero().view(-1).tolist() for step in (1, -1)]
            if len(starts) <= _MANY:
                for start, end in zip(starts, ends, strict=True):
                    yield start * _PAGE, min(end * _PAGE, self.buffer.numel()) - start * _PAGE
                return
        yield 0, self.buffer.numel()


# torch.set_default_device() must not decide where this is.
_ZERO = torch.zeros(1, dtype=torch.int8, device="cpu")


def _own_pages(buffer: Tensor) -> Tensor | None:
    """Of each page whether it is a copy of this process's own; None if the kernel does not say."""
    pages = -(-buffer.numel() // _PAGE)
    entries = bytearray(pages * _ENTRY)
    offset = buffer.data_ptr() // _PAGE * _ENTRY
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            done = 0
            while done < len(entries):
                count = os.preadv(table.fileno(), [memoryview(entries)[done:]], offset + done)
                if not count:
                    return None
                done += count
    except OSError:
        return None
    # Bit 63: the page is in memory, 62: it is swapped out, 61: it is the file's.
    found = torch.frombuffer(entries, dtype=torch.int64)
    return ((found >> 62) != 0) & ((found >> 61 & 1) == 0)
