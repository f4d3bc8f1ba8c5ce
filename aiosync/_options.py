"""A scheme's options: the part of it that is pickled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from aiosync._deadline import check_timeout, default_timeout
from aiosync.errors import InvalidArgumentError
from aiosync.weights.binding import CommitMode
from aiosync.weights.strategy import WeightStrategy, get_strategy

__all__ = ["OnFailure", "OnSenderClose", "SchemeOptions", "StrategyName", "check_reconnecting"]

OnFailure = Literal["raise", "drop"]
OnSenderClose = Literal["stop", "wait"]
StrategyName = Literal["tensordict", "state_dict"]


@dataclass(frozen=True)
class SchemeOptions:
    """Options that all schemes share; see :class:`~aiosync.WeightSyncScheme` for what they mean."""

    strategy: StrategyName = "tensordict"
    sync: bool = True
    timeout: float | None = None
    cast: torch.dtype | None = None
    commit: CommitMode = "flip"
    on_failure: OnFailure = "raise"
    per_worker_weights: bool = False
    max_slots: int = 3
    first_version: int = 0
    min_workers: int | None = None

    def __post_init__(self) -> None:
        get_strategy(self.strategy)
        if not isinstance(self.sync, bool):
            raise InvalidArgumentError(f"sync: expected True or False, got {self.sync!r}")
        if self.timeout is not None:
            check_timeout(self.timeout, f"timeout={self.timeout!r}")
        if self.cast is not None and not (isinstance(self.cast, torch.dtype) and self.cast.is_floating_point):
            raise InvalidArgumentError(f"cast: expected a floating torch.dtype, got {self.cast!r}")
        _choose("commit", self.commit, get_args(CommitMode))
        _choose("on_failure", self.on_failure, get_args(OnFailure))
        if not isinstance(self.max_slots, int) or self.max_slots < 2:
            raise InvalidArgumentError(
                f"max_slots={self.max_slots}: expected at least 2, one in service and one to write"
            )

        _check_count("first_version", self.first_version)
        if self.min_workers is not None:
            _check_count("min_workers", self.min_workers)

    def make_strategy(self) -> WeightStrategy:
        """The strategy by its name."""
        return get_strategy(self.strategy)

    def seconds(self, timeout: float | None) -> float:
        """The seconds that a call may take: its own ``timeout``, else the scheme's, else the default's.

        Raises:
            InvalidArgumentError: a timeout that is negative or not finite.
        """
        if timeout is None:
            return self.timeout if self.timeout is not None else default_timeout()
        if type(timeout) in (int, float) and 0 < timeout < math.inf:
            return timeout
        # Zero asks for what is there already, without waiting.
        return timeout if timeout == 0 else check_timeout(timeout, f"timeout={timeout!r}")


def check_reconnecting(reconnect_for: object, on_sender_close: object) -> None:
    """Check what a worker is to do when its sender is gone.

    Raises:
        InvalidArgumentError: not a number of seconds >= 0, or neither ``"stop"`` nor ``"wait"``.
    """
    number = isinstance(reconnect_for, int | float) and not isinstance(reconnect_for, bool)
    if not number or not 0 <= reconnect_for < math.inf:  # type: ignore[operator]
        raise InvalidArgumentError(f"reconnect_for: expected seconds >= 0, got {reconnect_for!r}")
    if on_sender_close not in get_args(OnSenderClose):
        raise InvalidArgumentError(f"on_sender_close: expected 'stop' or 'wait', got {on_sender_close!r}")
    if on_sender_close == "wait" and not reconnect_for:
        raise InvalidArgumentError("on_sender_close='wait' needs reconnect_for= > 0 seconds")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise InvalidArgumentError(f"{name}: expected an integer >= 0, got {value!r}")


def _choose(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgumentError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
