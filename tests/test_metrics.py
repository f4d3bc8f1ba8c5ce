"""Events as Prometheus and OpenTelemetry metrics."""

from __future__ import annotations

import asyncio
import copy
import sys
from typing import Any

import pytest
import torch

from aiosync import MemoryWeightSyncScheme, metrics
from aiosync._extras import how_to_install
from tests.kit.clock import eventually, within
from tests.kit.models import Uniform
from tests.kit.tcp import join, make_worker, sender_of


async def one_send(scheme: MemoryWeightSyncScheme, registry: Any = None) -> None:
    """Connect one worker, whose events are counted in ``registry``; send once, close."""
    scheme.init_on_sender(model_id="policy", model=torch.nn.Linear(3, 2), num_workers=1)
    worker = copy.copy(scheme)
    if registry is not None:
        metrics.to_prometheus(worker, registry)
    worker.init_on_receiver(model_id="policy", model=torch.nn.Linear(3, 2), worker_idx=0)
    await asyncio.gather(scheme.connect(), worker.connect())
    async with worker.receiving():
        await scheme.send()
    await worker.aclose()
    await scheme.aclose()


async def test_prometheus_counts_what_happened() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    scheme = MemoryWeightSyncScheme(timeout=20)
    stop = metrics.to_prometheus(scheme, registry)
    await one_send(scheme, registry)
    whole = {"role": "sender", "model": "policy", "worker": ""}
    assert registry.get_sample_value("aiosync_events_total", {"kind": "sent", **whole}) == 1
    assert registry.get_sample_value("aiosync_bytes_total", whole) == 32
    assert registry.get_sample_value("aiosync_version", whole) == 1
    assert registry.get_sample_value("aiosync_phase_seconds_count", {"phase": "stage", **whole}) == 1
    worker = {"role": "receiver", "model": "policy", "worker": "0"}
    assert registry.get_sample_value("aiosync_version", worker) == 1
    assert registry.get_sample_value("aiosync_events_total", {"kind": "committed", **worker}) == 2
    stop()
    again = MemoryWeightSyncScheme(timeout=20)
    metrics.to_prometheus(again, registry)
    await one_send(again)
    assert registry.get_sample_value("aiosync_events_total", {"kind": "sent", **whole}) == 2


async def test_a_worker_that_is_gone_has_no_version_and_its_loss_is_an_increase() -> None:
    client = pytest.importorskip("prometheus_client")
    registry, theirs = client.CollectorRegistry(), {"role": "sender", "model": "policy", "worker": "0"}
    value = registry.get_sample_value
    async with sender_of(Uniform(), on_failure="drop") as scheme:
        metrics.to_prometheus(scheme, registry)
        worker = make_worker(scheme.address)
        await within(join(scheme, worker))
        await within(scheme.send())
        assert value("aiosync_version", theirs) == 1
        assert value("aiosync_events_total", {"kind": "lost", **theirs}) == 0
        await worker.close()
        await eventually(
            lambda: value("aiosync_events_total", {"kind": "lost", **theirs}) == 1, "the loss is counted"
        )
        assert value("aiosync_version", theirs) is None


@pytest.mark.parametrize(
    ("module", "function"),
    [("prometheus_client", metrics.to_prometheus), ("opentelemetry.metrics", metrics.to_opentelemetry)],
)
def test_without_the_extra_the_error_says_how_to_install_it(
    module: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        function(MemoryWeightSyncScheme())
    assert str(caught.value) == f"{module} is not installed: {how_to_install('metrics')}"


async def test_opentelemetry_counts_what_happened() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    scheme = MemoryWeightSyncScheme(timeout=20)
    metrics.to_opentelemetry(scheme, provider.get_meter("test"))
    await one_send(scheme)
    found = {
        metric.name: metric
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert set(found) == {"aiosync_events", "aiosync_bytes", "aiosync_version", "aiosync_phase_seconds"}
    kinds = {point.attributes["kind"] for point in found["aiosync_events"].data.data_points}
    assert {"joined", "applied", "sent", "closed"} <= kinds
    provider.shutdown()
