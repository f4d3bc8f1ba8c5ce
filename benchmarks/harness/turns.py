"""Turns in processes of their own: what a turn leaves behind changes no other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def take(task: Any, module: str, seconds: float | None = None) -> dict[str, Any]:
    """Take a turn in a process of its own, whose last line of output is the turn as JSON.

    Args:
        task: a dataclass, which the process gets as JSON.
        module: the module of ``benchmarks.cases`` whose ``main()`` is called.
        seconds: the longest time that a turn may take; None: any.

    Raises:
        RuntimeError: the process failed, or took too long.
    """
    program = f"from benchmarks.cases import {module}; {module}.main()"
    command = [sys.executable, "-c", program, json.dumps(asdict(task))]
    # Where no name server answers, torch.distributed is not to wait for one.
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    given: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, check=False, timeout=seconds, **given)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{task} took more than {seconds} s") from late
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{task} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
