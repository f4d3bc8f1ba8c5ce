"""Weights over TCP or a Unix socket."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.context import BaseContext
from typing import Unpack

from aiosync._options import (
    CommonOptions,
    OnSenderClose,
    SchemeOptions,
    check_bool,
    check_count,
    check_reconnecting,
)
from aiosync.errors import InsecureTransportError, InvalidArgumentError
from aiosync.events import EventSource
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.updates import Applier
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.state import Secret
from aiosync.transfer.base import Transfer
from aiosync.transfer.stream import StreamTransfer
from aiosync.transports.base import Listener
from aiosync.transports.tcp.address import Address
from aiosync.transports.tcp.connection import DialledTransport, TCPConnection
from aiosync.transports.tcp.listener import TCPListener
from aiosync.transports.tcp.tls import TLSConfig
from aiosync.weights.codec import Codec, check_codec, check_xxhash

_SLOWEST = 1 << 16
"""Bytes per second. Slower workers could not keep up with what tells them that the sender is alive."""

_SHORTEST_TOKEN = 16
_FEWEST_CHARACTERS = 8
"""The fewest characters of a token, and the fewest different ones."""


class TCPWeightSyncScheme(WeightSyncScheme):
    """Sends weights to workers on this or other machines, which connect to the sender's address.

    A thread beside the event loop sends the weights to all workers at once, in blocks with checksums. With
    TLS up to four threads encrypt, each for other workers. Nothing on the wire is pickled. On a Unix socket
    without TLS (on Linux) the worker gets the blocks' positions and copies them from the sender's slot.

    A worker on another machine creates the same scheme from address and token; a pickled scheme also has the
    real port. Without ``num_workers=`` the sender accepts workers at any time: ``connect(min_workers=2)``
    waits for the first two, ``scheme.workers`` lists the connected ones, the sender chooses the index of a
    worker without ``worker_idx``, and it does not wait for a worker that has gone.

    Memory: two slots of the model's size on the sender, a third while a worker is behind, whatever the
    number of workers (if memory is needed, an update is taken back from a worker that reads nothing for a
    second, and sent again later); two slots in each worker, and two more if it converts dtypes. Updates of
    some entries (``strict=False``) take a third slot in each worker, and a fourth if successive updates have
    different entries: entries that are not sent keep their memory.

    Args:
        address: ``tcp://host:port`` (port 0: any free one, chosen in ``init_on_sender``) or
            ``unix:///path`` (for this user alone).
        token: a secret of 16 characters or more. Sender and workers prove to each other that they have it.
            It does not encrypt: use TLS on networks that others can read.
        tls: certificates; with a ``cafile`` on the sender, workers need a certificate too.
        codec: how weights are encoded, always bit-exact: ``"full"``, unchanged; ``"zstd"``, compressed;
            ``"delta"``, the difference from the version that the worker acknowledged, compressed, or all
            bytes if the worker has no version or the difference is no smaller. Needs ``aiosync[delta]`` on
            both sides; a worker without it gets the bytes unchanged. With ``cast=torch.bfloat16`` most small
            updates change few elements.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again, while it
            keeps its version; 0: it does not try. A restarted sender numbers its versions from its
            ``first_version``, and the worker then logs this and does the same.
        on_sender_close: what a worker does when the sender closes in order. ``"stop"``: it stops receiving
            and keeps its version. ``"wait"``: it looks for a sender for ``reconnect_for`` seconds, as after a
            lost connection, and so finds a restarted trainer.
        max_receive_rate: bytes per second that a worker reads at most, so that updates leave processor time
            to what the worker does otherwise, for example to a server's requests. Such a worker does not
            read the sender's memory through a Unix socket.
        insecure: listen to other machines with neither a token nor mutual TLS.
        max_connections: the most workers that a sender serves at a time. Further ones retry until their
            timeout.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: an invalid address or argument, or a token that is too short.
    """

    backends = ("tcp",)
    _elastic = True
    _fields = (
        "address",
        "secured",
        "tls",
        "codec",
        "reconnect_for",
        "on_sender_close",
        "max_receive_rate",
        "insecure",
        "max_connections",
    )

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        tls: TLSConfig | None = None,
        codec: Codec = "full",
        reconnect_for: float = 60.0,
        on_sender_close: OnSenderClose = "stop",
        max_receive_rate: float | None = None,
        insecure: bool = False,
        max_connections: int = 1024,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        self._address = Address.parse(address)
        self._secured = token is not None
        self._token = Secret(_key_of(token))
        self._tls = tls
        if tls is not None and not isinstance(tls, TLSConfig):
            raise InvalidArgumentError(f"tls: expected a TLSConfig, got {type(tls).__name__}")
        check_reconnecting(reconnect_for, on_sender_close)
        check_count("max_connections", max_connections, least=1)
        check_bool("insecure", insecure)
        self._reconnect_for = reconnect_for
        self._on_sender_close: OnSenderClose = on_sender_close
        self._max_receive_rate = None if max_receive_rate is None else _rate_of(max_receive_rate)
        self._insecure = insecure
        self._max_connections = max_connections
        check_xxhash()
        check_codec(codec)
        self._codec = codec

    @property
    def address(self) -> str:
        """The sender's address; with the real port after ``init_on_sender``."""
        return str(self._address)

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        listener = TCPListener(self._address, self._tls, max_connections=self._max_connections)
        authenticated = self._secured or (self._tls is not None and self._tls.mutual)
        if listener.exposed and not (authenticated or self._insecure):
            listener.close()
            raise InsecureTransportError(
                f"{self._address} can be reached from other machines: give token=, or tls= with a cafile "
                "that workers' certificates are signed by, or insecure=True if everybody may have the weights"
            )
        self._address = listener.address
        return listener

    def create_transport(self, *, worker_idx: int) -> TCPConnection:
        if not self._address.path and not self._address.port:
            raise InvalidArgumentError(
                f"{self._address} has no port yet: give the worker the sender's scheme.address"
            )
        known = self._secured or self._tls is not None
        return DialledTransport(self._address, self._tls, any_user=known, rate=self._max_receive_rate)

    def _make_transfer(self) -> Transfer:
        # Workers on a Unix socket are on this machine and can read the slots directly.
        readable = bool(self._address.path) and self._tls is None and self._codec == "full"
        return StreamTransfer(self._codec, readable=readable)


