"""Weights as named tensors: extract them, apply them, and lay them out in one buffer."""

from __future__ import annotations

from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import Extracts, WeightSource, named_tensors, optional_names
from aiosync.weights.layout import ALIGNMENT, Entry, Layout
from aiosync.weights.resolve import resolve_model
from aiosync.weights.strategy import (
    StrategyName,
    WeightStrategy,
    get_strategy,
    to_state_dict,
    to_tensordict,
)
from aiosync.weights.target import Slot, WeightTarget, receiver_slots, receiver_tensors
from aiosync.weights.tensors import check_tied
from aiosync.weights.walk import EXTRA_STATE, extra_state_root, is_extra_state

__all__ = [
    "ALIGNMENT",
    "EXTRA_STATE",
    "Entry",
    "Extracts",
    "Layout",
    "Slot",
    "StrategyName",
    "WeightSource",
    "WeightStrategy",
    "WeightTarget",
    "applying_extra_state",
    "check_tied",
    "extra_state_root",
    "get_strategy",
    "is_extra_state",
    "named_tensors",
    "optional_names",
    "receiver_slots",
    "receiver_tensors",
    "resolve_model",
    "to_state_dict",
    "to_tensordict",
]
