"""The twins count as torchrl's schemes, in either order of import, and aiosync.compat.torchrl names them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torchrl")

CHECK = (
    "from torchrl.weight_update import WeightSyncScheme, SharedMemWeightSyncScheme\n"
    "assert isinstance(sync.SharedMemWeightSyncScheme(), SharedMemWeightSyncScheme)\n"
    "assert isinstance(sync.TCPWeightSyncScheme(), WeightSyncScheme)\n"
    "assert type(WeightSyncScheme.from_backend('aiosync.shared')) is sync.SharedMemWeightSyncScheme\n"
    "assert type(WeightSyncScheme.from_backend('aiosync.thread')) is sync.SharedMemWeightSyncScheme\n"
    "assert WeightSyncScheme.from_backend('aiosync.process', timeout=3).timeout == 3\n"
    "assert not any('aiosync' in type(finder).__module__ for finder in sys.meta_path)\n"
    "assert 'aiosync' not in type(sys.modules['torchrl.weight_update'].__spec__.loader).__module__\n"
)

MADE_BEFORE = (
    "import copy, pickle, sys\n"
    "from aiosync import sync\n"
    "twin = sync.SharedMemWeightSyncScheme()\n"
    "made = [twin, copy.copy(twin), pickle.loads(pickle.dumps(twin))]\n"
    "assert {each.__class__ for each in made} == {sync.SharedMemWeightSyncScheme}\n"
    "assert 'torchrl' not in sys.modules\n"
    "from torchrl.weight_update import SharedMemWeightSyncScheme\n"
    "assert [isinstance(each, SharedMemWeightSyncScheme) for each in made] == [True] * 3\n"
)

BY_NAME = (
    "import sys\n"
    "import aiosync.compat.torchrl\n"
    "from aiosync import sync\n"
    "from torchrl.weight_update import WeightSyncScheme\n"
    "assert type(WeightSyncScheme.from_backend('aiosync.shared')) is sync.SharedMemWeightSyncScheme\n"
    "assert issubclass(sync.TCPWeightSyncScheme, WeightSyncScheme)\n"
)

NOTHING_REGISTERED = (
    "import torchrl.collectors\n"
    "from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes\n"
    "before = dict(weight_sync_schemes._WEIGHT_SYNC_SCHEMES)\n"
    "from aiosync import sync\n"
    "assert weight_sync_schemes._WEIGHT_SYNC_SCHEMES == before\n"
    "assert not issubclass(sync.SharedMemWeightSyncScheme, WeightSyncScheme)\n"
)


def _runs(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "script",
    [
        "import sys\nfrom aiosync import sync\nassert 'torchrl' not in sys.modules\n" + CHECK,
        "import sys, torchrl.weight_update\nfrom aiosync import sync\n" + CHECK,
        "import sys\nfrom aiosync import sync\nimport torchrl.collectors\n" + CHECK,
    ],
    ids=["aiosync first", "torchrl first", "all of torchrl"],
)
def test_in_either_order(script: str) -> None:
    _runs(script)


def test_twins_that_were_made_before_torchrl_was_imported() -> None:
    _runs(MADE_BEFORE)


def test_the_compat_module_makes_torchrl_know_the_twins_by_name() -> None:
    _runs(BY_NAME)


def test_importing_the_twins_registers_nothing_with_torchrl() -> None:
    _runs(NOTHING_REGISTERED)


def test_without_torchrl() -> None:
    script = (
        "import sys\nsys.modules['torchrl'] = None\nfrom aiosync import sync\n"
        "try:\n    import torchrl.weight_update\nexcept ImportError as exc:\n    print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torchrl" in done.stdout
