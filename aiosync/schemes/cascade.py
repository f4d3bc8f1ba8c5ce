"""Handing an update on to whatever the worker's context holds in its turn."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aiosync.weights.strategy import WeightStrategy, to_state_dict, to_tensordict

__all__ = ["cascade", "in_format"]


def in_format(strategy: WeightStrategy, views: Mapping[str, Tensor]) -> Any:
    """The weights in the form that ``strategy`` extracts: a TensorDict or a flat dict."""
    return to_tensordict(dict(views)) if strategy.extract_as == "tensordict" else to_state_dict(dict(views))


async def cascade(
    context: Any, model_id: str | None, strategy: WeightStrategy, views: Mapping[str, Tensor]
) -> None:
    """Call ``context.update_policy_weights_(policy_or_weights=..., model_id=...)`` if it has that.

    It runs before this worker's own commit, so that its failure leaves the model here as it was. A
    coroutine is awaited.

    Raises:
        Exception: whatever the context raises.
    """
    update = getattr(context, "update_policy_weights_", None)
    if update is None:
        return
    weights = in_format(strategy, views)
    result = update(policy_or_weights=weights, model_id=model_id or "policy")
    if inspect.isawaitable(result):
        await result
