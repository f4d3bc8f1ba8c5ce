"""The policy's versions: their numbers, the names that a tracker gives them, and a limit on their age."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from aiosync.errors import InvalidArgumentError

VERSION = "policy_version"
"""The entry of a frame that has the version that acted."""


class PolicyVersions:
    """Gives each version of the policy its name.

    Workers tag frames with numbers. Without a tracker a number is its own name. A tracker is an object like
    torchrl's ``PolicyVersion``: its ``version`` is the name of the newest number, and ``increment_version()``
    makes the next name. It counts (names and numbers are equal then), or makes UUIDs.

    Args:
        given: the option ``track_policy_version``: True, False, or a tracker.

    Raises:
        InvalidArgumentError: ``given`` is none of these.
    """

    def __init__(self, given: Any) -> None:
        self.tracker = given if callable(getattr(given, "increment_version", None)) else None
        self.enabled = self.tracker is not None or bool(given)
        if self.tracker is None and given not in (True, False, None):
            raise InvalidArgumentError(
                f"track_policy_version={given!r}: expected True, False, or a tracker with version and "
                "increment_version(), such as torchrl's PolicyVersion"
            )
        name = self.tracker.version if self.tracker is not None else 0
        self.counts = isinstance(name, int)
        self.first = name if isinstance(name, int) else 0  # the number that the workers begin with
        self._newest = self.first  # the last number that has a name
        self._lock = threading.Lock()  # a blocking twin's properties are read in other threads
        self._names: dict[int, Any] = {self.first: name}  # only of a tracker that makes UUIDs

    def advance(self, number: int) -> None:
        """Give names to all numbers up to the newest one."""
        if self.tracker is None or self._newest >= number:
            return
        with self._lock:
            while self._newest < number:
                self.tracker.increment_version()
                self._newest += 1
                if not self.counts:
                    self._names[self._newest] = self.tracker.version

    def restore(self, number: int, name: Any) -> None:
        """Let ``name`` be the name of ``number``, which is the newest from now on."""
        self._newest = number
        if self.tracker is not None:
            self.tracker.version = name
        if not self.counts:
            self._names[number] = name

    def name(self, number: int) -> Any:
        """Return the name of a number. None: versions are not tracked."""
        if not self.enabled:
            return None
        return number if self.counts else self._names.get(number)

    def write_names(self, batch: TensorDictBase) -> None:
        """Replace the numbers in a batch by their names, if these differ."""
        if self.counts or not self.enabled:
            return
        numbers = batch.get(VERSION)
        found = numbers.unique().tolist()
        names: Any
        if len(found) == 1:
            names = NonTensorData(self._names[found[0]], batch_size=batch.batch_size)
        else:
            names = NonTensorStack.from_list(self._nested(numbers.tolist()))
        batch.set(VERSION, names)
        batch.set(("next", VERSION), names.clone())

    def _nested(self, numbers: Any) -> Any:
        return [self._nested(n) for n in numbers] if isinstance(numbers, list) else self._names[numbers]


_limits: WeakValueDictionary[int, AgeLimit] = WeakValueDictionary()
"""The id of a replay buffer -> its limit. That keeps its collector, and so the buffer."""


class AgeLimit:
    """Keeps frames that are too old out of what a replay buffer samples.

    A sampler like torchrl's ``StalenessAwareSampler`` gets each new version. For another one, a buffer like
    torchrl's gets a transform that removes old frames from what was sampled. From any other object nothing is
    removed.

    The limit holds until another collector gets the buffer, with a limit or without one: its versions are
    counted apart.

    Args:
        replay_buffer: the replay buffer.
        limit: how many versions behind the newest a frame may be; None: any number.
        newest: returns the newest version.
    """

    def __init__(self, replay_buffer: Any, limit: int | None, newest: Callable[[], int]) -> None:
        self._newest = newest
        self._limit = limit
        sampler = getattr(replay_buffer, "sampler", None)
        knows_versions = hasattr(sampler, "consumer_version") and hasattr(sampler, "max_staleness")
        self._sampler = sampler if knows_versions else None
        append = getattr(replay_buffer, "append_transform", None)
        former = _limits.get(id(replay_buffer))
        if former is not None:
            former._limit = None
        _limits[id(replay_buffer)] = self
        if self._sampler is not None:
            _limit_sampler(self._sampler, limit)
        elif limit is not None and callable(append):
            append(self.without_old)
        self.update()

    def update(self) -> None:
        """Called after each update of the policy."""
        if self._sampler is not None and self._limit is not None:
            self._sampler.consumer_version = self._newest()

    def without_old(self, frames: TensorDictBase) -> TensorDictBase:
        """Return the frames whose version is new enough. A row of several frames is as old as its oldest."""
        versions = frames.get(VERSION, None)
        if versions is None or self._limit is None or not frames.batch_dims:
            return frames
        oldest = versions.reshape(len(versions), -1).amin(dim=-1)
        keep = oldest >= self._newest() - self._limit
        return frames if bool(keep.all()) else frames[keep]


def _limit_sampler(sampler: Any, limit: int | None) -> None:
    """Let a sampler use the lower one of ``limit`` and its own ``max_staleness``; -1: there is none."""
    former: tuple[int, int] | None = getattr(sampler, "_aiosync_limits", None)
    if limit is None and former is None:
        return
    # Another collector has set it, and the program has not set it since.
    own: int = former[1] if former and former[0] == sampler.max_staleness else sampler.max_staleness
    sampler.max_staleness = own if limit is None else limit if own < 0 else min(own, limit)
    sampler._aiosync_limits = sampler.max_staleness, own
