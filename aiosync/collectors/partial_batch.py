"""A batch that is being collected."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from aiosync.collectors.batch_buffers import BatchBuffer, BatchBuffers
from aiosync.collectors.command_pipe import Collect
from aiosync.collectors.direct_frames import DirectFrames
from aiosync.collectors.env import Key, Values, under
from aiosync.errors import InvalidArgumentError


class PartialBatch:
    """A batch that is being collected, by one rollout or by several concurrently.

    A rollout claims a place first and then collects the frame for it: it writes into ``memory``, then calls
    :meth:`finish`. So two batches can be in progress: one that waits for its last frames, and the next one.
    ``width`` is the number of frames per place: the environments that step together.
    """

    def __init__(self, request: Collect, buffers: BatchBuffers, width: int) -> None:
        self.request = request
        self.buffer = -1  # the number of the memory; -1: no frame is complete yet
        self.memory: Any = buffers.begin()  # a FrameList; a BatchBuffer once a frame has shown the fields
        self.begun = False  # whether a rollout has begun to collect for it
        self.steps = 0  # how many places have their frame
        self.capacity = -(-request.frames // width)  # places of the complete batch; end_early() lowers it
        self._buffers = buffers
        self.claimed = 0  # how many places are claimed
        self.direct: DirectFrames | None = None  # writes frames, if the first one shows that it can
        # While the layout of an earlier batch is tried: the fields of the first frame that are written.
        self._tried: tuple[list[Key], list[Key]] | None = None
        self.lengths: dict[int, int] = {}  # see Continued
        self._places_of: dict[int, list[int]] = {}  # rollout -> its places, in order of time

    @property
    def has_room(self) -> bool:
        """Whether a place is left to claim."""
        return self.claimed < self.capacity

    @property
    def complete(self) -> bool:
        """Whether every place has its frame."""
        return self.steps == self.capacity

    def claim(self, rollout: int, places: int = 1) -> int:
        """Claim the next places for the rollout of this number, and return the first one. Requires
        :attr:`has_room`."""
        first = self.claimed
        self.claimed = first + places
        self._places_of.setdefault(rollout, []).extend(range(first, self.claimed))
        return first

    def try_layout_of(self, earlier: PartialBatch) -> None:
        """Write the first frame straight into memory, with the layout of an earlier batch. If it has other
        fields, it goes into memory that takes any. Only for a worker with one rollout."""
        if isinstance(earlier.memory, BatchBuffer):
            found = self._buffers.take_free(earlier.memory.specs, self.capacity)
            if found is not None:
                self.buffer, self.memory, self._tried = found, self._buffers[found], ([], [])

    def _drop_layout(self, place: int) -> None:
        assert self._tried is not None
        (step, after), tried, self._tried = self._tried, self.memory, None
        self._buffers.release([self.buffer])
        self.buffer, self.memory = -1, self._buffers.begin()
        self.memory.write(place, {key: tried.columns[key].view[place] for key in step})
        self.memory.write_next(place, {key: tried.next_columns[key].view[place] for key in after})

    def write(self, place: int, fields: Values, *, below_next: bool = False) -> None:
        """Write fields of the frame at a place. InvalidArgumentError: a field differs from that of the first
        frame in shape or dtype, or the first frame has no such field."""
        method = "write_next" if below_next else "write"
        try:
            getattr(self.memory, method)(place, fields)
        except InvalidArgumentError:
            if self._tried is None:
                raise
            self._drop_layout(place)
            getattr(self.memory, method)(place, fields)
        if self._tried is not None:
            self._tried[below_next].extend(fields)

    def wrote(self, fields: Iterable[Key]) -> None:
        """These fields of the frame in progress are written, not by :meth:`write`."""
        if self._tried is not None:
            self._tried[0].extend(fields)

    def count(self, frames: int) -> None:
        """Count frames that are complete, and were not written by :meth:`write`."""
        if frames:
            self._tried = None
            self.steps += frames

    def finish(self, place: int, step: Set[Key], after: Set[Key]) -> None:
        """Count a frame whose fields are all written: ``step``, and ``after`` below ``"next"``.
        InvalidArgumentError: it lacks a field of the batch's first frame."""
        try:
            self.memory.check(step, after)
        except InvalidArgumentError:
            if self._tried is None:
                raise
            self._drop_layout(place)
        self._tried = None
        if self.buffer < 0:
            self.buffer = self._buffers.allocate(self.memory, place, self.capacity)
            self.memory = self._buffers[self.buffer]
        self.steps += 1

    def end_early(self) -> None:
        """Let the batch end with the frames in progress, or with one frame if it has none."""
        self.capacity = max(self.claimed, 1)

    def close(self, *, truncate: Iterable[Key]) -> list[int]:
        """Return the places of a complete batch in order of time, one rollout after the other. ``truncate``:
        the end flags to set in the last frame of each rollout."""
        if self.direct is not None:
            self.direct.flush()
        keys = [under("next", key) for key in truncate]
        if keys:
            for places in self._places_of.values():
                self.memory.set_flags(keys, places[-1])
        return [place for rollout in sorted(self._places_of) for place in self._places_of[rollout]]
