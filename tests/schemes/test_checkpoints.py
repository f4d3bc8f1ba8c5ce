"""A trainer that resumes: its versions go on from the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

import aiosync.sync
from aiosync import AlreadyConnectedError, InvalidArgumentError, TCPWeightSyncScheme
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform
from tests.kit.tcp import TOKEN, join, make_worker, sender_of


async def test_versions_go_on() -> None:
    state: dict[str, int] | None = None
    for epoch in range(3):
        scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE)
        if state is not None:
            scheme.load_state_dict(state)
        scheme.init_on_sender(model_id="policy", model=Uniform())
        worker = make_worker(scheme.address)
        await within(join(scheme, worker))
        assert worker.scheme.version == 3 * epoch
        for _ in range(2):
            await within(scheme.send())
        state = scheme.state_dict()
        assert state == {"version": 3 * epoch + 2, "epoch": epoch}
        await worker.close()
        await within(scheme.aclose())
        assert scheme.state_dict() == state  # after the end too


def test_a_trainer_that_has_sent_nothing() -> None:
    scheme = TCPWeightSyncScheme(token=TOKEN, first_version=7)
    assert scheme.state_dict() == {"version": 6, "epoch": 0}
    scheme.load_state_dict(scheme.state_dict())
    assert scheme.state_dict() == {"version": 6, "epoch": 1}


async def test_not_while_it_is_connected() -> None:
    async with sender_of(Uniform()) as scheme:
        await within(scheme.connect(min_workers=0))
        with pytest.raises(AlreadyConnectedError, match="before connect"):
            scheme.load_state_dict({"version": 3, "epoch": 0})


async def test_not_once_the_sender_has_been_created() -> None:
    """It has the first version already."""
    async with sender_of(Uniform()) as scheme:
        scheme.get_sender()
        with pytest.raises(AlreadyConnectedError, match="before connect"):
            scheme.load_state_dict({"version": 3, "epoch": 0})
    scheme.load_state_dict({"version": 3, "epoch": 0})
    assert scheme.state_dict() == {"version": 3, "epoch": 1}


@pytest.mark.parametrize(
    "state", [{}, {"version": 3}, {"version": "3", "epoch": 0}, {"version": -2, "epoch": 0}]
)
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a state_dict"):
        TCPWeightSyncScheme(token=TOKEN).load_state_dict(state)


def test_the_blocking_twin() -> None:
    scheme = aiosync.sync.TCPWeightSyncScheme(token=TOKEN)
    scheme.load_state_dict({"version": 11, "epoch": 4})
    assert scheme.state_dict() == {"version": 11, "epoch": 5}
