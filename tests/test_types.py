"""What type checkers say of programs that use the package."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from aiosync.collectors import (
    BatchConfig,
    DeviceConfig,
    PolicyConfig,
    ProcessConfig,
    ReplayConfig,
    WeightConfig,
    options,
)

ROOT = Path(__file__).resolve().parents[1]

RIGHT = """
from typing import assert_type

from tensordict import TensorDictBase
from torch import Tensor, nn

import aiosync
import aiosync.sync
from aiosync.collectors import Collector, MultiCollector


def make_env() -> object: ...


async def trainer() -> None:
    scheme = aiosync.TCPWeightSyncScheme("tcp://0.0.0.0:1", token="t", timeout=3, first_version=2)
    report = await scheme.send(nn.Linear(2, 2), wait=False)
    assert_type(report.version, int)
    assert_type(await scheme.receive(), TensorDictBase | dict[str, Tensor] | None)
    async with MultiCollector([make_env], frames_per_batch=3, device="cpu", launcher="ray") as collector:
        async for batch in collector:
            assert_type(batch, TensorDictBase)
        assert_type(await collector.next(), TensorDictBase | None)
    aiosync.DistributedWeightSyncScheme("gloo", True, 3.0, cast=None, per_worker_weights=True)
    aiosync.RayModuleTransformScheme("state_dict", max_slots=4, share_memory=False, timeout=1)
    aiosync.MultiProcessWeightSyncScheme("state_dict", False, commit="copy")


def blocking() -> None:
    with aiosync.sync.SharedMemWeightSyncScheme(timeout=3, peft="adapter") as scheme:
        assert_type(scheme.version, int)
    Collector(make_env, total_frames=10)
"""

WRONG = {
    'TCPWeightSyncScheme(timeot=3)': "from aiosync import TCPWeightSyncScheme",
    'SharedMemWeightSyncScheme(timeout="3")': "from aiosync import SharedMemWeightSyncScheme",
    'DistributedWeightSyncScheme(commit="flop")': "from aiosync import DistributedWeightSyncScheme",
    'RPCWeightSyncScheme(max_slot=3)': "from aiosync import RPCWeightSyncScheme",
    'RayWeightSyncScheme(token="t")': "from aiosync import RayWeightSyncScheme",
    'RayModuleTransformScheme(cst=None)': "from aiosync import RayModuleTransformScheme",
    'MultiProcessWeightSyncScheme(first_version=1.5)': "from aiosync import MultiProcessWeightSyncScheme",
    'MultiCollector([], frame_per_batch=3)': "from aiosync.collectors import MultiCollector",
    'MultiCollector([], on_stale="keep")': "from aiosync.collectors import MultiCollector",
    'Collector(print, num_thread=3)': "from aiosync.collectors import Collector",
    'SharedMemWeightSyncScheme(tiemout=1)': "from aiosync.sync import SharedMemWeightSyncScheme",
    'MultiCollector([], total_frame=3)': "from aiosync.sync.collectors import MultiCollector",
    'aiosync.SharedMemScheme': "import aiosync",
}  # fmt: skip
"""A mistake -> the import that it needs."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the right program, and with one for each mistake."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "right.py").write_text(RIGHT, encoding="utf-8")
    for number, (mistake, imports) in enumerate(WRONG.items()):
        (folder / f"wrong{number}.py").write_text(f"{imports}\n\n{mistake}\n", encoding="utf-8")
    return folder


def _check(mistaken: set[str]) -> None:
    assert mistaken == {f"wrong{number}.py" for number in range(len(WRONG))}


def test_mypy_finds_the_mistakes_and_nothing_else(programs: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--output=json", f"--config-file={ROOT}/pyproject.toml",
         *map(str, sorted(programs.glob("*.py")))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert found.returncode in (0, 1), found.stderr
    lines = map(json.loads, found.stdout.splitlines())
    _check({Path(line["file"]).name for line in lines if line["severity"] == "error"})


def test_pyright_finds_the_mistakes_and_nothing_else(programs: Path) -> None:
    pytest.importorskip("basedpyright")
    (programs / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}), encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error",
         "--pythonpath", sys.executable, "-p", str(programs)],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode in (0, 1), found.stdout + found.stderr
    errors = [each for each in json.loads(found.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    _check({Path(each["file"]).name for each in errors})


@pytest.mark.parametrize(
    ("config", "typed"),
    [
        (BatchConfig, options.BatchOptions),
        (PolicyConfig, options.PolicyOptions),
        (DeviceConfig, options.DeviceOptions),
        (ProcessConfig, options.ProcessOptions),
        (WeightConfig, options.WeightOptions),
        (ReplayConfig, options.ReplayOptions),
    ],
)
def test_the_keywords_of_collectors_are_those_of_their_configuration(config: type, typed: type) -> None:
    names = {each.name for each in dataclasses.fields(config)}
    hints = typing.get_type_hints(config)
    assert typing.get_type_hints(typed) == {name: hints[name] for name in names}
    assert typing.get_type_hints(options.CollectorOptions).keys() >= names
