"""Joint commits whose parts are all staged, and wait for readers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from aiosync import JointUpdateError
from aiosync.protocol.frames import Joint
from aiosync.receiver.commit_gate import CommitGate
from aiosync.receiver.joint_commit import drop_out, join


def test_a_part_that_drops_out_fails_the_others() -> None:
    gates = [CommitGate(), CommitGate()]
    for gate in gates:
        assert gate.try_enter(gate, gate)
    joint = Joint(id="dropped", size=2)
    first, second = (join(joint, 0, gate, nullcontext) for gate in gates)
    drop_out(first)
    assert first.done.cancelled()
    with pytest.raises(JointUpdateError, match="skipped to a newer version"):
        second.done.result()
    for gate in gates:
        gate.leave(gate)
    with pytest.raises(JointUpdateError):
        join(joint, 0, gates[0], nullcontext)
