"""How the entries of a model are named: dotted paths, and the mark of a module's extra state."""

from __future__ import annotations

__all__ = [
    "COMPILED",
    "EXTRA_STATE",
    "TORCH_EXTRA_STATE",
    "extra_state_root",
    "is_extra_state",
    "join",
    "normalized",
]

EXTRA_STATE = "__extra_state__"
"""The path part under which ``get_extra_state()`` of a module travels."""

TORCH_EXTRA_STATE = "_extra_state"
"""The path part that torch's own ``state_dict()`` uses for the same thing."""

COMPILED = "_orig_mod"
"""The path part that ``torch.compile`` puts around a module."""


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or just ``name`` at the root."""
    return f"{prefix}.{name}" if prefix else name


def is_extra_state(name: str) -> bool:
    """Whether this entry is part of a module's extra state rather than a parameter or buffer."""
    return EXTRA_STATE in name and EXTRA_STATE in name.split(".")


def extra_state_root(name: str) -> str:
    """The name down to and including the extra-state part: ``net.__extra_state__`` for
    ``net.__extra_state__.mean``. The name itself where it has no such part.
    """
    parts = name.split(".")
    if EXTRA_STATE not in parts:
        return name
    return ".".join(parts[: parts.index(EXTRA_STATE) + 1])


def normalized(name: str) -> str:
    """The name without the part that ``torch.compile`` adds, so that a compiled and a plain
    model have the same names.
    """
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)
