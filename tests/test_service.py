"""examples/service: its tests, ``make service`` and its deployment files, from a copy of the folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nats as nats_py
import pytest
import typer.main
import yaml

from outboxio import Settings
from outboxio.cli.app import app
from tests.kit.brokers import Broker

ROOT = Path(__file__).parent.parent
SERVICE = ROOT / "examples" / "service"
KUBERNETES = SERVICE / "deploy" / "kubernetes"
UNIT = SERVICE / "deploy" / "systemd" / "orders-worker.service"
PROBES_PAGE = ROOT / "docs" / "operate" / "probes-in-deployments.md"
AFTER_HANDLERS = 10  # seconds to write outcomes and release locks

NOT_COPIED = shutil.ignore_patterns("build", "__pycache__", ".pytest_cache", "*.db*")
SERVICE_TESTS = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "outboxio_pytest")
STATUS_CODES = """
import asyncio, sys, httpx
from service.web import create_app

async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app()), base_url="http://orders") as client:
        print(*[(await client.get(path)).status_code for path in sys.argv[1:]])

asyncio.run(main())
"""


class Service:
    """A copy of the service, as a team would copy it."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(SERVICE, folder, ignore=NOT_COPIED)
        self.folder = folder

    def run(self, *arguments: str, **environment: str) -> str:
        """Return the output of a Python command that must succeed."""
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout
        return result.stdout

    def run_demo(self, **environment: str) -> None:
        output = self.run("demo.py", **environment)
        for part in (
            "-> 401",
            "-> 422",
            "RECEIVED",
            "DUPLICATE",
            "killed",
            "ada: paid",
            "eve: placed",
            "record-payment",
        ):
            assert part in output
        assert "Everything is as expected." in output
        log = (self.folder / "build" / "log.jsonl").read_text()
        assert "Traceback" not in log
        [mail] = [json.loads(line) for line in log.splitlines() if "mail to ada@example.org" in line]
        assert mail["outboxio_handler"] == "confirmation-mail"
        assert mail["outboxio_correlation_id"]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path / "service")


# --- the demo and the service's own tests --------------------------------------------------------


def test_the_demo_runs_on_a_file_and_models_match_migrations(service: Service) -> None:
    service.run_demo(DATABASE="")

    service.run("-m", "alembic", "check", DATABASE_URL="sqlite:///build/service.db")


async def test_the_demo_succeeds_on_postgresql_and_relays_to_nats(
    service: Service, postgres_url: str, nats: Broker
) -> None:
    client = await nats_py.connect(nats.url)
    streams = client.jetstream()
    await streams.add_stream(name="ORDERS", subjects=["orders.>"])
    try:
        await asyncio.to_thread(service.run_demo, DATABASE=postgres_url, NATS_URL=nats.url)

        assert (await streams.stream_info("ORDERS")).state.messages > 0
    finally:
        await streams.delete_stream("ORDERS")
        await client.close()


def test_the_service_tests_pass_on_a_file(service: Service) -> None:
    service.run("-m", *SERVICE_TESTS, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_the_service_tests_pass_on_postgresql(service: Service, postgres_url: str) -> None:
    service.run("-m", *SERVICE_TESTS, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TEST_DATABASE=postgres_url)


# --- deployment ----------------------------------------------------------------------------------


def manifests() -> list[dict[str, Any]]:
    files = sorted(KUBERNETES.glob("*.yaml"))
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text("utf-8"))]


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def container_of(kind: str, name: str) -> dict[str, Any]:
    [container] = named(kind, name)["spec"]["template"]["spec"]["containers"]
    return container


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((SERVICE / "compose.yaml").read_text("utf-8"))["services"]
    return services


def probe_paths(container: dict[str, Any]) -> list[str]:
    probes = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
    assert {probe["port"] for probe in probes} <= {port["name"] for port in container["ports"]}
    return [probe["path"] for probe in probes]


def test_the_web_probes_and_metrics_are_pages_of_the_application(service: Service) -> None:
    scraped = named("Deployment", "orders-web")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
    paths = [*probe_paths(container_of("Deployment", "orders-web")), scraped]
    secrets = {"WEBHOOK_SECRETS": "whsec_b3RoZXI=", "DASHBOARD_PASSWORD": "secret"}

    assert set(service.run("-c", STATUS_CODES, *paths, **secrets).split()) == {"200"}


def test_the_worker_probes_are_pages_of_the_worker() -> None:
    assert set(probe_paths(container_of("Deployment", "orders-worker"))) <= {"/live", "/ready"}


def test_the_kubernetes_service_selects_the_web_pods() -> None:
    spec = named("Service", "orders")["spec"]

    assert spec["selector"] == named("Deployment", "orders-web")["spec"]["template"]["metadata"]["labels"]
    assert {port["targetPort"] for port in spec["ports"]} <= {
        port["name"] for port in container_of("Deployment", "orders-web")["ports"]
    }
    budget = named("PodDisruptionBudget", "orders-worker")["spec"]["selector"]
    assert budget == named("Deployment", "orders-worker")["spec"]["selector"]


def test_compose_and_kubernetes_run_the_same_programs_from_one_image() -> None:
    services = compose()
    containers = {
        "migrate": container_of("Job", "orders-migrate"),
        "web": container_of("Deployment", "orders-web"),
        "worker": container_of("Deployment", "orders-worker"),
    }

    for name, container in containers.items():
        command = container["command"]
        assert services[name]["command"][: len(command)] == command
        assert services[name]["image"] == services["web"]["image"]
        assert container["image"] == containers["web"]["image"]
        assert container["envFrom"] == containers["web"]["envFrom"]
    assert {one for each in services.values() for one in each.get("depends_on", ())} <= set(services)


WORKER_FILES = [KUBERNETES / "worker.yaml", UNIT, PROBES_PAGE]


def command_options(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]  # typer types it as a plain command
    return {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("file", WORKER_FILES, ids=lambda file: file.name)
def test_deployments_use_only_options_of_the_command(file: Path) -> None:
    known = command_options("worker") | command_options("health")

    pattern = r"(?<![\w-])--(?:health|port|host|live|ready|log|max|json|timeout)[\w-]*"
    used = set(re.findall(pattern, file.read_text("utf-8")))
    assert used
    assert used <= known


@pytest.mark.parametrize(
    "file", [*WORKER_FILES, KUBERNETES / "web.yaml", SERVICE / "compose.yaml"], ids=lambda file: file.name
)
def test_deployments_wait_for_the_grace_period(file: Path) -> None:
    longest = int(Settings().shutdown_timeout.total_seconds()) + AFTER_HANDLERS

    pattern = r"(?:terminationGracePeriodSeconds: |TimeoutStopSec=|stop_grace_period: )(\d+)"
    assert {int(seconds) for seconds in re.findall(pattern, file.read_text("utf-8"))} == {longest}


def test_the_page_about_probes_quotes_the_files() -> None:
    page = PROBES_PAGE.read_text("utf-8")
    files = (KUBERNETES / "worker.yaml", UNIT)
    lines = {line.strip() for file in files for line in file.read_text("utf-8").splitlines()}
    [probes] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    [unit] = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)

    assert {line.strip() for line in unit.splitlines() if not line.startswith("ExecStart")} <= lines
    shown = {re.sub(r" *#.*", "", line).strip().replace("port: 8080", "port: health") for line in probes.splitlines()}
    assert shown <= {re.sub(r" *#.*", "", line) for line in lines}
