"""Optional packages: the extra that installs each, and the command for it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

# Package -> the extra that installs it.
_EXTRA_OF = {
    "gymnasium": "rl",
    "matplotlib": "cli",
    "opentelemetry": "metrics",
    "prometheus_client": "metrics",
    "psutil": "bench",
    "ray": "ray",
    "torchrl": "torchrl",
    "trustme": "bench",
    "xxhash": "tcp",
    "zstandard": "delta",
}


def extra_of(module: str) -> str | None:
    """Return the extra that installs a module's package; None: none of them."""
    return _EXTRA_OF.get(module.partition(".")[0])


def packages_of_extras() -> dict[str, list[str]]:
    """Return extra -> the packages that it installs."""
    found: dict[str, list[str]] = {}
    for package, extra in _EXTRA_OF.items():
        found.setdefault(extra, []).append(package)
    return found


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, from where this copy of aiosync was installed."""
    return f"python -m pip install {_requirement(extra)}"


def _requirement(extra: str) -> str:
    try:
        record = importlib.metadata.distribution("aiosync").read_text("direct_url.json")  # see PEP 610
    except importlib.metadata.PackageNotFoundError:  # a folder on the path
        return f"'{Path(__file__).resolve().parent.parent}[{extra}]'"
    if not record:  # from a package index
        return f"'aiosync[{extra}]'"
    found = json.loads(record)
    url = urlsplit(found["url"])
    if url.scheme != "file":
        return f"'aiosync[{extra}] @ {found['url']}'"
    editable = "-e " if found.get("dir_info", {}).get("editable") else ""
    return f"{editable}'{url2pathname(url.path)}[{extra}]'"
