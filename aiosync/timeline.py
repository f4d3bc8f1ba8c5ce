"""What each send spent its time on, per worker: events are recorded in a file, and drawn from it.

::

    from aiosync import timeline

    stop = timeline.record(scheme, "run.events")  # on the trainer

``aiosync timeline run.events`` prints a table of the durations. It can also draw a picture (extra
``aiosync[cli]``), and write a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aiosync.errors import InvalidArgumentError
from aiosync.events import SyncEvent
from aiosync.schemes.base import WeightSyncScheme

__all__ = ["PHASES", "Span", "read", "record", "spans_of", "to_chrome_trace", "to_png"]

PHASES = ("extract", "copy", "wire", "stage", "wait", "commit")
"""The phases of a send. The trainer reads the weights (``extract``) and copies them (``copy``). Then for each
worker: until it has begun to take the bytes in (``wire``), they are taken in (``stage``), readers of the old
weights end (``wait``), the new weights are put in service (``commit``)."""

_COLOURS = dict(zip(PHASES, ("#7f7f7f", "#1f77b4", "#17becf", "#2ca02c", "#ff7f0e", "#d62728"), strict=True))
_ANSWERS = ("applied", "joined")


class _Line(msgspec.Struct):
    """One line of the file."""

    time: float  # seconds since the epoch
    event: SyncEvent


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of one send.

    Attributes:
        model: the model's name.
        version: what was sent.
        worker: whose phase it is; None: the trainer's.
        phase: one of :data:`PHASES`.
        begin: in seconds since the epoch.
        seconds: its duration.
    """

    model: str
    version: int
    worker: int | None
    phase: str
    begin: float
    seconds: float


def record(scheme: WeightSyncScheme, path: str | Path) -> Callable[[], None]:
    """Append a sender's events to a file, one JSON object per line.

    Args:
        scheme: the trainer's scheme. Several schemes may use one file.
        path: the file. It grows by about 200 bytes per worker and send.

    Returns:
        A function that ends the recording and closes the file.

    Raises:
        OSError: the file cannot be written.
    """
    file = Path(path).open("ab")
    encode = msgspec.json.Encoder().encode

    def write(event: SyncEvent) -> None:
        file.write(encode(_Line(time.time(), event)) + b"\n")
        if event.kind not in _ANSWERS:  # answers follow each other closely, and a ``sent`` follows them
            file.flush()

    remove = scheme.on_event(write)

    def stop() -> None:
        remove()
        file.close()

    return stop


def read(path: str | Path) -> list[tuple[float, SyncEvent]]:
    """Return the events of a file of :func:`record`, each with its time in seconds since the epoch.

    The last line may be incomplete: the trainer may still run, or have been killed.

    Raises:
        OSError: the file cannot be read.
        InvalidArgumentError: it is no such file.
    """
    lines = Path(path).read_bytes().splitlines()
    decode = msgspec.json.Decoder(_Line).decode
    found = []
    for number, line in enumerate(lines, 1):
        try:
            entry = decode(line)
        except msgspec.DecodeError as exc:
            if number == len(lines) > 1:
                break
            raise InvalidArgumentError(
                f"{path}, line {number}: expected an event that aiosync.timeline.record() has written: {exc}"
            ) from None
        found.append((entry.time, entry.event))
    return found


def spans_of(events: Iterable[tuple[float, SyncEvent]], *, last: int | None = None) -> list[Span]:
    """Return the phases of the sends, in order of time. ``last``: of that many sends only."""
    sent: list[tuple[float, SyncEvent]] = []
    answers: dict[tuple[str | None, int], list[tuple[float, SyncEvent]]] = {}
    for at, event in events:
        if event.kind == "sent":
            sent.append((at, event))
        elif event.kind in _ANSWERS and event.worker is not None:
            answers.setdefault((event.model_id, event.version), []).append((at, event))
    chosen = sent if last is None else sent[max(0, len(sent) - last) :]
    spans = [
        span
        for at, event in chosen
        for span in _spans_of_send(at, event, answers.get((event.model_id, event.version), ()))
    ]
    return sorted(spans, key=lambda span: span.begin)


