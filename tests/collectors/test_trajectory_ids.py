"""Trajectories are numbered for many frames at a time as they are frame by frame."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aiosync.collectors.trajectory_ids import TrajectoryIds


def ids(shape: tuple[int, ...], *, skips: bool) -> TrajectoryIds:
    return TrajectoryIds(shape, 5, 3, skips=skips)


@given(
    done=st.sampled_from([(), (1,), (3,), (2, 2)]).flatmap(
        lambda shape: st.integers(1, 6).flatmap(lambda n: arrays(np.bool_, (n, *shape)))
    ),
    skips=st.booleans(),
    goes_on=st.booleans(),
    cut=st.integers(0, 6),
)
def test_write(done: np.ndarray, skips: bool, goes_on: bool, cut: int) -> None:
    frames, shape = len(done), done.shape[1:]
    one, many = ids(shape, skips=skips), ids(shape, skips=skips)
    expected, found = np.zeros(done.shape, np.int64), np.zeros(done.shape, np.int64)
    for each in (one, many):
        each.restart(7)
    for number in range(frames):
        expected[number] = one.current
        if number < frames - 1 or not goes_on:
            one.start(done[number], 7 + number + 1)
    cut = min(cut, frames)
    for first, end in ((0, cut), (cut, frames)):
        if first < end:
            many.write(found[first:end], done[first : end - (goes_on and end == frames)], 7 + first)
    assert np.array_equal(found, expected)
    assert np.array_equal(many.current, one.current)
    assert np.array_equal(many.begun, one.begun)
    assert many.next_id == one.next_id


@pytest.mark.parametrize("shape", [(), (2,)])
def test_nothing_ends(shape: tuple[int, ...]) -> None:
    found = ids(shape, skips=True)
    found.restart(0)
    column = np.zeros((4, *shape), np.int64)
    found.write(column, np.zeros((0, *shape), np.bool_), 0)  # as where episodes do not begin by themselves
    assert np.array_equal(column, np.broadcast_to(found.current, column.shape))
    assert found.lengths(4) == dict.fromkeys(found.current.reshape(-1).tolist(), 4)
