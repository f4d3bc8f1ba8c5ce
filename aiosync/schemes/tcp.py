"""Weights over TCP or a Unix socket."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from aiosync._options import OnSenderClose, SchemeOptions, check_reconnecting
from aiosync.errors import InsecureTransportError, InvalidArgumentError
from aiosync.events import EventSource
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.updates import Applier
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.values import Secret
from aiosync.transfer.base import Transfer
from aiosync.transfer.stream import StreamTransfer
from aiosync.transports.base import Listener
from aiosync.transports.tcp.address import Address
from aiosync.transports.tcp.connection import DialledTransport, TCPTransport
from aiosync.transports.tcp.listener import TCPListener
from aiosync.transports.tcp.tls import TLSConfig
from aiosync.weights.checksum import check_available
from aiosync.weights.codec import Codec, check_codec

__all__ = ["RelayParts", "TCPWeightSyncScheme", "relay_parts", "upstream_receiver"]

_SHORTEST_TOKEN = 16
_FEWEST_CHARACTERS = 8
"""What a token has to have at least: characters, and different ones."""


class TCPWeightSyncScheme(WeightSyncScheme):
    """Workers on this or other machines, which connect to the sender's address.

    The weights are copied once into a slot of the sender's and sent from there to all workers at the same
    time, by a thread beside the event loop; each block carries a checksum. In the worker the bytes go
    straight into its back slot. Nothing on the wire is pickled. At a Unix socket without TLS (on Linux) the
    blocks do not even pass through the socket: the worker gets their positions and copies them from the
    slot.

    A worker on another machine builds the same scheme from address and token; one that is handed the
    pickled scheme knows the real port too. Without ``num_workers=`` the sender takes workers as they come:
    ``connect(min_workers=2)`` waits for the first two, ``scheme.workers`` tells who is there, one that
    gives no ``worker_idx`` is given one, and one that has gone is no more waited for.

    Memory: two slots of the model's size on the sender, a third while a worker is behind, whatever the number
    of workers (a worker that takes nothing for a second gives way when memory is needed); two slots in
    each worker, and two more if it converts dtypes. Updates of some entries (``strict=False``) take a third
    slot in each worker, and a fourth where they are about different entries: entries that were not sent stay
    where they are.

    Args:
        address: ``tcp://host:port`` (port 0: any free one, chosen in ``init_on_sender``) or
            ``unix:///path`` (for this user alone).
        token: a secret of 16 characters or more that sender and workers have; each proves to the other
            that it knows it. It does not encrypt: use TLS where others can read along.
        tls: certificates; with a ``cafile`` on the sender workers have to show one too.
        codec: what travels, all of it bit-exact: ``"full"``, the bytes as they are; ``"zstd"``, compressed;
            ``"delta"``, what has changed against the version that the worker acknowledged, compressed, or
            all of it where the worker has none or that is no smaller. Needs ``aiosync[delta]`` on both
            sides; a worker without it gets the bytes as they are. With ``cast=torch.bfloat16`` most small
            updates change few elements.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again, beside
            acting with the version that it has; 0: not at all. A sender that was started anew counts its
            versions from its ``first_version``, and so does the worker then, which says so.
        on_sender_close: what a worker does when the sender closes in order. ``"stop"``: it stops receiving,
            and the version that it has stays in service. ``"wait"``: it looks for a sender for
            ``reconnect_for`` seconds, as if the connection had been lost; so it follows a trainer that is
            started again.
        insecure: listen to other machines with neither a token nor mutual TLS.
        max_connections: how many workers a sender takes at a time. A further one tries again until its
            timeout.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: an address that is none, a token that is too short.
    """

    backends = ("tcp",)
    _elastic = True

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        tls: TLSConfig | None = None,
        codec: Codec = "full",
        reconnect_for: float = 60.0,
        on_sender_close: OnSenderClose = "stop",
        insecure: bool = False,
        max_connections: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._address = Address.parse(address)
        self._secured = token is not None
        self._token = Secret(_key_of(token))
        self._tls = tls
        if tls is not None and not isinstance(tls, TLSConfig):
            raise InvalidArgumentError(f"tls: expected a TLSConfig, got {type(tls).__name__}")
        check_reconnecting(reconnect_for, on_sender_close)
        if not isinstance(max_connections, int) or isinstance(max_connections, bool) or max_connections < 1:
            raise InvalidArgumentError(f"max_connections: expected an integer >= 1, got {max_connections!r}")
        if not isinstance(insecure, bool):
            raise InvalidArgumentError(f"insecure: expected True or False, got {insecure!r}")
        self._reconnect_for = reconnect_for
        self._on_sender_close: OnSenderClose = on_sender_close
        self._insecure = insecure
        self._max_connections = max_connections
        check_available()
        check_codec(codec)
        self._codec = codec

    @property
    def address(self) -> str:
        """Where the sender listens; after ``init_on_sender`` with the real port."""
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

    def create_transport(self, *, worker_idx: int) -> TCPTransport:
        """A worker's connection, not open yet.

        Raises:
            InvalidArgumentError: the address has no port yet.
        """
        if not self._address.path and not self._address.port:
            raise InvalidArgumentError(
                f"{self._address} has no port yet: give the worker the sender's scheme.address"
            )
        known = self._secured or self._tls is not None
        return DialledTransport(self._address, self._tls, any_user=known)

    def _make_transfer(self) -> Transfer:
        # Workers at a Unix socket are on this machine, and can read the slots where they are.
        readable = bool(self._address.path) and self._tls is None and self._codec == "full"
        return StreamTransfer(self._codec, readable=readable)

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        return {
            "address": self._address,
            "secured": self._secured,
            "tls": self._tls,
            "codec": self._codec,
            "reconnect_for": self._reconnect_for,
            "on_sender_close": self._on_sender_close,
            "insecure": self._insecure,
            "max_connections": self._max_connections,
        }

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        self._address = recipe["address"]
        self._secured = recipe["secured"]
        self._tls = recipe["tls"]
        self._codec = recipe["codec"]
        self._reconnect_for = recipe["reconnect_for"]
        self._on_sender_close = recipe["on_sender_close"]
        self._insecure = recipe["insecure"]
        self._max_connections = recipe["max_connections"]


class RelayParts(NamedTuple):
    """The parts of a scheme that the downstream side of a relay is built from."""

    options: SchemeOptions
    listener: Listener
    token: bytes
    events: EventSource
    transfer: Transfer
    reconnect_for: float


def relay_parts(scheme: TCPWeightSyncScheme, model_id: str | None) -> RelayParts:
    """Make ``scheme`` the downstream side of a :class:`~aiosync.WeightRelay`. It listens from now on.

    Raises:
        AlreadyConnectedError: the scheme has a live endpoint.
        OSError, InsecureTransportError: as ``init_on_sender``.
    """
    scheme._check_no_endpoint()
    scheme._forget_runtime()
    scheme._model_id = model_id
    listener = scheme._listener = scheme._make_listener((), None)
    transfer = scheme._make_transfer()
    return RelayParts(scheme._spec, listener, scheme._token, scheme._events, transfer, scheme._reconnect_for)


def upstream_receiver(scheme: TCPWeightSyncScheme, applier: Applier, model_id: str | None) -> WeightReceiver:
    """The upstream side of a :class:`~aiosync.WeightRelay`: a receiver that is not connected yet."""
    return WeightReceiver(
        applier,
        model_id,
        -1,
        lambda: scheme.create_transport(worker_idx=-1),
        scheme._token,
        reconnect_for=scheme._reconnect_for,
        on_sender_close=scheme._on_sender_close,
        events=scheme._events,
    )


def _key_of(token: str | bytes | None) -> bytes:
    """The handshake's key. Without a token it is one that everybody knows."""
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
    """The key of a token. An impostor who is shown a proof can try tokens on it: each try takes as long as
    this, some 50 ms and 16 MiB."""
    return hashlib.scrypt(secret, salt=b"aiosync token 3", n=1 << 14, r=8, p=1, dklen=32)
