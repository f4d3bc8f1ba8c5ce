"""Errors cross process boundaries: each one can be pickled, with its text and its attributes."""

from __future__ import annotations

import copy
import pickle

import pytest

from aiosync import errors

EXAMPLES = [
    errors.UnknownWorkerError(3, {0, 1}),
    errors.SyncTimeoutError("ack", seconds=1.0, workers=[1], version=2, hint="it hangs"),
    errors.WorkerLostError([1], "its process has ended"),
    errors.LayoutMismatchError(missing=["a"], unexpected=["b"]),
    errors.InvalidArgumentError("num_workers=0: expected 1 or more"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_can_be_pickled(error: errors.AiosyncError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
