"""``aiosync doctor``: print this machine's properties, and send one update to a spawned worker."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import aiosync
from aiosync._extras import how_to_install, packages_of_extras

SELF_CHECK_SECONDS = 60.0
_PACKAGES = ("torch", "tensordict", "anyio", "msgspec", "uvloop", "torchrl", "gymnasium")
_LOW_FILE_LIMIT = 1024
_GIB = 2**30


def examine(console: Console | None = None, *, as_json: bool = False) -> bool:
    """Print the findings, and run the self-check; returns whether the self-check succeeded."""
    console = console or Console(markup=False)  # brackets are the names of extras
    found = dict((*_software(), *_extras(), *_processes(), *_network(), *_memory(), *_cuda()))
    if not as_json:
        table = Table(title="aiosync doctor", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, finding in found.items():
            table.add_row(name, finding)
        console.print(table)
        console.print(
            f"Self-check: 1 MB over shared memory to a spawned worker, in {SELF_CHECK_SECONDS:g} s …"
        )
    started = time.monotonic()
    try:
        seconds = asyncio.run(self_check())
    except (aiosync.AiosyncError, OSError) as error:
        check: dict[str, Any] = {"ok": False, "error": str(error)}
        shown = f"FAILED after {time.monotonic() - started:.1f} s: {error}"
    else:
        check = {"ok": True, "connect_seconds": seconds["connect"], "send_seconds": seconds["send"]}
        connected, sent = f"{seconds['connect']:.1f} s", f"{seconds['send'] * 1e3:.2f} ms"
        shown = f"OK: connected after {connected}, sent and applied in {sent}"
    if as_json:
        print(json.dumps({"findings": found, "self_check": check}, indent=2))  # noqa: T201 - the output
    else:
        console.print(shown, style="bold green" if check["ok"] else "bold red")
    return bool(check["ok"])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _software() -> Iterator[tuple[str, str]]:
    yield "aiosync", _version("aiosync")
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.platform()}, {os.cpu_count()} CPUs"
    for package in _PACKAGES:
        yield package, _version(package)


def _extras() -> Iterator[tuple[str, str]]:
    for extra, modules in packages_of_extras().items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        finding = f"{', '.join(missing)} not installed: {how_to_install(extra)}" if missing else "installed"
        yield f"extra {extra}", finding


def _processes() -> Iterator[tuple[str, str]]:
    methods = multiprocessing.get_all_start_methods()
    yield "start methods", f"{', '.join(methods)} (default: {multiprocessing.get_start_method()})"
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        note = "  low: raise it with `ulimit -n`" if soft < _LOW_FILE_LIMIT else ""
        yield "open files", f"{soft} (may be raised to {hard}){note}"


def _network() -> Iterator[tuple[str, str]]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5.0):
                yield "loopback", f"a connection to port {server.getsockname()[1]} works"
    except OSError as error:
        yield "loopback", f"FAILED: {error}: workers on this machine cannot be reached over TCP"
    yield "TLS", f"{ssl.OPENSSL_VERSION}, {'TLS 1.2 and 1.3' if ssl.HAS_TLSv1_3 else 'TLS 1.2'}"
    try:
        port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return
    yield "free ports", f"chosen from {'-'.join(port_range)}"


def _memory() -> Iterator[tuple[str, str]]:
    has_memfd = hasattr(os, "memfd_create")
    yield "memfd", "yes" if has_memfd else "no: shared weights go to a file in the temporary folder"
    if (available := _available_memory()) is not None:
        yield "memory for weights", f"{available / _GIB:.1f} GiB available"
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        # torch's shared tensors use it, and aiosync does not.
        free = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
        yield "/dev/shm", f"{free} (used by torch, not by aiosync)"


def _available_memory() -> int | None:
    """Return the bytes available in the system or in this cgroup, whichever is less; None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    system = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return system
    return system if limit == "max" else min(system, int(limit) - used)


def _cuda() -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "CUDA", f"not available (this torch: {torch.version.cuda or 'built for CPU only'})"
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "CUDA", f"{torch.version.cuda}: {', '.join(names)}"
    # CUDA IPC works only on Linux, and not with the caching allocator's expandable segments.
    if sys.platform != "linux":
        yield "CUDA IPC", "no: only on Linux"
    elif "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield "CUDA IPC", "unsure: PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"
    else:
        yield "CUDA IPC", "yes"


# ---- the self-check ------------------------------------------------------------------------------


async def self_check() -> dict[str, float]:
    """Send a new version to a spawned worker; return the seconds of ``connect`` and of ``send``."""
    ctx = multiprocessing.get_context("spawn")
    model = nn.Linear(512, 512, bias=False)  # 1 MB of fp32
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=SELF_CHECK_SECONDS)
    scheme.init_on_sender(model_id="doctor", model=model, num_workers=1, ctx=ctx)
    process = ctx.Process(target=_worker, args=(scheme,), daemon=True)
    process.start()
    try:
        started = time.perf_counter()
        async with scheme:
            connected = time.perf_counter()
            model.weight.data.add_(1.0)
            await scheme.send(model)
            sent = time.perf_counter()
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
    return {"connect": connected - started, "send": sent - connected}


def _worker(scheme: aiosync.SharedMemWeightSyncScheme) -> None:
    asyncio.run(_receive(scheme))


async def _receive(scheme: aiosync.SharedMemWeightSyncScheme) -> None:
    scheme.init_on_receiver(model_id="doctor", model=nn.Linear(512, 512, bias=False), worker_idx=0)
    async with scheme, scheme.receiving():
        await scheme.wait_closed()
