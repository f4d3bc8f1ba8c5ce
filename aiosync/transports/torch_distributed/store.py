"""The rendezvous of senders and workers in a store of torch.distributed.

Keys, all under ``aiosync/<model_id>/``:

``arrivals``      a queue; a worker pushes a random name
``met/<name>``    the sender's answer to that worker: its address and token; the worker deletes the key
``gone/<name>``   set by a worker that has given up; the sender deletes the key, and does not answer

(The ranks of a process group use ``aiosync/ranks/<key>`` until the group is made. An empty value says that a
rank has given up.)

Nothing polls. The sender blocks in a thread until a worker pushes its name. The worker blocks in a thread
until the answer is set. To cancel the wait, a side writes the key that its own thread waits for. A blocking
call keeps its connection to the store busy, so each thread has its own connection.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from aiosync.errors import InvalidArgumentError, WorkerLostError
from aiosync.transports._offload import start_thread
from aiosync.transports.sockets import inode, listening
from aiosync.transports.tcp.address import is_ip_address, is_loopback

logger = logging.getLogger("aiosync")

_c10d: Any = dist  # type checkers do not know the names of its stores
_FOR_EVER = timedelta(days=365)
_CONNECT = timedelta(seconds=60)
_BACKLOG = 4096
_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")
_EVERYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


@dataclass(frozen=True)
class StoreAddress:
    """A store object of this process, or the address of a TCPStore."""

    store: Any = None  # None: use host and port
    host: str = "127.0.0.1"
    port: int = 0  # 0: not known yet
    serves: bool = True  # whether the sender starts the TCPStore if no process serves it yet

    @classmethod
    def at(cls, store: Any, init_method: str | None) -> StoreAddress:
        """Read and check a scheme's arguments; without arguments, MASTER_ADDR and MASTER_PORT."""
        if store is not None and init_method is not None:
            raise InvalidArgumentError("give store= or init_method=, not both")
        if store is not None:
            if isinstance(store, _c10d.Store):
                return cls(store=store)
            given = type(store).__name__
            raise InvalidArgumentError(f"store: expected a torch.distributed Store, got {given}")
        if init_method is None and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return cls()
        expected = f"init_method={init_method!r}: expected 'env://' or 'tcp://host:port' (or give a store=)"
        try:
            parts = urlsplit(init_method or "env://")
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise InvalidArgumentError(f"{expected}: {exc}") from exc
        if parts.scheme == "env":
            try:
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            except (KeyError, ValueError) as exc:
                problem = f"init_method='env://' needs MASTER_ADDR and MASTER_PORT: {exc}"
                raise InvalidArgumentError(problem) from exc
        elif parts.scheme != "tcp" or not host or not port:
            raise InvalidArgumentError(expected)
        return cls(host=host, port=port, serves=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")

    def open(self) -> tuple[StoreAddress, Any]:
        """Open the store on the sender. Returns its address for workers, and a connection to keep."""
        if self.store is not None:
            return self, self.store.clone()
        if self.serves:
            with suppress(RuntimeError):  # another process of the job serves it
                store = self._serve()
                return StoreAddress(None, self.host, store.port, serves=False), store
        return self, self.connect()

    def _serve(self) -> Any:
        """Serve a TCPStore that listens only at the host's address.

        By default it listens at all addresses of the machine, and answers any client (pytorch issue 173909).
        """
        port, descriptor, listener = self.port, None, None
        try:
            # At the first IPv4 address of the host, which workers look for; else at its first address.
            found = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            sock = listening(family, address, _BACKLOG)
        except OSError as exc:
            # EADDRINUSE: torch shares the store if it is in this process, and raises if not.
            if exc.errno != errno.EADDRINUSE:
                problem = "the store of this job listens at all addresses of this machine"
                logger.warning("%s: %s is not one of them (%s)", problem, self.host, exc.strerror or exc)
        else:
            port, descriptor = sock.getsockname()[1], sock.detach()
            listener = inode(descriptor)
        try:
            options = {"wait_for_workers": False, "multi_tenant": True, "master_listen_fd": descriptor}
            return _c10d.TCPStore(self.host, port, is_master=True, **options)
        except RuntimeError:
            if descriptor is not None and inode(descriptor) == listener:  # unless torch has closed it
                os.close(descriptor)
            raise

    @property
    def identity(self) -> object:
        """Equal for two addresses of one store."""
        if isinstance(self.store, _c10d.TCPStore):
            return self.store.host, self.store.port
        return id(self.store) if self.store is not None else (self.host, self.port)

    def by_address(self) -> StoreAddress:
        """Return the address of a given TCPStore, without the object; port 0 if it is another store."""
        if not isinstance(self.store, _c10d.TCPStore):
            return StoreAddress(serves=False)
        return StoreAddress(None, self.store.host, self.store.port, serves=False)

    def check_known(self) -> None:
        """Raise InvalidArgumentError if the store's address was not given."""
        if self.store is None and not self.port:
            raise InvalidArgumentError(
                "this scheme does not know where its store is: give worker and sender the same store= or "
                "init_method=, set MASTER_ADDR and MASTER_PORT, or hand the worker the sender's scheme"
            )

    def connect(self) -> Any:
        """Connect to the store. Blocking. Raises WorkerLostError if there is no store at the address."""
        if self.store is not None:
            return self.store.clone()
        try:
            options = {"is_master": False, "wait_for_workers": False, "timeout": _CONNECT}
            return _c10d.TCPStore(self.host, self.port, **options)
        except RuntimeError as exc:
            raise WorkerLostError((), f"no store at {self.host}:{self.port}: {first_line(exc)}") from exc

    def hosts(self) -> tuple[str, str]:
        """Return where the sender has to listen, and its host as the store's clients see it.

        Another store than a TCPStore has no host: its clients are on this machine.

        Raises:
            InvalidArgumentError: the store's host has no address.
        """
        store = without_prefix(self.store)
        host = store.host if isinstance(store, _c10d.TCPStore) else self.host
        try:
            # The first IPv4 address, as in _serve().
            found = socket.getaddrinfo(host, self.port or 1, type=socket.SOCK_DGRAM)
            family, kind, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                own = str(probe.getsockname()[0])
        except OSError as exc:
            raise InvalidArgumentError(f"the store's host {host!r} has no address: {exc}") from exc
        if not is_loopback(own):
            return _EVERYWHERE[family], own
        if host.startswith(_LOCAL_NAMES) or is_ip_address(host):
            return own, own
        # A machine's own name is often a loopback address in its /etc/hosts, and another one elsewhere.
        return _EVERYWHERE[family], host


def without_prefix(store: Any) -> Any:
    """Return the store that PrefixStores are wrapped around."""
    while isinstance(store, _c10d.PrefixStore):
        store = store.underlying_store
    return store


def _of_model(store: Any, model_id: str | None) -> Any:
    """Return the part of a store that belongs to one model."""
    return _c10d.PrefixStore(f"aiosync/{model_id or ''}", store)


class StoreResponder:
    """Answers workers that look for their sender with ``answer``. It keeps the store ``kept`` alive."""

    def __init__(self, kept: Any, model_id: str | None, answer: bytes) -> None:
        self._kept = kept
        store = kept.clone()
        store.set_timeout(_FOR_EVER)
        self._store = _of_model(store, model_id)
        self._other = _of_model(kept.clone(), model_id)
        self._answer = answer
        self._closed = False

    def run(self) -> str:
        """Block until :meth:`close`, or until the store is gone, which is logged.

        Returns:
            Why it ended; empty: by :meth:`close`.
        """
        while True:
            try:
                name = self._store.queue_pop("arrivals")
                if self._closed:
                    if name:
                        self._store.queue_push("arrivals", name)  # for the next sender
                    return ""
                if name:
                    self._reply(name.decode(errors="replace"))
            except RuntimeError as exc:
                if not self._closed:
                    logger.warning("workers that come now do not find their sender: %s", first_line(exc))
                return first_line(exc)

    def _reply(self, name: str) -> None:
        if self._store.check([f"gone/{name}"]):
            self._store.delete_key(f"gone/{name}")
        else:
            self._store.set(f"met/{name}", self._answer)

    def close(self) -> None:
        """Make :meth:`run` return. Blocks shortly."""
        self._closed = True
        with suppress(RuntimeError):
            self._other.queue_push("arrivals", b"")


class StoreLookup:
    """Looks for a worker's sender. :meth:`run` blocks in a thread. Another thread calls :meth:`cancel`."""

    def __init__(self, store_address: StoreAddress, model_id: str | None) -> None:
        self._store_address, self._model_id = store_address, model_id
        self._name = secrets.token_hex(8)
        # The connection of cancel(), while there is something to cancel. Both in the lock.
        self._other: Any = None
        self._cancelled = False
        self._lock = threading.Lock()

    def run(self) -> tuple[bytes, Any] | None:
        """Wait for the sender's answer. Returns the answer and the store, or None after :meth:`cancel`."""
        store = self._store_address.connect()
        key = f"met/{self._name}"
        try:
            # The store that is returned keeps its timeout: its clones look for the server that long.
            waiting = store.clone()
            waiting.set_timeout(_FOR_EVER)
            mine = _of_model(waiting, self._model_id)
            with self._lock:
                if self._cancelled:
                    return None
                self._other = _of_model(store, self._model_id)
            mine.queue_push("arrivals", self._name)
            answer = mine.get(key)
            with self._lock:
                self._other = None
            mine.delete_key(key)
        except RuntimeError as exc:
            raise WorkerLostError((), f"the store is gone: {first_line(exc)}") from exc
        return None if self._cancelled else (answer, store)

    def cancel(self) -> None:
        """Make :meth:`run` return. Blocks shortly."""
        with self._lock:
            self._cancelled, other = True, self._other
        if other is not None:
            with suppress(RuntimeError):
                other.set(f"gone/{self._name}", b"")
                other.set(f"met/{self._name}", b"")


class CancellableStore(_c10d.Store):  # type: ignore[misc]
    """A store as gloo uses it to make a process group. Another thread can end its wait for other ranks.

    A wait ends only when the key is set, and keeps the connection busy. So :meth:`cancel` sets the key to an
    empty value through another connection. A rank that reads an empty value gives up too: without all ranks
    there is no group.

    Args:
        connect: makes a connection to the store that is used. Blocking.
        limit: most time that another rank has to come. gloo's own limit is not used.
    """

    def __init__(self, connect: Callable[[], Any], limit: timedelta) -> None:
        super().__init__()
        self._connect = connect
        self._limit = limit
        self._store: Any = None
        # The keys that this rank has set, and those that it waits for. Both in the lock.
        self._keys: set[str] = set()
        self._cancelled = False
        self._lock = threading.Lock()

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Connect to the store for the body. Blocking. Yields the connection."""
        self._check()
        self._store = self._connect()
        try:
            yield self._store
        finally:
            self._store = None
            with self._lock:
                self._keys.clear()

    def set(self, key: str, value: bytes) -> None:
        self._begin([key])
        self._store.set(key, value)
        if self._cancelled:
            self._store.set(key, b"")  # cancel() may have done so before
        self._check()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._begin(keys)
        self._store.wait(keys, self._limit)
        self._check()

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        self._check()
        if not value:
            raise RuntimeError("another rank has given up")
        return value

    def _begin(self, keys: list[str]) -> None:
        with self._lock:
            self._check()
            self._keys.update(keys)

    def _check(self) -> None:
        if self._cancelled:
            raise RuntimeError("the wait for the other ranks was cancelled")

    def cancel(self) -> None:
        """Make :meth:`wait` raise RuntimeError, now and later. Idempotent; does not block."""
        with self._lock:
            keys = () if self._cancelled else sorted(self._keys)
            self._cancelled = True
        if keys:
            # At the interpreter's exit no thread can be started. The wait ends by its limit then.
            with suppress(RuntimeError):
                start_thread(partial(self._release, keys), "aiosync-store")

    def _release(self, keys: Sequence[str]) -> None:
        with suppress(RuntimeError):  # the store is gone, and the wait has ended too; or this side has closed
            other = self._connect()
            for key in keys:
                other.set(key, b"")


def first_line(exc: BaseException) -> str:
    """Return the first line of an exception's text, or its repr if it has no text."""
    return next(iter(str(exc).splitlines()), "") or repr(exc)
