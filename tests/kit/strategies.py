"""What hypothesis draws in more than one test."""

from __future__ import annotations

from hypothesis import strategies as st

from aiosync.protocol import frames as f

__all__ = ["nacks"]


def nacks(number: st.SearchStrategy[int], text: st.SearchStrategy[str]) -> st.SearchStrategy[f.Nack]:
    """Refusals of an update."""
    return st.builds(
        f.Nack,
        round=number,
        version=number,
        kind=st.sampled_from(["layout", "apply", "joint", "below"]),
        error_type=text,
        message=text,
        missing=st.lists(text, max_size=2),
    )
