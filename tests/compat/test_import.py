"""The twins count as torchrl's schemes, whoever is imported first."""

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
    "assert not any(getattr(finder, '_name', None) == 'torchrl.weight_update' for finder in sys.meta_path)\n"
    "assert 'aiosync' not in type(sys.modules['torchrl.weight_update'].__spec__.loader).__module__\n"
)


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
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


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
