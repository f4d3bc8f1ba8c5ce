"""Schemes: what users hold. A recipe each, and the live sender and receiver that it makes.

All are imported together, so that ``WeightSyncScheme.from_backend`` knows every name.
"""

from aiosync.schemes import (
    distributed,
    memory,
    multiprocess,
    none,
    ray,
    ray_modules,
    rpc,
    shared_memory,
    tcp,
)

__all__ = [
    "distributed",
    "memory",
    "multiprocess",
    "none",
    "ray",
    "ray_modules",
    "rpc",
    "shared_memory",
    "tcp",
]
