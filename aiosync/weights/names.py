"""Names of a model's entries: dotted paths, with a special part for a module's extra state."""

from __future__ import annotations

EXTRA_STATE = "__extra_state__"
"""The path part of a module's ``get_extra_state()``."""

TORCH_EXTRA_STATE = "_extra_state"
"""The path part that torch's ``state_dict()`` uses for extra state."""

COMPILED = "_orig_mod"
"""The path part that ``torch.compile`` adds to a module's names."""


def join(prefix: str, name: str) -> str:
    """Return ``prefix.name``, or ``name`` if the prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def is_extra_state(name: str) -> bool:
    """Return whether this entry is part of a module's extra state, and not a parameter or buffer."""
    return EXTRA_STATE in name and EXTRA_STATE in name.split(".")


def extra_state_root(name: str) -> str:
    """Return the name up to the extra-state part: ``net.__extra_state__`` for ``net.__extra_state__.mean``.

    A name without such a part is returned unchanged.
    """
    parts = name.split(".")
    if EXTRA_STATE not in parts:
        return name
    return ".".join(parts[: parts.index(EXTRA_STATE) + 1])


def normalized(name: str) -> str:
    """Return the name without the part that ``torch.compile`` adds.

    So a compiled model and a plain model have the same names.
    """
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)
