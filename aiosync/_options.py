"""A scheme's options: the part of it that is pickled, and the checks of schemes' arguments."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch

from aiosync._deadline import check_timeout, seconds_of
from aiosync.errors import InvalidArgumentError
from aiosync.weights.binding import CommitMode
from aiosync.weights.peft import PeftMode
from aiosync.weights.strategy import get_strategy

OnFailure = Literal["raise", "drop"]
OnSenderClose = Literal["stop", "wait"]
StrategyName = Literal["tensordict", "state_dict"]


class RareOptions(TypedDict, total=False):
    """Keywords of :class:`~aiosync.WeightSyncScheme` that no other scheme's signature repeats."""

    cast: torch.dtype | None
    commit: CommitMode
    on_failure: OnFailure
    max_slots: int
    first_version: int
    min_workers: int | None
    peft: PeftMode


class TimedOptions(RareOptions, total=False):
    """The same, and the deadline."""

    timeout: float | None


class CopyOptions(TimedOptions, total=False):
    """The same, and whether each worker has a separate copy."""

    per_worker_weights: bool


class CommonOptions(CopyOptions, total=False):
    """All keywords of :class:`~aiosync.WeightSyncScheme`."""

    strategy: StrategyName
    sync: bool


class NoOptions(TypedDict):
    """No keywords: a type checker reports each keyword that is not in the signature."""


class RankOptions(RareOptions, total=False):
    """Those that :class:`~aiosync.DistributedWeightSyncScheme` does not repeat."""

    strategy: StrategyName
    per_worker_weights: bool


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
    peft: PeftMode = "merged"

    def __post_init__(self) -> None:
        get_strategy(self.strategy, self.peft)
        check_bool("sync", self.sync)
        if self.timeout is not None:
            check_timeout(self.timeout, f"timeout={self.timeout!r}")
        if self.cast is not None and not (isinstance(self.cast, torch.dtype) and self.cast.is_floating_point):
            raise InvalidArgumentError(f"cast: expected a floating torch.dtype, got {self.cast!r}")
        check_choice("commit", self.commit, get_args(CommitMode))
        check_choice("on_failure", self.on_failure, get_args(OnFailure))
        check_count("max_slots", self.max_slots, least=2)  # the current version's, and one to write
        check_count("first_version", self.first_version)
        if self.min_workers is not None:
            check_count("min_workers", self.min_workers)

    def seconds(self, timeout: float | None) -> float:
        """The seconds that a call may take, as :func:`seconds_of`; the default is the scheme's timeout."""
        return seconds_of(timeout, self.timeout)


def unknown_option(name: str, known: Collection[str], of: str) -> InvalidArgumentError:
    """Make the error for an option that ``of`` does not have, with the known option that is most like it."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else f": expected one of {', '.join(sorted(known))}"
    return InvalidArgumentError(f"{name}= is not an option of {of}{hint}")


# Each check raises InvalidArgumentError. The message has the argument's name and the value.


def check_bool(name: str, value: object) -> None:
    """Check that an argument is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}: expected True or False, got {value!r}")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Check that an argument is one of two or more names."""
    if value not in known:
        *others, last = map(repr, known)
        raise InvalidArgumentError(f"{name}={value!r}: expected {', '.join(others)} or {last}")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Check that an argument is an integer >= ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**62:
        raise InvalidArgumentError(f"{name}: expected an integer >= {least}, got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Check that an argument is a finite number of seconds >= 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise InvalidArgumentError(f"{name}: expected seconds >= 0, got {value!r}")


def check_reconnecting(reconnect_for: object, on_sender_close: object) -> None:
    """Check what a worker is to do when its sender is gone."""
    check_seconds("reconnect_for", reconnect_for)
    check_choice("on_sender_close", on_sender_close, get_args(OnSenderClose))
    if on_sender_close == "wait" and not reconnect_for:
        raise InvalidArgumentError("on_sender_close='wait' needs reconnect_for= > 0 seconds")
