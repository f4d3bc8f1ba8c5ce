"""Ask a real Prometheus what the dashboard and the alerts ask for.

``python -m tools.check_dashboard`` starts ``prometheus`` (from the PATH, or from ``--prometheus``), a trainer
and two workers on free ports. One of the workers leaves. Then every part of the dashboard must have values,
and no alert may fire but the one for a worker that has left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import socket
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import yaml
from prometheus_client import start_http_server
from torch import nn

from aiosync import TCPWeightSyncScheme, metrics

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
TOKEN = "a token of this check"
SECONDS = 6.0  # with both workers, and then with one: Prometheus scrapes each second
FIRES = "AiosyncWorkerGone"
"""The only alert that has a reason in this run."""


def panels() -> Iterator[tuple[str, str]]:
    """Title and PromQL of each part of the dashboard, for all models."""
    dashboard = json.loads((DEPLOY / "grafana" / "aiosync.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$model", ".*")


def alerts() -> Iterator[tuple[str, str]]:
    """Name and PromQL of each alert."""
    rules = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


async def train() -> None:
    """Send to two workers, of which one leaves, until standard input ends."""
    server, _ = start_http_server(0, "127.0.0.1")
    async with AsyncExitStack() as stack:
        scheme = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN, timeout=30, on_failure="drop")
        scheme.init_on_sender(model_id="policy", model=nn.Linear(64, 64))
        metrics.to_prometheus(scheme)
        workers = [TCPWeightSyncScheme(scheme.address, token=TOKEN, timeout=30) for _ in range(2)]
        for worker in workers:
            worker.init_on_receiver(model_id="policy", model=nn.Linear(64, 64))
        await asyncio.gather(scheme.connect(min_workers=2), *(worker.connect() for worker in workers))
        stack.push_async_callback(scheme.aclose)
        for worker in workers:
            await stack.enter_async_context(worker.receiving())
        print(f"metrics at {server.server_port}", flush=True)
        loop = asyncio.get_running_loop()
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        leaves = loop.time() + SECONDS
        while not ended.done():
            await scheme.send()
            await asyncio.sleep(0.1)
            if loop.time() > leaves and len(workers) == 2:
                await workers.pop().aclose()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(url: str, expression: str) -> list[Any]:
    """Return what Prometheus answers to an expression."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30) as answer:
        found = json.load(answer)
    if found["status"] != "success":
        raise ValueError(f"{expression}: {found}")
    return list(found["data"]["result"])


async def check(prometheus: str) -> bool:
    """Run everything, and print a line for each expression. Return whether all is well."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tools.check_dashboard", "--trainer", stdin=PIPE, stdout=PIPE
        )
        assert program.stdin is not None and program.stdout is not None
        target = re.search(rb"\d+", await program.stdout.readline())
        assert target is not None
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "prometheus-alerts.yml")],
            "scrape_configs": [
                {"job_name": "aiosync", "static_configs": [{"targets": [f"127.0.0.1:{int(target[0])}"]}]}
            ],
        }
        (path := Path(folder, "prometheus.yml")).write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [f"--config.file={path}", f"--storage.tsdb.path={folder}/data"]
        server = await asyncio.create_subprocess_exec(
            prometheus, *command, f"--web.listen-address=127.0.0.1:{port}", stderr=DEVNULL
        )
        try:
            await asyncio.sleep(2 * SECONDS)
            wanted = [(*each, True) for each in panels()] + [(*each, each[0] == FIRES) for each in alerts()]
            for title, expression, has_values in wanted:
                found = await asyncio.to_thread(ask, f"http://127.0.0.1:{port}", expression)
                fine = bool(found) == has_values
                good = good and fine
                values = ", ".join(series["value"][1] for series in found[:4])
                print(f"{'ok  ' if fine else 'FAIL'} {title}: {len(found)} series: {values}")
            program.stdin.close()
            await program.wait()
        finally:
            server.terminate()
            await server.wait()
    return good


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trainer:
        asyncio.run(train())
    elif given.prometheus is None:
        parser.error("there is no `prometheus` in the PATH: install it, or give --prometheus")
    else:
        sys.exit(not asyncio.run(check(given.prometheus)))


if __name__ == "__main__":
    main()
