"""Alerts and dashboards: every metric they use is exported, every alert fires, and each has a runbook page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outboxio import EventEnvelope, Unprocessable
from outboxio.health.rules import RULE_NAMES
from outboxio.integrations.prometheus import OutboxCollector, metrics_text
from outboxio.testing import memory_outbox
from tests.kit import promtool
from tests.kit.app import Emit, MoneyDeposited, eventually
from tests.kit.jobs import metrics_include_jobs, ran

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
DASHBOARDS = sorted(FOLDER.glob("*.json"))
RUNBOOK = ROOT / "docs" / "operate" / "runbook"

_METRIC = re.compile(r"\b(?:outboxio|messaging)_\w+")
_LABELS = re.compile(r"\{[^}]*\}|\bby \([^)]*\)")


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def read(dashboard: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(dashboard.read_text("utf-8"))
    return content


def expressions(dashboard: Path) -> list[str]:
    """The expressions of all panels, with values for the variables."""
    panels = read(dashboard)["panels"]
    texts = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [text.replace("$__rate_interval", "5m").replace("$", "") for text in texts]


@pytest.fixture
async def exported() -> set[str]:
    """The names of all series of a running outbox that had work of each kind."""
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="h")
        async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
            if envelope.event.amount == 2:
                raise Unprocessable("no")

        @outbox.job("close-day", every="1h")
        async def close_day() -> None: ...

        OutboxCollector(outbox)
        async with outbox.running():
            await ran(outbox)
            await metrics_include_jobs(outbox)
            await outbox.execute(Emit((1, 2)))
            await eventually(lambda: outbox.statistics["default"].of("h").dead == 1)
            outbox.statistics["default"].purged_from("events", 0)  # retention removes nothing for a week
            text = metrics_text(outbox).decode()
    return set(re.findall(r"^(\w+)", text, re.MULTILINE))


def metrics_in(texts: list[str]) -> set[str]:
    return {name for text in texts for name in _METRIC.findall(_LABELS.sub(" ", text))}


async def test_every_metric_of_the_alerts_is_exported_by_a_running_outbox(exported: set[str]) -> None:
    assert metrics_in([rule["expr"] for rule in rules()]) - exported == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
async def test_every_metric_of_a_dashboard_is_exported_by_a_running_outbox(dashboard: Path, exported: set[str]) -> None:
    queries = [
        variable["query"]["query"] for variable in read(dashboard)["templating"]["list"] if "refresh" in variable
    ]

    assert metrics_in(expressions(dashboard)) - exported == set()
    assert {re.findall(r"label_values\((\w+)", query)[0] for query in queries} - exported == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_prometheus_understands_every_expression_of_a_dashboard(dashboard: Path, tmp_path: Path) -> None:
    recorded = [{"record": f"panel:number{n}", "expr": text} for n, text in enumerate(expressions(dashboard))]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    promtool.check_rules(file)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_of_a_dashboard_have_unique_titles_and_descriptions(dashboard: Path) -> None:
    panels = read(dashboard)["panels"]
    ids = [panel["id"] for panel in panels]

    assert len(set(ids)) == len(ids)
    assert [panel["title"] for panel in panels if panel["type"] != "row" and not panel["description"]] == []
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in panels]
    assert len(set(places)) == len(places)


def test_prometheus_accepts_the_alerts() -> None:
    promtool.check_rules(ALERTS)


def test_every_alert_and_every_rule_has_a_runbook_page() -> None:
    pages = {page.stem: page.read_text("utf-8") for page in RUNBOOK.glob("*.md") if page.stem != "index"}
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules()}
    index = (RUNBOOK / "index.md").read_text("utf-8")

    assert {link.rpartition("/")[0] for link in links.values()} == {"docs/operate/runbook"}
    assert {link.rpartition("/")[2].removesuffix(".md") for link in links.values()} - set(pages) == set()
    assert set(RULE_NAMES) - set(pages) == set()
    for alert, link in links.items():
        assert f"`{alert}`" in index
        assert f"`{alert}`" in (ROOT / link).read_text("utf-8")
    for name, page in pages.items():
        assert f"[{name}]({name}.md)" in index
        expected = f"Rule: `{name}`." if name in RULE_NAMES else "`outboxio health` of the process says, for example:"
        assert expected in page
        assert [head for head in HEADS if f"\n## {head}\n" not in page] == [], name


HEADS = ("Meaning", "Where to look", "How to fix it")
OF_HANDLER = '{namespace="shop",shard="default",handler="h",instance="a:1"}'
OF_JOB = '{namespace="shop",shard="default",job="close-day",instance="a:1"}'
OF_SHARD = '{namespace="shop",shard="default",instance="a:1"}'
CONSUMED = 'messaging_client_consumed_messages_total{{namespace="shop",shard="default",handler="h",outcome="{}"}}'

#: The series under which an alert fires, each with the values of every minute, and the series under which it is quiet.
FAULTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "OutboxioNoInstance": (
        {f"outboxio_running{OF_SHARD}": "1x60 _x70"}, {f"outboxio_running{OF_SHARD}": "1x130"},
    ),
    "OutboxioNoMetrics": ({}, {f"outboxio_running{OF_SHARD}": "1x130"}),
    "OutboxioLockWithoutHolder": (
        {'outboxio_lock_held{namespace="shop",shard="default",lock="fanout",instance="a:1"}': "0x130"},
        {
            'outboxio_lock_held{namespace="shop",shard="default",lock="fanout",instance="a:1"}': "0x130",
            'outboxio_lock_held{namespace="shop",shard="default",lock="fanout",instance="b:1"}': "1x130",
        },
    ),
    "OutboxioFanoutBehind": (
        {f"outboxio_undelivered_age_seconds{OF_SHARD}": "31x130"},
        {f"outboxio_undelivered_age_seconds{OF_SHARD}": "29x130"},
    ),
    "OutboxioHandlerBehind": (
        {f"outboxio_due_age_seconds{OF_HANDLER}": "61x130", f"outboxio_alert_age_seconds{OF_HANDLER}": "60x130",
         f"outboxio_paused{OF_HANDLER}": "0x130"},
        {f"outboxio_due_age_seconds{OF_HANDLER}": "61x130", f"outboxio_alert_age_seconds{OF_HANDLER}": "60x130",
         f"outboxio_paused{OF_HANDLER}": "1x130"},
    ),
    "OutboxioHandlerFailing": (
        {CONSUMED.format("failed"): "0+6x130", CONSUMED.format("succeeded"): "0+4x130"},
        {CONSUMED.format("failed"): "0+4x130", CONSUMED.format("succeeded"): "0+6x130"},
    ),
    "OutboxioNewDead": (
        {f"outboxio_notifications_dead_recently{OF_HANDLER}": "1x130"},
        {f"outboxio_notifications_dead_recently{OF_HANDLER}": "0x130"},
    ),
    "OutboxioParkedKeys": (
        {f"outboxio_keys_parked{OF_HANDLER}": "1x130"}, {f"outboxio_keys_parked{OF_HANDLER}": "0x130"},
    ),
    "OutboxioStuckRuns": ({f"outboxio_runs_stuck{OF_HANDLER}": "1x130"}, {f"outboxio_runs_stuck{OF_HANDLER}": "0x130"}),
    "OutboxioUnroutable": ({f"outboxio_unroutable{OF_SHARD}": "1x130"}, {f"outboxio_unroutable{OF_SHARD}": "0x130"}),
    "OutboxioEventWithoutHandler": (
        {f"outboxio_events_unwanted{OF_SHARD}": "1x130"}, {f"outboxio_events_unwanted{OF_SHARD}": "0x130"},
    ),
    "OutboxioPausedLong": (
        {f"outboxio_paused{OF_HANDLER}": "1x1500"}, {f"outboxio_paused{OF_HANDLER}": "1x700 0 1x800"},
    ),
    "OutboxioJobLate": (
        {f"outboxio_job_due_age_seconds{OF_JOB}": "61x130"}, {f"outboxio_job_due_age_seconds{OF_JOB}": "59x130"},
    ),
    "OutboxioJobFailing": (
        {f"outboxio_job_failing{OF_JOB}": "1x130"}, {f"outboxio_job_failing{OF_JOB}": "0x130"},
    ),
    "OutboxioJobStuck": ({f"outboxio_job_stuck{OF_JOB}": "1x130"}, {f"outboxio_job_stuck{OF_JOB}": "0x130"}),
    "OutboxioJobPausedLong": (
        {f"outboxio_job_paused{OF_JOB}": "1x1500"}, {f"outboxio_job_paused{OF_JOB}": "1x700 0 1x800"},
    ),
    "OutboxioLoopBlocked": (
        {f"outboxio_loop_lag_seconds{OF_SHARD}": "1.5x130"}, {f"outboxio_loop_lag_seconds{OF_SHARD}": "0.5x130"},
    ),
    "OutboxioLoopFailing": (
        {f'outboxio_loop_failures_total{OF_SHARD[:-1]},loop="fan-out"}}': "0+2x130"},
        {f'outboxio_loop_failures_total{OF_SHARD[:-1]},loop="fan-out"}}': "0 1x130"},
    ),
}  # fmt: skip


def test_every_alert_fires_for_its_fault_and_only_for_it(tmp_path: Path) -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    assert set(FAULTS) == set(by_name)
    files = []
    for alert, (faulty, quiet) in FAULTS.items():
        alone = tmp_path / f"{alert}.yaml"  # promtool evaluates all rules of a file, at each minute of each test
        alone.write_text(yaml.safe_dump({"groups": [{"name": "outboxio", "rules": [by_name[alert]]}]}))
        minutes = 1500 if alert.endswith("PausedLong") else 100
        tests = [
            {
                "interval": "1m",
                "name": f"{alert} {'fires' if fires else 'is quiet'}",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                        "eval_time": f"{minutes}m",
                        "exp_samples": [{"labels": "{}", "value": int(fires)}],
                    }
                ],
            }
            for series, fires in ((faulty, True), (quiet, False))
        ]
        files.append(tmp_path / f"test_{alert}.yaml")
        files[-1].write_text(yaml.safe_dump({"rule_files": [str(alone)], "evaluation_interval": "1m", "tests": tests}))
    promtool.test_rules(*files)
