"""Segments: contiguous memory, private to a process or shared by several.

Shared CPU memory is an anonymous file (``memfd`` on Linux). It has no name in ``/dev/shm``, is not limited by
that mount's size, and is freed when the last process that maps it ends, for any reason. Another process opens
it through ``/proc/<pid>/fd``. Systems without ``memfd`` use a file in the temporary directory, which is
deleted when its owner closes the segment. CUDA memory is shared by CUDA IPC.

No segment is unmapped explicitly: tensors may view it, and their references keep it mapped. After
:meth:`Segment.close` other processes can no longer open it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from aiosync.errors import ArenaAllocationError, ProtocolError
from aiosync.weights.private_mapping import PrivateMapping

_PAGE = mmap.PAGESIZE
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
        release: Callable[[], None] | None = None,
        mapping: PrivateMapping | None = None,
    ) -> None:
        self.buffer = buffer  # shape (nbytes,), dtype uint8
        self.handle = handle  # argument of attach() in another process; None: the memory is private
        self._release = release
        self._mapping = mapping

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.buffer.numel()

    def has(self, address: int) -> bool:
        """Return whether an address is in this memory."""
        return 0 <= address - self.buffer.data_ptr() < self.buffer.numel()

    @classmethod
    def private(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Allocate memory of this process alone. Its pages are written once, so that later copies are fast.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        try:
            if nbytes >= _WORTH_HUGE_PAGES and (device is None or device.type == "cpu"):
                return cls(_huge(nbytes).zero_())
            where = "cpu" if device is None else device  # not torch's default device
            return cls(torch.empty(nbytes, dtype=torch.uint8, device=where).zero_())
        except (RuntimeError, OSError) as exc:  # torch and mmap raise these when they are out of memory
            raise ArenaAllocationError(nbytes, str(exc).splitlines()[0]) from exc

    @classmethod
    def shared(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Allocate memory that other processes of this machine can map.

        Raises:
            ArenaAllocationError: there is not enough memory, or a limit is reached.
        """
        if device is not None and device.type == "cuda":
            segment = cls.private(nbytes, device)
            segment.handle = _export_cuda(segment.buffer)
            return segment
        return _share_file(cls, nbytes)

    @classmethod
    def local(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Allocate memory that only endpoints of this process can attach to.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        segment = cls.private(nbytes, device)
        key = secrets.token_hex(8)
        segment.handle = {"kind": "local", "key": key, "nbytes": nbytes}
        _local[key] = segment.buffer

        def release() -> None:
            _local.pop(key, None)

        segment._release = release
        return segment

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
                case {"kind": "cuda", "nbytes": int(n), "ipc": list(parts)}:
                    return cls(_import_cuda(parts, n), handle)
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
        """Make privately attached memory show the owner's bytes again; returns false if that failed, and the
        segment has to be attached again. Blocking."""
        try:
            if self._mapping is not None:
                self._mapping.renew()
        except OSError:  # this process has locked its memory
            return False
        return True

    def written(self, ranges: Mapping[str, tuple[int, int]]) -> Collection[str]:
        """Return the names of the parts of privately attached memory that this process may have written.
        ``ranges``: name of a part -> (first byte, number of bytes)."""
        if self._mapping is None:
            return ()
        return self._mapping.written(ranges)

    def close(self) -> None:
        """Prevent other processes from attaching; idempotent. Tensors that view the memory stay valid."""
        release, self._release = self._release, None
        if release is not None:
            release()


def _share_file(cls: type[Segment], nbytes: int) -> Segment:
    try:
        fd, path = _anonymous_file()
    except OSError as exc:
        raise ArenaAllocationError(nbytes, exc.strerror or str(exc)) from exc
    try:
        # Allocates the pages now. Otherwise, on a machine without free memory, the first write into the
        # mapping would raise SIGBUS instead of an exception.
        os.posix_fallocate(fd, 0, nbytes)
        buffer = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        buffer.zero_()  # the kernel clears a page at its first use: do that here, once
        inode = os.fstat(fd).st_ino
    except OSError as exc:
        _discard(fd, path)
        raise ArenaAllocationError(nbytes, exc.strerror or str(exc)) from exc
    handle: dict[str, Any] = {"inode": inode, "nbytes": nbytes}
    if path is None:
        handle |= {"kind": "memfd", "pid": os.getpid(), "fd": fd}
    else:
        handle |= {"kind": "file", "path": path}
    owner = os.getpid()

    def release() -> None:
        # A forked child closes its copy of the descriptor. Only the owner deletes the file.
        _discard(fd, path if os.getpid() == owner else None)

    return cls(buffer, handle, release)


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
    mapping = None
    fd = os.open(path, (os.O_RDONLY if private else os.O_RDWR) | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_ino != inode or found.st_size < nbytes:
            raise ProtocolError(
                f"expected shared memory of {nbytes} bytes with inode {inode}, "
                f"got {found.st_size} bytes with inode {found.st_ino}: its owner has closed it"
            )
        if private:
            mapping = PrivateMapping(fd, nbytes)
            buffer = mapping.buffer
        else:
            buffer = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)
    # Reads one byte of each page, with the GIL released. So the page tables are filled in this thread, and
    # not by the first forward pass.
    buffer[::_PAGE].sum()
    return cls(buffer, handle, mapping=mapping)


def _export_cuda(buffer: Tensor) -> dict[str, Any]:
    return {
        "kind": "cuda",
        "nbytes": buffer.numel(),
        "ipc": list(buffer.untyped_storage()._share_cuda_()),
    }


def _import_cuda(parts: list[Any], nbytes: int) -> Tensor:
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:nbytes]


def _huge(nbytes: int) -> Tensor:
    """Allocate private memory, in huge pages if the system has free ones: with small pages, copies spend much
    of their time on page lookups."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if "MADV_HUGEPAGE" in dir(mmap):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
