"""Runs torchrl's own tests twice: as they are, and with aiosync's blocking twins for torchrl's schemes.

torchrl's tests are not in its package: check out https://github.com/pytorch/rl at the installed version.
In the second run every process has the twins, workers and Ray's actors too. torchrl_swap.py says which names
mean them.

A test that passes as it is has to pass with the twins. Two kinds of tests are reported apart and are not
lost: those that require workers to see weights that were not sent (the list below), and those that themselves
read a private attribute of a scheme.

If a test ends the process, as pytest-timeout does, the others are run in a new one.

exit status: 0 nothing is lost, 1 a test is lost, 2 nothing could be compared
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torchrl_swap  # type: ignore[import-not-found] # beside this file

if TYPE_CHECKING:
    from collections.abc import Generator

_OUTCOMES = "AIOSYNC_SUITE_OUTCOMES"
_SWAP = "AIOSYNC_SUITE_SWAP"

NOT_SENT = {
    "TestCollectorGeneric::test_update_weights": (
        "on the CPU, workers' state_dict() must have what was written into the policy, before any update"
    ),
    "TestSharedMemWeightSyncScheme::test_sharedmem_flow": (
        "writes into the scheme's shared buffer, and a worker's model must have that without send()"
    ),
}
"""Tests that require workers to see weights that were not sent. aiosync guarantees that they do not (G3)."""


# -- in pytest: this module is a plugin of it ----------------------------------------------------------


def pytest_configure() -> None:
    """Put the twins in, if sitecustomize has not: a program may run Python without it."""
    if os.environ.get(_SWAP):
        torchrl_swap.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier process of this run has done."""
    done = {json.loads(line)[0] for line in Path(os.environ[_OUTCOMES]).read_text().splitlines()}
    if done:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note that a test begins: one that ends the process has no report."""
    _note(item.nodeid, "begun", "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note how each phase of a test ended."""
    report = yield
    if call.when == "call" or report.outcome != "passed":
        error = call.excinfo.value if call.excinfo is not None else None
        private = _private_attribute(error)
        outcome = "private" if report.outcome == "failed" and private else report.outcome
        _note(item.nodeid, outcome, private or _one_line(error))
    return report


def _note(test: str, outcome: str, detail: str) -> None:
    with Path(os.environ[_OUTCOMES]).open("a") as file:
        file.write(json.dumps([test, outcome, detail]) + "\n")


def _private_attribute(error: BaseException | None) -> str | None:
    """The private attribute of a twin that the test itself, not torchrl, asked for; None: it did not."""
    if not isinstance(error, AttributeError) or error.__traceback__ is None:
        return None
    name, owner = error.name, error.obj
    kind = owner if isinstance(owner, type) else type(owner)
    if (
        not name
        or not name.startswith("_")
        or name.startswith("__")
        or not kind.__module__.startswith("aiosync.")
    ):
        return None
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    asking = str(traceback.tb_frame.f_globals.get("__name__"))
    return None if asking.split(".")[0] in ("torchrl", "aiosync") else f"{kind.__name__}.{name}"


def _one_line(error: BaseException | None) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()) if error is not None else ""
    return text if len(text) <= 160 else text[:157] + "..."


# -- from the command line ------------------------------------------------------------------------------


class Run:
    """One run of the tests."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        """pytest's exit statuses, one for each process; negative: the signal that ended it."""
        self.outcomes: dict[str, tuple[str, str]] = {}
        """test -> its outcome (passed, failed, private, skipped; begun: it did not end), and a detail."""

    def read(self, noted: Path) -> int:
        """Read what the plugin has noted; returns the number of tests that did not end."""
        self.outcomes.clear()
        for line in noted.read_text().splitlines():
            self.note(*json.loads(line))
        return sum(outcome == "begun" for outcome, _ in self.outcomes.values())

    def note(self, test: str, outcome: str, detail: str) -> None:
        """Add a phase of a test. The worst phase counts; a test that is run again begins anew."""
        known = self.outcomes.get(test, ("begun", ""))[0]
        if outcome == "begun" or known not in ("failed", "private"):
            self.outcomes[test] = (outcome, detail)

    def of(self, test: str) -> tuple[str, str]:
        """The outcome of a test and its detail."""
        return self.outcomes.get(test, ("absent", "did not run"))

    def passing(self) -> list[str]:
        """The tests that passed."""
        return [test for test, (outcome, _) in self.outcomes.items() if outcome == "passed"]


