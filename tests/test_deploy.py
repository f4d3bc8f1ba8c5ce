"""The files in deploy/: they name metrics, options and paths that exist."""

from __future__ import annotations

import asyncio
import configparser
import inspect
import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from aiosync import cli, metrics
from aiosync.integrations.asgi import ServedPolicy
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform
from tests.kit.tcp import join, make_worker, sender_of

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SELECTOR = re.compile(r"(aiosync_\w+)\{([^}]*)\}")
MATCH = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')


def expressions() -> Iterator[str]:
    """The PromQL of the dashboard and of the alerts."""
    dashboard = json.loads((DEPLOY / "grafana" / "aiosync.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    alerts = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


async def scraped() -> dict[str, list[dict[str, str]]]:
    """A trainer's metrics, as Prometheus gets them: name -> the labels of each sample."""
    registry = CollectorRegistry()
    async with sender_of(Uniform()) as scheme, AsyncExitStack() as stack:
        metrics.to_prometheus(scheme, registry)
        worker = make_worker(scheme.address)
        stack.push_async_callback(worker.close)
        await within(join(scheme, worker))
        await within(scheme.send())
        server, thread = start_http_server(0, "127.0.0.1", registry)
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        try:
            read = urllib.request.urlopen
            text = (await asyncio.to_thread(lambda: read(url, timeout=PATIENCE).read())).decode()
        finally:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


async def test_dashboard_and_alerts_ask_for_metrics_that_a_scrape_has() -> None:
    found = await scraped()
    selectors = [match for expression in expressions() for match in SELECTOR.finditer(expression)]
    assert len(selectors) > 10
    for selector in selectors:
        name, labels = selector[1], selector[2]
        assert name in found, f"{selector[0]}: no such metric in {sorted(found)}"
        for label, operator, value in MATCH.findall(labels):
            values = {sample.get(label) for sample in found[name]}
            assert None not in values, f"{selector[0]}: no label {label}"
            rare = {"lost", "failed", "lost|failed"}  # nothing went wrong in that scrape
            if operator == "=" and value not in rare:
                assert value in values, f"{selector[0]}: {label} is one of {values}"


def test_every_part_of_the_dashboard_is_described() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "aiosync.json").read_text(encoding="utf-8"))
    assert all(panel["description"] and panel["targets"] for panel in dashboard["panels"])


@pytest.mark.parametrize("name", ["aiosync-relay", "aiosync-server"])
def test_units_start_programs_with_options_that_they_have(name: str) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "systemd" / f"{name}.service", encoding="utf-8")
    assert unit["Service"]["KillSignal"] == "SIGTERM"
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    if program.endswith("aiosync"):
        runner = CliRunner(env={"COLUMNS": "200"})
        known = runner.invoke(cli.app, [arguments[0], "--help"]).output
    else:
        known = (ROOT / arguments[0]).read_text(encoding="utf-8")
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in known or f"    {option[2:].replace('-', '_')}:" in known


def test_the_kubernetes_manifest_probes_the_health_check() -> None:
    text = (DEPLOY / "kubernetes" / "policy-server.yaml").read_text(encoding="utf-8")
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    health = inspect.signature(ServedPolicy).parameters["ready"].default
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": health, "port": "http"}
    assert (ROOT / container["command"][1]).is_file()
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    names: set[Any] = {port["name"] for port in container["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in names
