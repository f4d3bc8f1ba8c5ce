"""Private mappings of another process's memory: writes of this process are not visible to the owner.

A page shows the owner's bytes until this process writes to it. Then the kernel gives this process a copy of
the page. The copy does not show later writes of the owner, until it is discarded.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

AVAILABLE = sys.platform == "linux"
"""Whether private mappings on this system show the owner's writes, and copied pages can be discarded."""

_PAGE = mmap.PAGESIZE
_ENTRY = 8
_MANY = 256
"""With more runs of copied pages than this, discarding all pages takes less time."""


class PrivateMapping:
    """A private mapping of a file's first bytes. The file's descriptor may be closed afterwards.

    ``buffer`` has the bytes, shape ``(nbytes,)``, dtype ``uint8``, and keeps them mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE)
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)

    def renew(self) -> None:
        """Discard the pages that this process has written, so that the buffer shows the owner's bytes again.

        Blocking: some hundredths of a millisecond per megabyte, and more for written pages.

        Raises:
            OSError: this process has locked its memory.
        """
        for start, nbytes in self._written():
            self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)
            # Maps the pages here, and not in a forward pass.
            self.buffer[start : start + nbytes : _PAGE].sum()

    def written(self, ranges: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return the names of the ranges (first byte, number of bytes) whose pages this process may have
        written."""
        own = _own_pages(self.buffer)
        if own is None:
            return list(ranges)
        return [
            name
            for name, (start, nbytes) in ranges.items()
            if own[start // _PAGE : -(-(start + nbytes) // _PAGE)].any()
        ]

    def _written(self) -> Iterator[tuple[int, int]]:
        """Yield (first byte, number of bytes) of each run of pages that this process has written."""
        own = _own_pages(self.buffer)
        if own is not None:
            edges = torch.diff(own.to(torch.int8), prepend=_ZERO, append=_ZERO)
            starts, ends = [(edges == step).nonzero().view(-1).tolist() for step in (1, -1)]
            if len(starts) <= _MANY:
                for start, end in zip(starts, ends, strict=True):
                    yield start * _PAGE, min(end * _PAGE, self.buffer.numel()) - start * _PAGE
                return
        yield 0, self.buffer.numel()


# On the CPU, whatever torch.set_default_device() says.
_ZERO = torch.zeros(1, dtype=torch.int8, device="cpu")


def _own_pages(buffer: Tensor) -> Tensor | None:
    """Return for each page whether this process has its own copy; None: the kernel does not report it."""
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
    # Bit 63: the page is in memory; bit 62: it is swapped out; bit 61: it is the file's page.
    found = torch.frombuffer(entries, dtype=torch.int64)
    return ((found >> 62) != 0) & ((found >> 61 & 1) == 0)
