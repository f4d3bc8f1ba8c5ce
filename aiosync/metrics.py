"""A scheme's events as Prometheus or OpenTelemetry metrics (extra ``aiosync[metrics]``).

Both functions convert the events of :meth:`~aiosync.WeightSyncScheme.on_event`, and keep no state::

    from aiosync import metrics

    stop = metrics.to_prometheus(scheme)      # into the default registry
    stop = metrics.to_opentelemetry(scheme)   # into the global meter provider

=========================  =========  ========  ==============================================================
metric                     kind       unit      meaning
=========================  =========  ========  ==============================================================
``aiosync_events``         counter    events    events by ``kind`` (sent, applied, failed, lost, ...)
``aiosync_bytes``          counter    bytes     weights that the sender copied
``aiosync_version``        gauge      versions  the version last sent, applied or committed
``aiosync_phase_seconds``  histogram  seconds   durations by ``phase`` (extract, stage, ack, commit, ...)
=========================  =========  ========  ==============================================================

Each has the labels ``role`` (``sender`` or ``receiver``: whose event it is), ``model``, and ``worker``, which
is empty for events that are not about one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

from aiosync._extras import how_to_install
from aiosync.events import SyncEvent
from aiosync.schemes.base import WeightSyncScheme

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["to_opentelemetry", "to_prometheus"]

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@contextmanager
def _naming_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        problem = f"{missing.name} is not installed: {how_to_install('metrics')}"
        raise ModuleNotFoundError(problem, name=missing.name) from None


_GONE = {"lost", "dropped"}
"""Kinds of events after which a worker has no version, for the sender."""


def _labels(event: SyncEvent) -> dict[str, str]:
    worker = "" if event.worker is None else str(event.worker)
    return {"role": event.role, "model": event.model_id or "", "worker": worker}


def _has_version(event: SyncEvent) -> bool:
    """Whether the endpoint or the worker has the event's version: one that was refused is not meant."""
    return event.version >= 0 and event.kind != "failed"


def to_prometheus(scheme: WeightSyncScheme, registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Record a scheme's events in a Prometheus registry.

    Args:
        scheme: a sender or a receiver. Several schemes may use one registry.
        registry: None: the default registry.

    Returns:
        A function that ends the recording.

    Raises:
        ModuleNotFoundError: ``prometheus_client`` is not installed.
    """
    with _naming_the_extra():
        from prometheus_client import REGISTRY

    events, nbytes, version, spent = _prometheus_metrics(REGISTRY if registry is None else registry)

    def count(event: SyncEvent) -> None:
        labels = _labels(event)
        events.labels(kind=event.kind, **labels).inc()
        if event.nbytes:
            nbytes.labels(**labels).inc(event.nbytes)
        if event.kind == "joined":  # a counter that begins at 1 has not increased, for an alert
            for kind in _GONE | {"failed"}:
                events.labels(kind=kind, **labels)
        if event.role == "sender" and event.kind in _GONE:
            with suppress(KeyError):  # it had no version yet
                version.remove(*labels.values())
        elif _has_version(event):
            version.labels(**labels).set(event.version)
        for phase, seconds in event.seconds.items():
            spent.labels(phase=phase, **labels).observe(seconds)

    return scheme.on_event(count)


@cache  # a metric's name can be registered once per registry, and several schemes may use one registry
def _prometheus_metrics(registry: CollectorRegistry) -> tuple[Counter, Counter, Gauge, Histogram]:
    from prometheus_client import Counter, Gauge, Histogram

    labels = ["role", "model", "worker"]
    return (
        Counter("aiosync_events", "Events of weight synchronisation", ["kind", *labels], registry=registry),
        Counter("aiosync_bytes", "Bytes of weights copied", labels, registry=registry),
        Gauge("aiosync_version", "Version of the weights", labels, registry=registry),
        Histogram(
            "aiosync_phase_seconds",
            "Seconds per phase",
            ["phase", *labels],
            buckets=SECONDS,
            registry=registry,
        ),
    )


def to_opentelemetry(scheme: WeightSyncScheme, meter: Meter | None = None) -> Callable[[], None]:
    """Record a scheme's events with an OpenTelemetry meter, as :func:`to_prometheus` does.

    Args:
        scheme: a sender or a receiver.
        meter: None: the meter ``aiosync`` of the global provider.

    Raises:
        ModuleNotFoundError: ``opentelemetry`` is not installed.
    """
    with _naming_the_extra():
        from opentelemetry.metrics import get_meter

    source = get_meter("aiosync") if meter is None else meter
    events = source.create_counter("aiosync_events", description="Events of weight synchronisation")
    nbytes = source.create_counter("aiosync_bytes", unit="By", description="Bytes of weights copied")
    version = source.create_gauge("aiosync_version", description="Version of the weights")
    spent = source.create_histogram("aiosync_phase_seconds", unit="s", description="Seconds per phase")

    def count(event: SyncEvent) -> None:
        labels = _labels(event)
        events.add(1, {"kind": event.kind, **labels})
        if event.nbytes:
            nbytes.add(event.nbytes, labels)
        if _has_version(event):
            version.set(event.version, labels)
        for phase, seconds in event.seconds.items():
            spent.record(seconds, {"phase": phase, **labels})

    return scheme.on_event(count)