@dataclass(frozen=True)
class RelayParts:
    """The parts of a scheme that the downstream side of a relay is built from."""

    options: SchemeOptions
    listener: Listener
    token: bytes
    events: EventSource
    transfer: Transfer
    reconnect_for: float


def relay_parts(scheme: TCPWeightSyncScheme, model_id: str | None) -> RelayParts:
    """Make ``scheme`` the downstream side of a relay, and start listening. Raises as ``init_on_sender``."""
    scheme._check_no_endpoint()
    scheme._forget_runtime()
    scheme._model_id = model_id
    listener = scheme._listener = scheme._make_listener((), None)
    transfer = scheme._make_transfer()
    return RelayParts(scheme._spec, listener, scheme._token, scheme._events, transfer, scheme._reconnect_for)


def upstream_receiver(scheme: TCPWeightSyncScheme, applier: Applier, model_id: str | None) -> WeightReceiver:
    """Create the upstream side of a relay: a receiver, not connected yet."""
    return scheme._make_receiver(applier, model_id)


def _rate_of(value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _SLOWEST <= value < math.inf:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"max_receive_rate: expected bytes per second >= {_SLOWEST}, got {value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def _key_of(token: str | bytes | None) -> bytes:
    """Return the handshake's key; empty if there is no token."""
    if token is None:
        return b""
    if not isinstance(token, str | bytes):
        raise InvalidArgumentError(f"token: expected str or bytes, got {type(token).__name__}")
    secret = token.encode() if isinstance(token, str) else token
    if len(secret) < _SHORTEST_TOKEN or len(set(secret)) < _FEWEST_CHARACTERS:
        raise InvalidArgumentError(
            f"token: expected {_SHORTEST_TOKEN} characters or more, {_FEWEST_CHARACTERS} of them different, "
            f"got {len(secret)} with {len(set(secret))} different; this makes a good one: "
            'python -c "import secrets; print(secrets.token_hex(16))"'
        )
    return _derived(secret)


@lru_cache(maxsize=16)
def _derived(secret: bytes) -> bytes:
    """Derive a token's key. It takes some 50 ms and 16 MiB, to slow down an attacker who tests guessed tokens
    against a recorded handshake."""
    return hashlib.scrypt(secret, salt=b"aiosync token 3", n=1 << 14, r=8, p=1, dklen=32)
