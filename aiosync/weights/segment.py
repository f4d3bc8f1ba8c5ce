"""Segments: one contiguous piece of memory, private to a process or shared by several.

Shared CPU memory is an anonymous file (``memfd`` on Linux): it has no name in ``/dev/shm``, is not
bounded by that mount's size, and goes with the last process that maps it, however that process ends.
Another process opens it through ``/proc/<pid>/fd``. Where there is no ``memfd`` a file in the temporary
directory does the same, and is deleted when its owner closes the segment. CUDA memory is shared by
CUDA IPC.

No segment is ever unmapped by hand: tensors may view it, and their references keep it mapped. What
:meth:`Segment.close` ends is the way for others to open it.
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

__all__ = ["Segment"]

_PAGE = mmap.PAGESIZE
_local: dict[str, Tensor] = {}


_WORTH_HUGE_PAGES = 4 << 20
"""Bytes."""


class Segment:
    """A 1-D ``uint8`` tensor, and the handle by which another process can map the same memory.

    Attributes:
        buffer: the memory, shape ``(nbytes,)``, dtype ``uint8``.
        handle: plain values for :meth:`attach`, or None for private memory.
    """

    def __init__(
        self,
        buffer: Tensor,
        handle: dict[str, Any] | None = None,
        release: Callable[[], None] | None = None,
        mapping: PrivateMapping | None = None,
    ) -> None:
        self.buffer = buffer
        self.handle = handle
        self._release = release
        self._mapping = mapping

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.buffer.numel()

    def has(self, address: int) -> bool:
        """Whether an address lies in this memory."""
        return 0 <= address - self.buffer.data_ptr() < self.buffer.numel()

    @classmethod
    def private(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Memory of this process alone, its pages touched once so that later copies run warm.

        Raises:
            ArenaAllocationError: if there is not that much memory.
        """
        try:
            if nbytes >= _WORTH_HUGE_PAGES and (device is None or device.type == "cpu"):
                return cls(_huge(nbytes).zero_())
            where = "cpu" if device is None else device  # and not torch's default device
            return cls(torch.empty(nbytes, dtype=torch.uint8, device=where).zero_())
        except (RuntimeError, OSError) as exc:  # what torch, and what mmap raises when it is out of memory
            raise ArenaAllocationError(nbytes, str(exc).splitlines()[0]) from exc

    @classmethod
    def shared(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Memory that other processes of this machine can map.

        Raises:
            ArenaAllocationError: if there is not that much memory, or a limit forbids it.
        """
        if device is not None and device.type == "cuda":
            segment = cls.private(nbytes, device)
            segment.handle = _export_cuda(segment.buffer)
            return segment
        return _share_file(cls, nbytes)

    @classmethod
    def local(cls, nbytes: int, device: torch.device | None = None) -> Segment:
        """Memory that other endpoints of this process can attach to (and no other process).

        Raises:
            ArenaAllocationError: if there is not that much memory.
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
            handle: its :attr:`handle`.
            private: what this process writes is to stay its own (see :meth:`renew`).

        Raises:
            ProtocolError: if the handle is not one of ours, or its owner has closed it.
        """
        try:
            match handle:
                case {
                    "kind": "memfd",
                    "pid": int(pid),
                    "fd": int(fd),
                    "inode": int(inode),
                    "nbytes": int(n),
                }:
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
        """A descriptor of another process's shared memory, to be read and not relied on: it may change, or
        be cut off, at any time. It is not mapped: so none of it stays when the other process has gone.

        Args:
            pid, fd: the process, and what number the file has there.
            inode: the file's.
            nbytes: how much of it is wanted.

        Raises:
            OSError: it is not to be had.
            ProtocolError: it is something else.
        """
        path = f"/proc/{pid}/fd/{fd}"

        def check(found: os.stat_result) -> None:
            if not stat.S_ISREG(found.st_mode) or found.st_ino != inode or found.st_size < nbytes:
                raise ProtocolError(f"{path} is not the memory of {nbytes} bytes that was named")

        check(os.stat(path))  # opening something else might wait, or do something
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            check(os.fstat(opened))
        except ProtocolError:
            os.close(opened)
            raise
        return opened

    def renew(self) -> bool:
        """Show the owner's bytes again where this process wrote into memory that it attached privately;
        returns whether the buffer shows them. If not it has to be attached anew. Blocking.
        """
        try:
            if self._mapping is not None:
                self._mapping.renew()
        except OSError:  # this process has its memory locked
            return False
        return True

    def written(self, ranges: Mapping[str, tuple[int, int]]) -> Collection[str]:
        """Which parts of memory that was attached privately this process has written into, or may have.

        Args:
            ranges: name of a part -> (first byte, number of bytes).
        """
        if self._mapping is None:
            return ()
        return self._mapping.written(ranges)

    def close(self) -> None:
        """End the way for others to attach; idempotent. Tensors that view the memory stay valid."""
        release, self._release = self._release, None
        if release is not None:
            release()


def _share_file(cls: type[Segment], nbytes: int) -> Segment:
    try:
        fd, path = _anonymous_file()
    except OSError as exc:
        raise ArenaAllocationError(nbytes, exc.strerror or str(exc)) from exc
    try:
        # Takes the pages now: without it a machine that is out of memory answers the first write
        # into the mapping with SIGBUS, and no error can be raised any more.
        os.posix_fallocate(fd, 0, nbytes)
        buffer = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        buffer.zero_()  # a taken page is cleared at its first use: pay for that here, once
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
        # A forked child has its own copy of the descriptor, but the file is its parent's to delete.
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
    # Reads one byte of each page, with the GIL released: the page tables are filled here, off the
    # loop, and not by the first forward pass.
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
    """Private memory, in huge pages where the system has them to spare: copies, and the kernel's own, spend
    much of their time looking small ones up."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if "MADV_HUGEPAGE" in dir(mmap):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
