"""Certificates for the tests, made once per process and gone with it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from aiosync import TLSConfig

__all__ = ["Certificates", "certificates"]


@dataclass(frozen=True)
class Certificates:
    """What a TLS endpoint needs, in files.

    Attributes:
        config: good for both sides; workers are asked for a certificate.
        stranger: the same, signed by an authority that nobody here trusts.
        expired: signed by the right one, a day too old.
        anonymous: knows the authority and has no certificate.
    """

    config: TLSConfig
    stranger: TLSConfig
    expired: TLSConfig
    anonymous: TLSConfig


@functools.cache
def certificates() -> Certificates:
    """The test run's certificates, for ``localhost`` and ``127.0.0.1``."""
    folder = Path(tempfile.mkdtemp(prefix="aiosync-test-certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    authority, other = trustme.CA(), trustme.CA()
    ours, theirs = str(folder / "ours.pem"), str(folder / "theirs.pem")
    authority.cert_pem.write_to_path(ours)
    other.cert_pem.write_to_path(theirs)
    yesterday = datetime.now(UTC) - timedelta(days=1)

    def issue(name: str, signer: trustme.CA, until: datetime | None = None) -> str:
        issued = signer.issue_cert("localhost", "127.0.0.1", not_after=until)
        path = str(folder / name)
        issued.private_key_and_cert_chain_pem.write_to_path(path)
        return path

    return Certificates(
        config=TLSConfig(issue("good.pem", authority), cafile=ours),
        stranger=TLSConfig(issue("stranger.pem", other), cafile=ours),
        expired=TLSConfig(issue("expired.pem", authority, yesterday), cafile=ours),
        anonymous=TLSConfig(cafile=ours),
    )
