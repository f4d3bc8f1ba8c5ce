"""Which entries an update is about, for workers that skipped some, and where versions are withdrawn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiosync.transfer.slots import ChangeLog

NAMES = st.none() | st.sets(st.sampled_from("abcd"), min_size=1).map(lambda names: tuple(sorted(names)))


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "withdraw", "keep"]), NAMES), max_size=20))
def test_a_log_says_what_a_list_of_all_versions_says(steps: list[tuple[str, tuple[str, ...] | None]]) -> None:
    log, kept = ChangeLog(), 0
    versions: list[tuple[str, ...] | None] = [None]
    log.add(0, None)
    for step, names in steps:
        newest = len(versions) - 1
        if step == "add":
            versions.append(names)
            log.add(newest + 1, names)
        elif step == "keep":
            kept = newest
            log.keep(newest)
        elif newest > kept:
            versions.pop()
            log.withdraw(newest)
        for have in range(len(versions)):
            later = versions[have + 1 :]
            found = {name for each in later if each is not None for name in each}
            expected = None if None in later or not found else sorted(found)
            assert log.since(have) == expected
