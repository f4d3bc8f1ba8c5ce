"""G2: versions count up by one, receivers only move forward, a send that nobody took is none."""

from __future__ import annotations

import pytest

from aiosync import RemoteApplyError
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of
from tests.kit.processes import ProcessCluster


async def test_versions_count_up_from_zero(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        scheme = cluster.scheme
        assert scheme.version == 0
        assert scheme.worker_versions == {0: 0, 1: 0}
        for expected in range(1, 6):
            fill(cluster.model, expected)
            report = await scheme.send()
            assert report.version == scheme.version == expected
            assert {r.status for r in report.workers.values()} == {"applied"}
            assert {r.version for r in report.workers.values()} == {expected}
            assert scheme.worker_versions == {0: expected, 1: expected}
            for worker in cluster.workers:
                assert worker.scheme.version == expected
                assert value_of(worker.model) == expected


async def test_versions_between_processes(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        for expected in range(1, 4):
            fill(cluster.model, expected)
            assert (await cluster.scheme.send()).version == expected
            for worker in cluster.workers.values():
                assert await worker.run(scenarios.report) == {"version": expected, "value": expected}


async def test_a_send_that_all_refuse_publishes_no_version(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        for worker in cluster.workers.values():
            await worker.run(scenarios.refuse, on=True)
        fill(cluster.model, 9)
        with pytest.raises(RemoteApplyError):
            await cluster.scheme.send()
        assert cluster.scheme.version == 0
        assert cluster.scheme.worker_versions == {0: 0, 1: 0}
        for worker in cluster.workers.values():
            await worker.run(scenarios.refuse, on=False)
        fill(cluster.model, 1)
        assert (await cluster.scheme.send()).version == 1
        for worker in cluster.workers.values():
            assert await worker.run(scenarios.report) == {"version": 1, "value": 1}
