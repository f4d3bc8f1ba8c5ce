"""Weights as named tensors: extract them, apply them, and lay them out in one buffer. No asyncio."""

from aiosync.weights.flatten import named_tensors
from aiosync.weights.layout import Entry, Layout
from aiosync.weights.resolve import resolve_model
from aiosync.weights.strategy import WeightStrategy, get_strategy, to_tensordict

__all__ = [
    "Entry",
    "Layout",
    "WeightStrategy",
    "get_strategy",
    "named_tensors",
    "resolve_model",
    "to_tensordict",
]
