"""Segments: contiguous memory, private to a process or shared by several.

Shared CPU memory is an anonymous file (``memfd`` on Linux). It has no name in ``/dev/shm``, is not limited by
that mount's size, and is freed when the last process that maps it ends, for any reason. Another process opens
it through ``/proc/<pid>/fd``. Systems without ``memfd`` use a file in the temporary directory, which is
deleted when its owner closes the segment. CUDA memory is shared by CUDA IPC: torch keeps it, after its owner
has dropped it, for the processes that map it.

No segment is unmapped explicitly: tensors may view it, and their references keep it mapped. After
:meth:`Segment.close` other processes can no longer open it.

Writes into privately attached memory are not visible to the owner. A page shows the owner's bytes until this
process writes to it. Then the kernel gives this process a copy of the page. The copy does not show later
writes of the owner, until :meth:`Segment.renew` discards it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiosync.errors import ArenaAllocationError, ProtocolError
from aiosync.weights.copying import read_at
from aiosync.weights.cuda_ipc import CudaExports, decline, free_dropped_memory, import_cuda
from aiosync.weights.devices import allocate_on, as_tensor

CAN_ATTACH_PRIVATELY = sys.platform == "linux"
"""Whether private mappings on this system show the owner's writes, and copied pages can be discarded."""

_PAGE = mmap.PAGESIZE
_PAGE_ENTRY = 8
"""Bytes of a page's entry in /proc/self/pagemap."""

_MANY_RUNS = 256
"""With more runs of copied pages than this, discarding all pages takes less time."""

_local: dict[str, Tensor] = {}
"""Key of a local segment -> its memory."""

_WORTH_HUGE_PAGES = 4 << 20
"""Private segments of this many bytes or more use huge pages."""


