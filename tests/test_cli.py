"""The command line: what it prints, what it returns, and how it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from aiosync import _doctor, cli
from aiosync._demo import LoopTicker
from aiosync.errors import SyncTimeoutError
from tests.kit.clock import PROGRAM

DEMO = [sys.executable, "-m", "aiosync.cli", "demo"]

runner = CliRunner()


def test_help_lists_the_commands() -> None:
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "bench", "doctor"))


def test_help_of_the_demo_is_the_examples_own() -> None:
    result = runner.invoke(cli.app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "aiosync demo" in result.output
    assert all(option in result.output for option in ("--scheme", "--seed", "--updates", "--out"))


def test_a_wrong_scheme_is_named_with_the_right_ones() -> None:
    result = runner.invoke(cli.app, ["demo", "--scheme", "pigeon"])
    assert result.exit_code == 2
    assert all(word in result.output for word in ("pigeon", "shared", "process"))


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("demo", "gymnasium", "rl"),
        ("demo", "matplotlib.figure", "cli"),
        ("doctor", "rich.console", "cli"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(
    command: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for loaded in ("async_cartpole", "aiosync._doctor"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.app([command], standalone_mode=False)
    message = str(caught.value.code)
    assert f"aiosync {command} needs {module}" in message
    assert f"pip install 'aiosync[{extra}]'" in message
    assert "\n" not in message


def test_without_typer_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    spec = importlib.util.spec_from_file_location("cli_without_typer", str(cli.__file__))
    assert spec is not None and spec.loader is not None
    with pytest.raises(SystemExit, match=r"pip install 'aiosync\[cli\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_doctor_sends_a_real_update() -> None:
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "tensordict", "start methods", "memfd", "open files", "CUDA"):
        assert word in result.output
    assert "OK: connected" in result.output


def test_doctor_fails_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_late() -> dict[str, float]:
        raise SyncTimeoutError("connect", seconds=60, workers=[0])

    monkeypatch.setattr(_doctor, "self_check", too_late)
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "connect not finished by worker 0" in result.output


@pytest.mark.parametrize("scheme", ["shared", "process", "distributed", "rpc", "ray"])
def test_demo_ends_with_a_table_and_a_picture(scheme: str, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    ended = subprocess.run(
        [*DEMO, "--scheme", scheme, "--updates", "3", "--out", str(picture)],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # torch RPC itself notes that processes have ended.
    assert [line for line in ended.stderr.splitlines() if "tensorpipe_agent.cpp" not in line] == []
    for row in ("updates", "send, p50", "send, p99", "lag, mean", "event loop stall"):
        assert row in ended.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Processes started inside heed Ctrl-C; a shell starts its background jobs so that they do not,
    and what they start inherits that."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C of a process group is a POSIX thing")
@pytest.mark.usefixtures("heeded_interrupts")
def test_ctrl_c_ends_the_demo_cleanly(tmp_path: Path) -> None:
    command = [*DEMO, "--updates", "100000", "--minutes", "60", "--out", str(tmp_path / "x.png")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        before = next(line for line in process.stdout if "workers connected" in line)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        # As a terminal does: to the trainer and to its workers at once.
        os.killpg(process.pid, signal.SIGINT)
        after, _ = process.communicate(timeout=PROGRAM)
    assert process.returncode == 130, before + after
    assert "Stopped by Ctrl-C" in after
    assert "Traceback" not in after
    _, alive = psutil.wait_procs(workers, timeout=PROGRAM)
    assert not alive


async def test_the_ticker_sees_a_stalled_loop() -> None:
    stalled = asyncio.Event()

    def stall() -> None:
        end = loop.time() + 0.1
        while loop.time() < end:
            pass
        loop.call_later(0.05, stalled.set)

    loop = asyncio.get_running_loop()
    with LoopTicker(0.005) as ticker:
        loop.call_later(0.02, stall)
        await stalled.wait()
    assert max(ticker.late) >= 0.08
