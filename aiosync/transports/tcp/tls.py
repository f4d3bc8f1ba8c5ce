"""TLS for connections: the certificates, and a TLS layer that works on bytes instead of a socket."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field

from aiosync.errors import HandshakeError, InvalidArgumentError, ProtocolError, SenderFullError
from aiosync.protocol.frames import Bye, Refused
from aiosync.protocol.framing import FrameDecoder, clean

_QUOTED = 200  # characters of a peer's answer that an error quotes


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """The certificate files of a TLS endpoint. Picklable: each process reads the files itself.

    The files are read for each connection, if they have changed: a renewed certificate is used from then on.

    The sender needs ``certfile`` and ``keyfile``. With ``cafile`` it accepts only workers with a certificate
    signed by one of those authorities (mutual TLS). A worker needs ``cafile`` to verify the sender's
    certificate, and its own certificate if the sender requires one. Both sides may use the same config.

    Attributes:
        certfile: this endpoint's certificate chain, PEM.
        keyfile: its private key, PEM. None: the key is in ``certfile``.
        cafile: certificates of the authorities that sign the other side's certificate, PEM. None on a worker:
            those of the system.
        password: decrypts ``keyfile``.
        server_hostname: the name that the sender's certificate must contain. None: the host of the address.
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

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Return what differs once one of the files has been replaced or written."""
        paths = (path for path in (self.certfile, self.keyfile, self.cafile) if path is not None)
        found = (os.stat(path) for path in paths)
        return tuple((status.st_mtime_ns, status.st_ino) for status in found)

    def for_sender(self) -> ssl.SSLContext:
        """Make the listening side's context. Raises InvalidArgumentError for a missing or unreadable file."""
        if self.certfile is None:
            raise InvalidArgumentError("TLSConfig: a sender needs certfile= and keyfile=")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        if self.cafile is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_worker(self) -> ssl.SSLContext:
        """Make the dialling side's context. Raises InvalidArgumentError if a file cannot be read."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cafile is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.certfile is not None:
                # Without this callback OpenSSL would prompt at the terminal for a password, and block.
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


_MOST_ANSWERS = 1 << 16
"""Bytes of the TLS layer's own, such as answers to updates of keys, that may wait to be sent."""


class TLSLayer:
    """The TLS of one connection, apart from its socket: bytes in, bytes out.

    An ``SSLSocket`` makes a system call for each record of 16 KiB. This class encrypts and decrypts many
    records between two system calls. One thread at a time may use it. ``server_hostname`` is the name that
    the sender's certificate must contain; None on the listening side. Methods raise SSLError.
    """

    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self.listens = server_hostname is None
        self.incoming = ssl.MemoryBIO()  # encrypted bytes that the socket has received
        self.outgoing = ssl.MemoryBIO()  # encrypted bytes that the socket has to send
        self._tls = context.wrap_bio(self.incoming, self.outgoing, self.listens, server_hostname)

    def do_handshake(self) -> bool:
        """Continue the handshake; returns whether it is done. If it failed, ``outgoing`` has the alert."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, data: bytes | memoryview) -> None:
        """Encrypt ``data`` into ``outgoing``."""
        while data:
            data = data[self._tls.write(data) :]

    def decrypt(self, buffer: memoryview) -> int:
        """Decrypt received bytes into ``buffer``; returns how many bytes, 0 if more have to come.

        Raises:
            ConnectionAbortedError: the peer has ended its TLS, or reads no answers of this layer. More bytes
                from it would only be collected.
        """
        if self.outgoing.pending > _MOST_ANSWERS:
            raise ConnectionAbortedError("the peer does not read what TLS answers")
        count = 0
        with suppress(ssl.SSLWantReadError):
            while count < len(buffer):
                more = self._tls.read(len(buffer) - count, buffer[count:])
                if not more and not count:
                    raise ConnectionAbortedError("the peer has ended its TLS")
                if not more:
                    break
                count += int(more)
        return count


def error_of_plain_answer(data: bytes) -> HandshakeError:
    """Make the error for a sender that answered a TLS handshake with frames, which begin with ``data``."""
    hint = "the sender does not speak TLS: take tls= away here, or give it to the sender"
    with suppress(ProtocolError):
        for frame in FrameDecoder().feed(data):
            if isinstance(frame, Refused) and frame.retry:
                return SenderFullError(f"the sender refused the connection: {clean(frame.reason, _QUOTED)}")
            if isinstance(frame, Refused | Bye):
                return HandshakeError(f"{hint} (it said: {clean(frame.reason, _QUOTED)})")
    return HandshakeError(hint)


def reason_of(exc: Exception) -> str:
    """Return an exception's message, without the line of the C file that OpenSSL adds."""
    if isinstance(exc, ssl.SSLError):
        return getattr(exc, "verify_message", None) or (exc.reason or str(exc)).replace("_", " ").lower()
    return getattr(exc, "strerror", None) or str(exc)
