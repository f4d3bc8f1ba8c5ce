"""TLS for connections: where the keys are, and what is asked of the other side."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field

from aiosync.errors import InvalidArgumentError

__all__ = ["TLSConfig"]


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
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.certfile is not None:
                # Without a password openssl would ask for one at the terminal, and wait.
                context.load_cert_chain(self.certfile, self.keyfile, lambda: self.password or "")
            if self.cafile is not None:
                context.load_verify_locations(self.cafile)
        except (OSError, ssl.SSLError) as exc:
            raise InvalidArgumentError(f"{self!r} cannot be used: {exc}") from exc