def _spans_of_send(
    ended: float, sent: SyncEvent, answers: Sequence[tuple[float, SyncEvent]]
) -> Iterator[Span]:
    model, version, seconds = sent.model_id or "", sent.version, sent.seconds
    at = ended - seconds.get("total", 0.0)
    for phase, name in (("extract", "extract"), ("copy", "stage")):
        yield Span(model, version, None, phase, at, seconds.get(name, 0.0))
        at += seconds.get(name, 0.0)
    for answered, event in answers:
        theirs = {phase: event.seconds.get(phase, 0.0) for phase in ("stage", "wait", "commit")}
        begun = answered - sum(theirs.values())
        if begun > at:  # else the copy and the sending overlap
            yield Span(model, version, event.worker, "wire", at, begun - at)
        for phase, spent in theirs.items():
            yield Span(model, version, event.worker, phase, begun, spent)
            begun += spent


def medians(spans: Iterable[Span]) -> dict[tuple[str, int | None], dict[str, tuple[float, float]]]:
    """Return (model, worker) -> phase -> the median and the maximum of its durations in seconds."""
    durations: dict[tuple[str, int | None], dict[str, list[float]]] = {}
    for span in spans:
        durations.setdefault((span.model, span.worker), {}).setdefault(span.phase, []).append(span.seconds)
    ordered = sorted(durations, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    return {
        key: {phase: (statistics.median(all_), max(all_)) for phase, all_ in durations[key].items()}
        for key in ordered
    }


def to_chrome_trace(spans: Sequence[Span]) -> bytes:
    """Return the spans as JSON in the Trace Event Format, which Perfetto and chrome://tracing show."""
    models = sorted({span.model for span in spans})
    first = min((span.begin for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for pid, model in enumerate(models):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": model or "model"}})
        workers = {span.worker for span in spans if span.model == model}
        events += [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": _row(worker),
                "args": {"name": _name(worker)},
            }
            for worker in workers
        ]
    events += [
        {
            "ph": "X",
            "name": span.phase,
            "cat": "aiosync",
            "pid": models.index(span.model),
            "tid": _row(span.worker),
            "ts": (span.begin - first) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"version": span.version},
        }
        for span in spans
    ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def to_png(spans: Sequence[Span], path: str | Path) -> None:
    """Draw the spans: a row for the trainer and one for each worker, time from left to right.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        InvalidArgumentError: there are no spans.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not spans:
        raise InvalidArgumentError("there is no send to draw: record a trainer's scheme, which has sent")
    rows = sorted({(span.model, _row(span.worker)) for span in spans})
    several = len({model for model, _ in rows}) > 1
    first = min(span.begin for span in spans)
    figure = Figure(figsize=(12, 1.6 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for phase, colour in _COLOURS.items():
        for number, row in enumerate(rows):
            bars = [
                ((span.begin - first) * 1e3, span.seconds * 1e3)
                for span in spans
                if span.phase == phase and (span.model, _row(span.worker)) == row
            ]
            axes.broken_barh(bars, (number - 0.4, 0.8), facecolors=colour)
    names = [_name(row - 1 if row else None) for _, row in rows]
    labels = [f"{model}: {name}" if several else name for (model, _), name in zip(rows, names, strict=True)]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    versions = sorted({span.version for span in spans})
    axes.set_title(
        f"Versions {versions[0]} to {versions[-1]}" if len(versions) > 1 else f"Version {versions[0]}"
    )
    handles = [Patch(color=colour, label=phase) for phase, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _row(worker: int | None) -> int:
    return 0 if worker is None else worker + 1


def _name(worker: int | None) -> str:
    return "trainer" if worker is None else f"worker {worker}"
