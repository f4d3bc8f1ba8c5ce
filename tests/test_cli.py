"""The command line: what it prints, what it returns, and how it ends."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from typer.testing import CliRunner

import aiosync
from aiosync import TCPWeightSyncScheme, _doctor, cli
from aiosync._demo import LoopTicker
from aiosync._extras import how_to_install
from aiosync.errors import SyncTimeoutError
from benchmarks.cli import CASES
from tests.kit.clock import PATIENCE, PROGRAM, within
from tests.kit.models import Uniform
from tests.kit.tcp import break_off, make_worker

DEMO = [sys.executable, "-m", "aiosync.cli", "demo"]

runner = CliRunner()


def test_help_lists_the_commands() -> None:
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "bench", "doctor"))


def test_help_of_the_demo() -> None:
    result = runner.invoke(cli.app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "demo [OPTIONS]" in result.output
    assert all(option in result.output for option in ("--scheme", "--seed", "--updates", "--out"))


def test_a_wrong_scheme_is_named_with_the_right_ones() -> None:
    result = runner.invoke(cli.app, ["demo", "--scheme", "pigeon"])
    assert result.exit_code == 2
    assert all(word in result.output for word in ("pigeon", "shared", "process"))


def test_the_options_of_the_demo_are_those_of_the_example() -> None:
    example = cli._load(cli._bundled("examples"), "async_cartpole")

    def options(function: Any) -> list[Any]:
        found = inspect.signature(function, eval_str=True).parameters.values()
        return [
            (p.name, p.default, get_args(p.annotation)[0], vars(p.annotation.__metadata__[0])) for p in found
        ]

    assert options(cli.demo) == options(example.main)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("demo", "gymnasium", "rl"),
        ("demo", "matplotlib.figure", "cli"),
        (
            "relay --upstream tcp://127.0.0.1:9 --listen tcp://127.0.0.1:0 --metrics-port 0 --insecure",
            "prometheus_client",
            "metrics",
        ),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(
    command: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "async_cartpole", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.app(command.split(), standalone_mode=False)
    message = str(caught.value.code)
    assert f"aiosync {command.split()[0]} needs {module}" in message
    assert how_to_install(extra) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, "'aiosync[ray]'"),
        ({"url": "file:///home/me/my%20code/aiosync", "dir_info": {}}, "'/home/me/my code/aiosync[ray]'"),
        ({"url": "file:///code", "dir_info": {"editable": True}}, "-e '/code[ray]'"),
        ({"url": "https://host/aiosync.whl"}, "'aiosync[ray] @ https://host/aiosync.whl'"),
    ],
)
def test_an_extra_is_installed_from_where_aiosync_came(
    record: dict[str, object] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if record is None else json.dumps(record)

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Distribution())
    assert how_to_install("ray") == f"python -m pip install {expected}"


HELP = [f"bench {case} --help" for case in CASES]
WRONG = (
    "--versin",
    "relya",
    "relay --upstrem x",
    "demo --updatez 3",
    "demo --workers 0",
    "bench sned",
    *(f"bench {case} --modle tiny" for case in CASES),
    "bench send --models tinny",
    "doctor --jsn",
    "relay --upstream x",
)


@pytest.mark.parametrize("arguments", ["--version", "--help", "demo --help", "bench --help", *HELP, *WRONG])
def test_the_command_line_answers_before_torch_is_imported(arguments: str) -> None:
    code = (
        "import sys\nfrom aiosync.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    code = end.code\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=PROGRAM,
        check=False,
    )
    assert ended.returncode == (2 if arguments in WRONG else 0), ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_package_is_a_program_with_a_version() -> None:
    command = [sys.executable, "-m", "aiosync", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM, check=True)
    assert ended.stdout == f"aiosync {aiosync.__version__}\n"
    assert aiosync.__version__ == importlib.metadata.version("aiosync")


def test_doctor_sends_a_real_update() -> None:
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "tensordict", "start methods", "memfd", "open files", "CUDA"):
        assert word in result.output
    assert "OK: connected" in result.output


def test_doctor_names_the_extras_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def check() -> dict[str, float]:
        return {"connect": 0.1, "send": 0.1}

    monkeypatch.setattr(_doctor, "self_check", check)
    monkeypatch.setattr(_doctor, "_extras", lambda: [("extra ray", how_to_install("ray"))])
    assert _doctor.examine()
    assert "[ray]" in capsys.readouterr().out


def test_doctor_prints_json() -> None:
    result = runner.invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["self_check"]["ok"] and found["self_check"]["send_seconds"] > 0
    assert found["findings"]["extra rl"] == "installed"
    assert {"torch", "open files", "loopback", "TLS", "/dev/shm"} <= found["findings"].keys()


def test_doctor_fails_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_late() -> dict[str, float]:
        raise SyncTimeoutError("connect", seconds=60, workers=[0])

    monkeypatch.setattr(_doctor, "self_check", too_late)
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "connect not finished by worker 0" in result.output
    result = runner.invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == 1
    check = json.loads(result.output)["self_check"]
    assert not check["ok"] and "connect not finished by worker 0" in check["error"]


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


@asynccontextmanager
async def _relay_process(tmp_path: Path, *options: str) -> AsyncIterator[tuple[Any, Any, str]]:
    """A trainer and `aiosync relay` below it: the trainer's scheme, the process, and what it has printed."""
    token = "a token of the tests"
    trainer = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=token, timeout=PATIENCE)
    trainer.init_on_sender(model_id="policy", model=Uniform(1.0))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(trainer.aclose)
        connecting = asyncio.create_task(trainer.connect(min_workers=1))
        await asyncio.sleep(0)
        command = ["relay", "--upstream", trainer.address, "--listen", f"unix://{tmp_path}/relay.sock"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aiosync", *command, "--model-id", "policy", *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "AIOSYNC_TOKEN": token, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

        def kill() -> None:
            with suppress(ProcessLookupError):
                process.kill()

        stack.callback(kill)
        assert process.stdout is not None
        seen = ""
        while "workers may connect to" not in seen:
            line = await within(process.stdout.readline(), PROGRAM)
            assert line, seen
            seen += line.decode()
        await within(connecting)
        yield trainer, process, seen


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM handlers")
async def test_a_relay_serves_metrics_and_ends_cleanly_at_sigterm(tmp_path: Path) -> None:
    async with _relay_process(tmp_path, "--metrics-port", "0") as (trainer, process, seen):
        worker = make_worker(f"unix://{tmp_path}/relay.sock")
        try:
            await within(worker.connect())
            await worker.serve()
            await within(trainer.send())
            address = next(line for line in seen.splitlines() if line.startswith("metrics: ")).split()[1]
            served = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=PATIENCE).read())
            for role in (b"receiver", b"sender"):
                assert b'aiosync_version{model="policy",role="%b",worker="0"} 1.0' % role in served
            process.send_signal(signal.SIGTERM)
            after = (await within(process.stdout.read(), PROGRAM)).decode()
            assert await process.wait() == 0, seen + after
            assert "the end, at version 1: SIGTERM" in after
            assert not (tmp_path / "relay.sock").exists()
        finally:
            await worker.close()


@pytest.mark.parametrize("lost", [True, False])
async def test_a_relay_exits_with_an_error_if_the_trainer_did_not_close(tmp_path: Path, lost: bool) -> None:
    async with _relay_process(tmp_path, "--reconnect-for", "0") as (trainer, process, _):
        if lost:
            break_off(trainer)
        else:
            await within(trainer.aclose())
        after = (await within(process.stdout.read(), PROGRAM)).decode()
        assert await process.wait() == int(lost), after
        assert "the end, at version 0" in after


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