def run(arguments: list[str], *, twins: bool) -> Run:
    """Run pytest with these arguments, in as many processes as it takes until no test ends one."""
    print(f"\n== {'with the twins' if twins else 'as they are'} ==", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "outcomes"
        noted.touch()
        path = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, _OUTCOMES: str(noted)}
        if twins:
            environment[_SWAP] = "1"
            # Every Python process that inherits the environment runs this at its start.
            (Path(folder) / "sitecustomize.py").write_text("import torchrl_swap\n\ntorchrl_swap.install()\n")
            path.insert(0, folder)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        options = ["-p", Path(__file__).stem, "-o", "addopts=", "-o", "filterwarnings=ignore"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        done, unended = Run(), -1
        while (now := done.read(noted)) > unended:
            unended = now
            done.statuses.append(subprocess.run(command, check=False, env=environment).returncode)
        return done


def listed(test: str) -> str | None:
    """The reason why this test requires weights that were not sent; None: it is not known to."""
    name = test.partition("[")[0]
    return next((reason for known, reason in NOT_SENT.items() if name.endswith(f"::{known}")), None)


def compare(before: Run, after: Run) -> int:
    """Print what the twins change; returns the exit status."""
    passing = before.passing()
    unlike = [test for test in passing if after.of(test)[0] != "passed"]
    not_sent = {test: reason for test in unlike if (reason := listed(test))}
    rest = {test: after.of(test) for test in unlike if test not in not_sent}
    private = {test: detail for test, (outcome, detail) in rest.items() if outcome == "private"}
    lost = {
        test: "did not end" if outcome == "begun" else f"{outcome}: {detail}"
        for test, (outcome, detail) in rest.items()
        if test not in private
    }
    gained = {
        test: before.outcomes[test][1]
        for test in after.passing()
        if before.of(test)[0] in ("failed", "begun")
    }
    kept = len(passing) - len(unlike)
    print(f"\n{len(before.outcomes)} tests; {len(passing)} pass as they are, {kept} of these with the twins")
    _print("these assert that workers see weights that were not sent; aiosync does not do that:", not_sent)
    _print("these read a private attribute of a scheme, which only torchrl's scheme has:", private)
    _print("only with the twins:", gained)
    _print("LOST, only without the twins:", lost)
    for which, done in (("as they are", before), ("with the twins", after)):
        if set(done.statuses) - {0, 1, pytest.ExitCode.NO_TESTS_COLLECTED}:
            print(f"not all tests ran {which}: pytest ended with {', '.join(map(str, done.statuses))}")
    if not passing:
        print("nothing passes as it is: there is nothing to compare")
        return 2
    return 1 if lost else 0


def _print(title: str, tests: dict[str, str]) -> None:
    if tests:
        print(title)
        for test, detail in tests.items():
            print(f"  {test}" + (f"\n      {detail}" if detail else ""))


def main(arguments: list[str]) -> int:
    """Compare the two runs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n  ".join(["not sent:", *(f"{test}: {reason}" for test, reason in NOT_SENT.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a folder, a file, or FILE::TEST of tests")
    parser.add_argument(
        "pytest",
        nargs=argparse.REMAINDER,
        help="further paths and options of pytest: -k EXPRESSION, --timeout 300",
    )
    given = parser.parse_args(arguments)
    if not Path(str(given.folder).split("::")[0]).exists():
        parser.error(f"expected a folder or a file of tests, got {str(given.folder)!r}, which does not exist")
    for needed in ("aiosync", "torchrl"):
        if importlib.util.find_spec(needed) is None:
            parser.error(f"{needed} cannot be imported by {sys.executable}: install it there")
    command = [str(given.folder), *given.pytest]
    before = run(command, twins=False)
    return compare(before, run(command, twins=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
