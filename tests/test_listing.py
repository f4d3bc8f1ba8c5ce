"""Many workers fit into a message."""

from aiosync import UnknownWorkerError, WorkerLostError
from aiosync._listing import listed


def test_runs_are_shortened() -> None:
    assert listed([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9, 10"
    assert listed([]) == ""
    assert listed(["a", 1, 2, 3, "b", "c"]) == "a, 1-3, b, c"


def test_an_error_about_a_thousand_workers_is_one_line() -> None:
    lost = WorkerLostError(dict.fromkeys(range(1000), "gone"), "the switch was turned off")
    assert str(lost) == "workers 0-999 lost: the switch was turned off"
    assert list(lost.workers) == list(range(1000))
    assert str(UnknownWorkerError(1000, range(1000))).endswith("this scheme serves workers [0-999]")
