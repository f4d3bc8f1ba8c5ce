"""Addresses of senders: ``tcp://host:port`` or ``unix:///path``."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from aiosync.errors import InvalidArgumentError

_TCP = re.compile(r"tcp://(\[[^\]/]+\]|[^:/\[\]]+):([0-9]{1,5})")
_EXPECTED = "expected tcp://host:port (port 0: any free one) or unix:///absolute/path"
_PATH_LIMIT = 107  # bytes, the kernel's limit


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address."""

    host: str = ""  # host name or IP address, without brackets; empty for a Unix socket
    port: int = 0  # 0: any free port
    path: str = ""  # path of a Unix socket; empty for TCP

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address. Raises InvalidArgumentError if ``text`` is not one."""
        if not isinstance(text, str):
            raise InvalidArgumentError(f"address: {_EXPECTED}, got {text!r}")
        found = _TCP.fullmatch(text)
        if found is not None and int(found[2]) <= 65535 and _is_host(found[1]):
            return cls(host=found[1].strip("[]"), port=int(found[2]))
        if text.startswith("unix:///"):
            path = text.removeprefix("unix://")
            _check_path(path)
            return cls(path=path)
        raise InvalidArgumentError(f"address: {_EXPECTED}, got {text!r}")

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def _check_path(path: str) -> None:
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError:
        length = 0
    if not length or "\0" in path:
        raise InvalidArgumentError(f"address: expected the path of a socket, got {path!r}")
    if length > _PATH_LIMIT:
        expected = f"a socket path of at most {_PATH_LIMIT} bytes"
        raise InvalidArgumentError(f"address: expected {expected}, got {length}: {path!r}")


def _is_host(text: str) -> bool:
    """Return whether ``text`` is an IP address, or a name that a resolver accepts."""
    if text.startswith("["):
        try:
            return ipaddress.ip_address(text.strip("[]").partition("%")[0]).version == 6
        except ValueError:
            return False
    try:
        return text.isprintable() and " " not in text and bool(text.encode("idna"))
    except UnicodeError:
        return False


def is_ip_address(host: str) -> bool:
    """Return whether ``host`` is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether the IP address ``host`` can be reached only from this machine."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
