"""Recorded events, and what is drawn from them."""

from __future__ import annotations

import itertools
import json
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from aiosync import MemoryWeightSyncScheme, SyncEvent, cli, timeline
from aiosync.errors import InvalidArgumentError
from tests.kit.clock import within
from tests.kit.models import Uniform, fill
from tests.kit.tcp import join, make_worker, sender_of

SENT = {"extract": 0.5, "stage": 1.0, "ack": 2.0, "total": 4.0}


def send(version: int, at: float, workers: int = 2, run: str = "a run") -> list[timeline.Recorded]:
    """The events of one send, which begins at this time."""
    theirs = {"stage": 0.25, "wait": 0.5, "commit": 0.25}
    answers = [
        timeline.Recorded(
            at + 3.0 + worker, run, SyncEvent("applied", "policy", version, worker, seconds=theirs)
        )
        for worker in range(workers)
    ]
    sent = SyncEvent("sent", "policy", version, nbytes=8, seconds=SENT)
    return [*answers, timeline.Recorded(at + 4.0, run, sent)]


def test_the_phases_of_a_send_follow_each_other() -> None:
    spans = timeline.spans_of(send(3, 100.0))
    found = [(span.worker, span.phase, span.begin, span.seconds) for span in spans if span.worker != 1]
    assert found == [
        (None, "extract", 100.0, 0.5),
        (None, "copy", 100.5, 1.0),
        (0, "wire", 101.5, 0.5),
        (0, "stage", 102.0, 0.25),
        (0, "wait", 102.25, 0.5),
        (0, "commit", 102.75, 0.25),
    ]
    assert {span.version for span in spans} == {3} and {span.model for span in spans} == {"policy"}


def test_a_worker_that_takes_in_while_the_trainer_copies_has_no_wire() -> None:
    (sent,) = send(0, 0.0, workers=0)
    theirs = {"stage": 1.5, "wait": 0.0, "commit": 0.0}
    early = timeline.Recorded(2.0, "a run", SyncEvent("applied", "policy", 0, 0, seconds=theirs))
    phases = [span.phase for span in timeline.spans_of([early, sent]) if span.worker == 0]
    assert phases == ["stage", "wait", "commit"]


def test_the_last_sends_are_chosen() -> None:
    events = [event for version in range(5) for event in send(version, 10.0 * version)]
    assert {span.version for span in timeline.spans_of(events, last=2)} == {3, 4}
    assert {span.version for span in timeline.spans_of(events, last=9)} == set(range(5))
    table = timeline.medians(timeline.spans_of(events))
    assert list(table) == [("policy", None), ("policy", 0), ("policy", 1)]
    assert table["policy", 1]["wire"] == (1.5, 1.5)


async def test_a_run_is_recorded_and_drawn(tmp_path: Path) -> None:
    model, path = Uniform(0.0), tmp_path / "run.events"
    async with sender_of(model) as scheme, AsyncExitStack() as stack:
        stop = timeline.record(scheme, path)
        workers = [make_worker(scheme.address) for _ in range(2)]
        for worker in workers:
            stack.push_async_callback(worker.close)
        await within(join(scheme, *workers))
        for version in range(1, 4):
            fill(model, float(version))
            await within(scheme.send())
        stop()
        await within(scheme.send())  # is not recorded
    png, trace = tmp_path / "sends.png", tmp_path / "sends.json"
    runner = CliRunner(env={"COLUMNS": "100"})
    shown = runner.invoke(cli.app, ["timeline", str(path), "--png", str(png), "--trace", str(trace)])
    assert shown.exit_code == 0, shown.output
    assert "3 sends" in shown.output and "worker 1" in shown.output and "trainer" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 100
    assert png.read_bytes().startswith(b"\x89PNG")
    bars = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event["ph"] == "X"]
    assert {bar["args"]["version"] for bar in bars} == {1, 2, 3}
    assert {bar["name"] for bar in bars} >= {"extract", "copy", "stage", "wait", "commit"}
    assert all(bar["ts"] >= 0 and bar["dur"] >= 0 for bar in bars)
    # Of one row no phase begins before the one before it has ended.
    for row in {bar["tid"] for bar in bars}:
        ordered = [bar for bar in bars if bar["tid"] == row]
        for before, after in itertools.pairwise(ordered):
            assert after["ts"] >= before["ts"] + before["dur"] - 1.0


def test_one_run_after_another_in_one_file() -> None:
    spans = timeline.spans_of([*send(1, 0.0, run="one"), *send(1, 100.0, run="two")])
    assert len(spans) == 2 * len(timeline.spans_of(send(1, 0.0)))
    assert (
        max(span.seconds for span in spans if span.phase == "wire") == 1.5
    )  # none from one run to the other


def test_lines_that_were_torn_or_are_not_known_are_left_out(tmp_path: Path) -> None:
    lines = [msgspec.json.encode(entry) for entry in send(1, 5.0)]
    path = tmp_path / "run.events"
    path.write_bytes(b"\n".join(lines) + b'\n{"time":1.0,"ev')
    assert timeline.read(path) == send(1, 5.0)
    scheme = MemoryWeightSyncScheme()
    stop = timeline.record(scheme, path)  # begins a line of its own
    scheme._events.emit("sent", "policy", 7, seconds=SENT)
    scheme._events.emit("committed", "policy", 7, 0, role="receiver")  # is not recorded
    stop()
    found = timeline.read(path)
    assert found[:-1] == send(1, 5.0) and found[-1].event.version == 7
    with path.open("ab") as file:
        file.write(lines[0].replace(b'"applied"', b'"reborn"') + b"\n" + lines[1] + b"\n")
    assert timeline.read(path) == [*found, send(1, 5.0)[1]]


def test_a_file_is_not_larger_than_wanted(tmp_path: Path) -> None:
    path, scheme = tmp_path / "run.events", MemoryWeightSyncScheme()
    stop = timeline.record(scheme, path, max_bytes=1000)
    for version in range(40):
        scheme._events.emit("sent", "policy", version, seconds=SENT)
    stop()
    older = Path(f"{path}.1")
    assert path.stat().st_size < 1300 and 1000 <= older.stat().st_size < 1300
    versions = [entry.event.version for part in (older, path) for entry in timeline.read(part)]
    assert versions == list(range(versions[0], 40))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_a_full_disk_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, scheme = tmp_path / "full", MemoryWeightSyncScheme()
    path.symlink_to("/dev/full")
    stop = timeline.record(scheme, path)
    for version in range(3):
        scheme._events.emit("sent", "policy", version)
    stop()
    assert caplog.text.count("events are no longer recorded") == 1


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("one\ntwo\n")
    with pytest.raises(
        InvalidArgumentError, match=r"line 1: .*expected events that aiosync\.timeline\.record"
    ):
        timeline.read(path)
    shown = CliRunner().invoke(cli.app, ["timeline", str(path)])
    assert shown.exit_code == 1 and "line 1: " in shown.output
    path.write_text("")
    empty = CliRunner().invoke(cli.app, ["timeline", str(path)])
    assert empty.exit_code == 1 and "has no sends" in empty.output
    missing = CliRunner().invoke(cli.app, ["timeline", str(tmp_path / "none")])
    assert missing.exit_code == 1 and "No such file" in missing.output


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no send to draw"):
        timeline.to_png([], tmp_path / "x.png")
