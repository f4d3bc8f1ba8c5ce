"""What each send spent its time on, per worker: events are recorded in a file, and drawn from it.

::

    from aiosync import timeline

    stop = timeline.record(scheme, "run.events")  # on the trainer

``aiosync timeline run.events`` prints a table of the durations. It can also draw a picture (extra
``aiosync[cli]``), and write a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from aiosync.errors import InvalidArgumentError
from aiosync.events import SyncEvent, logger
from aiosync.schemes.base import WeightSyncScheme

__all__ = ["PHASES", "Recorded", "Span", "read", "record", "spans_of", "to_chrome_trace", "to_png"]

PHASES = ("extract", "copy", "wire", "stage", "wait", "commit")
"""The phases of a send. The trainer reads the weights (``extract``) and copies them (``copy``). Then for each
worker: until it has begun to take the bytes in (``wire``), they are taken in (``stage``), readers of the old
weights end (``wait``), the new weights are put in service (``commit``)."""

_COLOURS = dict(zip(PHASES, ("#7f7f7f", "#1f77b4", "#17becf", "#2ca02c", "#ff7f0e", "#d62728"), strict=True))
_ANSWERS = ("applied", "joined")


class Recorded(msgspec.Struct, frozen=True):
    """An event in a file: one line of it.

    Attributes:
        time: in seconds since the epoch.
        run: the same for all events of one call of :func:`record`.
        event: the event.
    """

    time: float
    run: str
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


def record(scheme: WeightSyncScheme, path: str | Path, *, max_bytes: int = 32 << 20) -> Callable[[], None]:
    """Append a sender's events to a file, one JSON object per line.

    If the file cannot be written any more (the disk is full, say), the recording ends with an error in the
    log. No update fails for that.

    Args:
        scheme: the trainer's scheme. Several schemes, and one run after another, may use one file.
        path: the file. A line has about 230 bytes; each send adds one, and one per worker.
        max_bytes: when the file is this large, it gets the suffix ``.1`` in place of an older one, and a new
            file is begun.

    Returns:
        A function that ends the recording and closes the file.

    Raises:
        OSError: the file cannot be opened.
    """
    recorder = _Recorder(Path(path), max_bytes)
    remove = scheme.on_event(recorder.write)

    def stop() -> None:
        remove()
        recorder.close()

    return stop


class _Recorder:
    """Writes events to a file, without a buffer: a forked child is not to write them again."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._run = secrets.token_hex(8)
        self._encode = msgspec.json.Encoder().encode
        self._file: BinaryIO | None = self._open()

    def _open(self) -> BinaryIO:
        file = self._path.open("ab", buffering=0)
        if file.tell():
            with self._path.open("rb") as before:
                before.seek(-1, os.SEEK_END)
                if before.read() != b"\n":  # a process was killed while it wrote
                    file.write(b"\n")
        return file

    def write(self, event: SyncEvent) -> None:
        """Append an event of a sender."""
        if self._file is None or event.role != "sender":
            return
        try:
            self._file.write(self._encode(Recorded(time.time(), self._run, event)) + b"\n")
            if self._file.tell() >= self._max_bytes:
                self._file.close()
                os.replace(self._path, f"{self._path}.1")
                self._file = self._open()
        except OSError as exc:
            logger.error("events are no longer recorded in %s: %s", self._path, exc)
            self.close()

    def close(self) -> None:
        """Write nothing more."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def read(path: str | Path) -> list[Recorded]:
    """Return the events of a file of :func:`record`. Lines that cannot be read are left out: the trainer may
    have been killed while it wrote one, or know events that this release does not.

    Raises:
        OSError: the file cannot be read.
        InvalidArgumentError: it is no such file.
    """
    decode = msgspec.json.Decoder(Recorded).decode
    found, first = [], ""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found.append(decode(line))
            except msgspec.DecodeError as exc:
                first = first or f"line {number}: {exc}"
    if first and not found:
        raise InvalidArgumentError(
            f"{path}, {first}: expected events that aiosync.timeline.record() has written"
        )
    return found


def spans_of(events: Iterable[Recorded], *, last: int | None = None) -> list[Span]:
    """Return the phases of the sends, in order of time. ``last``: of that many sends only."""
    sent: list[Recorded] = []
    answers: dict[tuple[str, str | None, int], list[Recorded]] = {}
    for entry in events:
        event = entry.event
        if event.kind == "sent":
            sent.append(entry)
        elif event.kind in _ANSWERS and event.worker is not None:
            answers.setdefault((entry.run, event.model_id, event.version), []).append(entry)
    chosen = sent if last is None else sent[max(0, len(sent) - last) :]
    spans = [
        span
        for entry in chosen
        for span in _spans_of_send(
            entry, answers.get((entry.run, entry.event.model_id, entry.event.version), ())
        )
    ]
    return sorted(spans, key=lambda span: span.begin)


def _spans_of_send(sent: Recorded, answers: Sequence[Recorded]) -> Iterator[Span]:
    model, version, seconds = sent.event.model_id or "", sent.event.version, sent.event.seconds
    at = sent.time - seconds.get("total", 0.0)
    for phase, name in (("extract", "extract"), ("copy", "stage")):
        yield Span(model, version, None, phase, at, seconds.get(name, 0.0))
        at += seconds.get(name, 0.0)
    for answer in answers:
        worker = answer.event.worker
        theirs = {phase: answer.event.seconds.get(phase, 0.0) for phase in ("stage", "wait", "commit")}
        begun = answer.time - sum(theirs.values())
        if begun > at:  # else the copy and the sending overlap
            yield Span(model, version, worker, "wire", at, begun - at)
        for phase, spent in theirs.items():
            yield Span(model, version, worker, phase, begun, spent)
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
