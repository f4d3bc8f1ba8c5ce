"""Connections between the processes of a Ray cluster, and calls of actors."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from aiosync._extras import how_to_install
from aiosync.errors import NotInitializedError

__all__ = ["ray_here"]


def ray_here() -> Any:
    """Return the module ``ray``. Raises NotInitializedError if this process is not connected to a cluster."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        installed = importlib.util.find_spec("ray") is not None
        how = "call ray.init() first" if installed else f"{how_to_install('ray')}, and call ray.init()"
        raise NotInitializedError(f"this process is not connected to a Ray cluster: {how}")
    return ray
