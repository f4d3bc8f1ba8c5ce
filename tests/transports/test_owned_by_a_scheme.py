"""A transport that a scheme owns refuses the methods that move weights, and stays usable."""

from __future__ import annotations

import pytest

from aiosync import AiosyncError
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of

INSTEAD = {
    "send_weights": "send",
    "send_weights_async": "send",
    "wait_ack": "wait_ack",
    "receive_weights": "receive",
    "send_ack": "receive",
}
"""Method of a transport -> the scheme's method that the error names."""


@pytest.mark.parametrize("case", SCHEMES, ids=lambda case: case.name)
async def test_methods_that_move_weights(case: SchemeCase) -> None:
    async with LocalCluster(case, 1) as cluster:
        worker = cluster.workers[0]
        for transport in (cluster.scheme.sender_transports[0], worker.scheme.receiver_transport):
            for method, instead in INSTEAD.items():
                with pytest.raises(RuntimeError, match=rf"{method}\(\).* scheme\.{instead}\(\)") as raised:
                    await getattr(transport, method)(cluster.model, timeout=1.0)
                assert isinstance(raised.value, AiosyncError)
        fill(cluster.model, 5.0)
        assert (await cluster.scheme.send()).ok
        assert value_of(worker.model) == 5.0
