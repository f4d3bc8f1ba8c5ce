"""Runs a folder of torchrl's tests twice, as they are and with the twins in the place of torchrl's schemes:

    python tools/torchrl_suite.py FOLDER [arguments of pytest]

Whatever passes as it is has to pass with the twins too: exit status 1 and the names of those that do not.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_OUTCOMES = "AIOSYNC_SUITE_OUTCOMES"
_SWAP = "AIOSYNC_SUITE_SWAP"


# -- in pytest: this module is a plugin of it ----------------------------------------------------------


def pytest_configure() -> None:
    """Put the twins in, before any test module is imported."""
    if os.environ.get(_SWAP):
        for name in ("torchrl.collectors", "torchrl.collectors.distributed", "aiosync.compat.torchrl"):
            importlib.import_module(name)
        for module in [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "torchrl"]:
            swap(module)


def swap(module: ModuleType) -> None:
    """Have a module's names of schemes mean the twins; its base class counts them as its own."""
    twins: Any = importlib.import_module("aiosync.sync")
    for name in twins.__all__:
        if name.endswith("Scheme") and name != "WeightSyncScheme" and name in vars(module):
            setattr(module, name, getattr(twins, name))


def pytest_runtest_logreport(report: Any) -> None:
    """Note how each test ended: the worst of its phases."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ[_OUTCOMES]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


# -- from the command line ------------------------------------------------------------------------------


def outcomes(arguments: list[str], *, twins: bool) -> dict[str, str]:
    """Run pytest; test -> ``passed``, ``failed`` or ``skipped``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        file.touch()
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, _OUTCOMES: str(file), "PYTHONPATH": path}
        if twins:
            environment[_SWAP] = "1"
        options = ["-p", Path(__file__).stem, "-o", "addopts=", "-o", "filterwarnings=ignore"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        subprocess.run(command, check=False, env=environment)
        found: dict[str, str] = {}
        for line in file.read_text().splitlines():
            name, outcome = json.loads(line)
            if found.get(name) != "failed":
                found[name] = outcome
        return found


def main(arguments: list[str]) -> int:
    """Compare the two."""
    if not arguments or arguments[0].startswith("-") or not Path(arguments[0].split("::")[0]).exists():
        print(
            "expected a folder or a file of tests: python tools/torchrl_suite.py FOLDER [-k EXPRESSION ...]"
        )
        return 2
    before, after = outcomes(arguments, twins=False), outcomes(arguments, twins=True)
    passing = [name for name, outcome in before.items() if outcome == "passed"]
    lost = [name for name in passing if after.get(name) != "passed"]
    gained = [name for name, outcome in after.items() if outcome == "passed" and name not in passing]
    kept = len(passing) - len(lost)
    print(f"{len(before)} tests; {len(passing)} pass as they are, {kept} of these with the twins")
    for title, names in (("only without the twins:", lost), ("only with them:", gained)):
        if names:
            print(title, *names, sep="\n  ")
    if not passing:
        print("nothing passed as it is: there is nothing to compare")
    return 1 if lost or not passing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
