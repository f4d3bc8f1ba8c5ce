"""TLS for connections: where the keys are, what is asked of the other side, and TLS without a socket."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field

from aiosync.errors import InvalidArgumentError

__all__ = ["TLSConfig", "TLSLayer"]


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """Where a TLS endpoint's certificates are; picklable, and the files are read where it is used.

    The sender needs ``certfile`` and ``keyfile``. With ``cafile`` it takes only workers that show a
    certificate signed by it (mutual TLS). A worker needs ``cafile`` to know the sender, and a certificate of
    its own if the sender asks for one. One config can serve both.

    Attributes:
        certfile: this endpoint's certificate chain, PEM.
        keyfile: its private key, PEM; None if it is in ``certfile``.
        cafile: certificates that may sign the other side's, PEM; None on a worker: the system's.
        password: decrypts ``keyfile``.
        server_hostname: the name that the sender's certificate must bear; None: the address's host.
    """

    certfile: str | None = None
    keyfile: str | None = None
    cafile: str | None = None
    password: str | None = field(default=None, repr=False)
    server_hostname: str | None = None

    def __post_init__(self) -> None:
        for name in ("certfile", "keyfile", "cafile"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise InvalidArgumentError(f"TLSConfig: {name}={path!r}: there is no such file")

    @property
    def mutual(self) -> bool:
        """Whether a sender with this config authenticates its workers."""
        return self.cafile is not None

    def for_sender(self) -> ssl.SSLContext:
        """The listening side's context.

        Raises:
            InvalidArgumentError: no certificate, or one that cannot be read.
        """
        if self.certfile is None:
            raise InvalidArgumentError("TLSConfig: a sender needs certfile= and keyfile=")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        if self.cafile is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_worker(self) -> ssl.SSLContext:
        """The dialling side's context.

        Raises:
            InvalidArgumentError: a certificate that cannot be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cafile is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.certfile is not None:
                # Without a password openssl would ask for one at the terminal, and wait.
                context.load_cert_chain(self.certfile, self.keyfile, lambda: self.password or "")
        except OSError as exc:
            raise InvalidArgumentError(
                f"TLSConfig: expected a PEM certificate in certfile={self.certfile!r} and its private key in "
                f"keyfile={self.keyfile!r} (None: in the same file), and password= if it is encrypted: {exc}"
            ) from exc
        try:
            if self.cafile is not None:
                context.load_verify_locations(self.cafile)
        except OSError as exc:
            raise InvalidArgumentError(
                f"TLSConfig: expected PEM certificates in cafile={self.cafile!r}: {exc}"
            ) from exc


class TLSLayer:
    """One connection's TLS, beside its socket: bytes in, bytes out.

    A TLS socket makes a system call for each record of 16 KiB. Here many records are made, or read, in
    between two system calls. To be used by one thread at a time.

    Args:
        context: of :class:`TLSConfig`.
        server_hostname: the name that the other side must prove to have; None on the listening side.

    Attributes:
        listens: whether this is the listening side.
    """

    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self.listens = server_hostname is None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )

    @property
    def pending(self) -> bool:
        """Whether there is something for the socket."""
        return self._outgoing.pending > 0

    def take(self) -> memoryview:
        """What the socket is to send."""
        return memoryview(self._outgoing.read())

    def feed(self, data: memoryview) -> None:
        """What came from the socket."""
        self._incoming.write(data)

    def shake_hands(self) -> bool:
        """Go on with the handshake; whether it is done.

        Raises:
            SSLError: the other side does not do. What is pending tells it so.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, data: memoryview) -> None:
        """Have ``data`` sent."""
        while data:
            data = data[self._tls.write(data) :]

    def decrypt(self, buffer: memoryview) -> int:
        """Put what has come into ``buffer``; how many bytes.

        Raises:
            SSLError: it is not what was sent.
        """
        count = 0
        try:
            while count < len(buffer):
                more = self._tls.read(len(buffer) - count, buffer[count:])
                if not more:
                    break
                count += int(more)
        except ssl.SSLWantReadError:
            pass
        return count
