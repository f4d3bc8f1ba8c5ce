"""Turns that are processes of their own: what one left behind is not the next one's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["in_a_process"]


def in_a_process(module: str, *arguments: object, **environment: str) -> dict[str, Any]:
    """Run ``python -m module arguments``; the JSON object that is the last line of its output.

    Args:
        module: of :mod:`benchmarks`.
        arguments: as text.
        environment: further variables.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **environment, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
