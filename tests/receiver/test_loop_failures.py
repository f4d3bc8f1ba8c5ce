"""A receiver loop that fails does not leave a receiver that is connected and applies nothing."""

from __future__ import annotations

import pytest

from aiosync import WorkerLostError
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import within
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of

CASES = {case.name: case for case in SCHEMES}


@pytest.mark.parametrize(
    "case", [CASES[name] for name in ("shared", "memory", "process", "tcp")], ids=lambda c: c.name
)
async def test_the_sender_loses_a_worker_whose_loop_fails(
    case: SchemeCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with LocalCluster(case, workers=2) as cluster:
        bad, good = cluster.workers
        applier = bad.scheme.get_receiver().applier
        failure = RuntimeError("the device has failed")

        async def fail() -> None:
            raise failure

        monkeypatch.setattr(applier, "take_at_once", lambda pending: False)
        monkeypatch.setattr(applier, "settle", fail)
        fill(cluster.model, 1)
        with pytest.raises(WorkerLostError, match="the device has failed") as caught:
            await cluster.scheme.send()
        assert caught.value.workers == (0,)
        assert value_of(good.model) == 1
        await within(bad.scheme.wait_closed())
        assert "the device has failed" in str(bad.scheme.ended)
        await bad.rest()
        assert bad.lost is not None and bad.lost.__cause__ is failure
        assert any(record.exc_info and record.exc_info[1] is failure for record in caplog.records)