class Segment:
    """A 1-D ``uint8`` tensor, and a handle by which another process can map the same memory."""

    def __init__(
        self,
        buffer: Tensor,
        handle: dict[str, Any] | None = None,
        release: Callable[[], object] | None = None,
        private: mmap.mmap | None = None,
    ) -> None:
        self.buffer = buffer  # shape (nbytes,), dtype uint8
        self.handle = handle  # argument of attach() in another process; None: the memory is private
        self._release = release
        self._private = private  # None: writes of this process are visible to the others
        self._exports: CudaExports | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.buffer.numel()

    def has(self, address: int) -> bool:
        """Return whether an address is in this memory."""
        return 0 <= address - self.buffer.data_ptr() < self.buffer.numel()

    @classmethod
    def private(cls, nbytes: int, device: torch.device | None = None, *, warm: bool = True) -> Segment:
        """Allocate memory of this process alone.

        Args:
            nbytes: its size, in bytes.
            device: where; None: in the processor's memory.
            warm: write its pages once, which takes time, so that later copies are fast.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        try:
            if nbytes >= _WORTH_HUGE_PAGES and (device is None or device.type == "cpu"):
                memory = _huge(nbytes)
            elif device is not None and device.type == "cuda":
                return cls(allocate_on(device, nbytes))
            else:
                where = "cpu" if device is None else device  # not torch's default device
                memory = torch.empty(nbytes, dtype=torch.uint8, device=where)
            return cls(memory.zero_() if warm else memory)
        except (RuntimeError, OSError) as exc:  # torch and mmap raise these when they are out of memory
            raise ArenaAllocationError(nbytes, str(exc).splitlines()[0]) from exc

    @classmethod
    def shared(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Allocate memory that other processes of this machine can map.

        Raises:
            ArenaAllocationError: there is not enough memory, or a limit is reached.
        """
        if device is not None and device.type == "cuda":
            try:
                free_dropped_memory()  # of workers that were killed after their sender was closed
                segment = cls.local(nbytes, device)
                segment._exports = CudaExports(segment.buffer)
            except RuntimeError as exc:
                raise ArenaAllocationError(nbytes, f"CUDA IPC: {str(exc).splitlines()[0]}") from exc
            return segment
        return _share_file(cls, nbytes)

    @classmethod
    def local(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Allocate memory that only endpoints of this process can attach to.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        buffer, key = cls.private(nbytes, device).buffer, secrets.token_hex(8)
        _local[key] = buffer
        handle = {"kind": "local", "key": key, "nbytes": nbytes}
        return cls(buffer, handle, partial(_local.pop, key, None))

    def handle_for(self, pid: int) -> dict[str, Any]:
        """Return the handle by which one other process may attach, once. ``pid``: 0 if that is unknown."""
        handle = dict(self.handle or {})
        if self._exports is not None and pid != os.getpid():
            handle |= {"kind": "cuda", "ipc": self._exports.add(pid)}
        return handle

    @staticmethod
    def decline(handle: dict[str, Any]) -> None:
        """Take note that this process will not attach by a handle of :meth:`handle_for`."""
        match handle:
            case {"kind": "cuda", "ipc": list(parts)}:
                decline(parts)

    @classmethod
    def attach(cls, handle: dict[str, Any], *, private: bool = False) -> Segment:
        """Map the memory that another process shared.

        Args:
            handle: the other segment's :attr:`handle`.
            private: whether writes of this process stay invisible to the owner (see :meth:`renew`).

        Raises:
            ProtocolError: the handle is invalid, or its owner has closed the segment.
        """
        try:
            match handle:
                case {"kind": "memfd", "pid": int(pid), "fd": int(fd), "inode": int(inode), "nbytes": int(n)}:
                    return _map_existing(cls, f"/proc/{pid}/fd/{fd}", n, inode, handle, private=private)
                case {"kind": "file", "path": str(path), "inode": int(inode), "nbytes": int(n)}:
                    return _map_existing(cls, path, n, inode, handle, private=private)
                case {"kind": "local", "key": str(key), "nbytes": int()} if key in _local:
                    return cls(_local[key], handle)
                case {"kind": "cuda", "key": str(key), "ipc": list(parts)} if key in _local:
                    decline(parts)  # CUDA does not map a process's memory into itself
                    return cls(_local[key], handle)
                case {"kind": "cuda", "nbytes": int(n), "ipc": list(parts)}:
                    return cls(import_cuda(parts)[:n], handle)
        except OSError as exc:
            raise ProtocolError(f"the sender's memory cannot be mapped: {exc}") from exc
        raise ProtocolError(f"expected a handle of shared memory, got {handle!r}")

    @staticmethod
    def open(pid: int, fd: int, inode: int, nbytes: int) -> int:
        """Open a descriptor of another process's shared memory, for reading.

        The file may change or be truncated at any time, so its bytes have to be checked. It is not mapped, so
        it does not outlive the other process. ``fd`` and ``inode`` name the file in process ``pid``;
        ``nbytes`` is its least size.

        Raises:
            OSError: the file cannot be opened.
            ProtocolError: it is another file, or shorter.
        """
        path = f"/proc/{pid}/fd/{fd}"

        def check(found: os.stat_result) -> None:
            if not stat.S_ISREG(found.st_mode) or found.st_ino != inode or found.st_size < nbytes:
                raise ProtocolError(f"{path} is not the memory of {nbytes} bytes that was named")

        check(os.stat(path))  # before opening: opening another kind of file may block or have side effects
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            check(os.fstat(opened))
        except ProtocolError:
            os.close(opened)
            raise
        return opened

    def renew(self) -> bool:
        """Discard what this process has written into privately attached memory, which then shows the owner's
        bytes again.

        Blocking: some hundredths of a millisecond per megabyte, and more for written pages. Returns false if
        this process has locked its memory: the segment then has to be attached again.
        """
        if self._private is None:
            return True
        try:
            for start, nbytes in _written_runs(self.buffer):
                self._private.madvise(mmap.MADV_DONTNEED, start, nbytes)
                # Maps the pages here, and not in a forward pass.
                self.buffer[start : start + nbytes : _PAGE].sum()
        except OSError:
            return False
        return True

    def written(self, ranges: Mapping[str, tuple[int, int]]) -> Collection[str]:
        """Return the names of the parts of privately attached memory that this process may have written.
        ``ranges``: name of a part -> (first byte, number of bytes)."""
        own = _own_pages(self.buffer) if self._private is not None else None
        if own is None:
            return () if self._private is None else list(ranges)
        return [
            name
            for name, (start, nbytes) in ranges.items()
            if own[start // _PAGE : -(-(start + nbytes) // _PAGE)].any()
        ]

    def close(self) -> None:
        """Prevent other processes from attaching; idempotent. Tensors that view the memory stay valid."""
        release, self._release = self._release, None
        if release is not None:
            release()
        if self._exports is not None:
            self._exports.close()


def _share_file(cls: type[Segment], nbytes: int) -> Segment:
    try:
        fd, path = _anonymous_file()
    except OSError as exc:
        raise ArenaAllocationError(nbytes, exc.strerror or str(exc)) from exc
    try:
        if "posix_fallocate" in dir(os):
            # Allocates the pages now. Otherwise, on a machine without free memory, the first write into the
            # mapping would raise SIGBUS instead of an exception.
            os.posix_fallocate(fd, 0, nbytes)
        else:  # macOS
            os.ftruncate(fd, nbytes)
        buffer = as_tensor(mmap.mmap(fd, nbytes))
        buffer.zero_()  # the kernel clears a page at its first use: do that here, once
        inode = os.fstat(fd).st_ino
    except OSError as exc:
        _discard(fd, path)
        raise ArenaAllocationError(nbytes, exc.strerror or str(exc)) from exc
    owner = os.getpid()
    place = {"kind": "memfd", "pid": owner, "fd": fd} if path is None else {"kind": "file", "path": path}

    def release() -> None:
        # A forked child closes its copy of the descriptor. Only the owner deletes the file.
        _discard(fd, path if os.getpid() == owner else None)

    return cls(buffer, {"inode": inode, "nbytes": nbytes, **place}, release)


def _anonymous_file() -> tuple[int, str | None]:
    if "memfd_create" in dir(os):
        return os.memfd_create("aiosync"), None
    return tempfile.mkstemp(prefix="aiosync-")


def _discard(fd: int, path: str | None) -> None:
    os.close(fd)
    if path is not None:
        os.unlink(path)


def _map_existing(
    cls: type[Segment], path: str, nbytes: int, inode: int, handle: dict[str, Any], *, private: bool
) -> Segment:
    fd = os.open(path, (os.O_RDONLY if private else os.O_RDWR) | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_ino != inode or found.st_size < nbytes:
            raise ProtocolError(
                f"expected shared memory of {nbytes} bytes with inode {inode}, "
                f"got {found.st_size} bytes with inode {found.st_ino}: its owner has closed it"
            )
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    finally:
        os.close(fd)  # the mapping stays
    buffer = torch.frombuffer(memory, dtype=torch.uint8) if private else as_tensor(memory)
    # Reads one byte of each page, with the GIL released. So the page tables are filled in this thread, and
    # not by the first forward pass.
    buffer[::_PAGE].sum()
    return cls(buffer, handle, private=memory if private else None)


def _written_runs(buffer: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first byte, number of bytes) of each run of pages that this process has written."""
    own = _own_pages(buffer)
    if own is not None:
        if not own.any():
            return  # as almost always
        edge = own.new_zeros(1, dtype=torch.int8)
        edges = torch.diff(own.to(torch.int8), prepend=edge, append=edge)
        starts, ends = [(edges == step).nonzero().view(-1).tolist() for step in (1, -1)]
        if len(starts) <= _MANY_RUNS:
            for start, end in zip(starts, ends, strict=True):
                yield start * _PAGE, min(end * _PAGE, buffer.numel()) - start * _PAGE
            return
    yield 0, buffer.numel()


def _own_pages(buffer: Tensor) -> Tensor | None:
    """Return for each page whether this process has its own copy; None: the kernel does not report it."""
    entries = bytearray(-(-buffer.numel() // _PAGE) * _PAGE_ENTRY)
    offset = buffer.data_ptr() // _PAGE * _PAGE_ENTRY
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            if not read_at(table.fileno(), memoryview(entries), offset):
                return None
    except OSError:
        return None
    # Bit 63: the page is in memory; bit 62: it is swapped out; bit 61: it is the file's page.
    found = torch.frombuffer(entries, dtype=torch.int64)
    return ((found >> 62) != 0) & ((found >> 61 & 1) == 0)


def _huge(nbytes: int) -> Tensor:
    """Allocate private memory, if possible in huge pages: fewer page lookups make copies faster."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if "MADV_HUGEPAGE" in dir(mmap):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return as_tensor(memory)
