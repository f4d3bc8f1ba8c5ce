"""Versions of which only some entries are given: the others keep the values of the version before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiosync.errors import InvalidArgumentError

if TYPE_CHECKING:
    from aiosync.sender.slot_write import SlotWrite
    from aiosync.sender.worker_group import WorkerGroup
    from aiosync.transfer.slots import SlotVersion


def _base_of(group: WorkerGroup) -> SlotVersion | None:
    return group.overflow or group.newest


def check_base(group: WorkerGroup, targets: set[int]) -> None:
    """Check that the newest version exists, and was for all of these workers.

    Raises:
        InvalidArgumentError: it does not, or was not.
    """
    base = _base_of(group)
    if base is None:
        raise InvalidArgumentError(
            "strict=False builds on the version before, and that one was lost: send all entries once"
        )
    left_out = sorted(w for w in targets & group.workers if group.addressed.get(w) != base.version)
    if left_out:
        raise InvalidArgumentError(
            f"strict=False builds on version {base.version}, which was not for workers {left_out}: "
            "send those all entries once, or use per_worker_weights=True: they share no copy then"
        )


def rebase(write: SlotWrite, targets: set[int]) -> bool:
    """Take the entries that were not given from the newest version.

    Call it again after an ``await``: if all workers have refused that version since, the one before it is the
    newest again. Return whether something has changed, so that the write has to be copied (again).

    Raises:
        InvalidArgumentError: as :func:`check_base`.
    """
    group, base = write.group, _base_of(write.group)
    if write.names is None or (base is not None and write.base is base):
        return False
    check_base(group, targets)
    assert base is not None
    write.base = base
    del write.pairs[len(write.names) - len(write.sharded) :]
    if base.slot is not write.slot:
        views, given = write.slot.views, set(write.names)
        for entry in group.pool.layout.entries:
            if entry.name not in given:
                write.pairs.append((views[entry.name], base.slot.views[entry.name]))
    return True
