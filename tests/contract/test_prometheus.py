"""The metrics of a running outbox as Prometheus reads them. The same on each database, so the tests run in memory."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from outboxio import Event, EventEnvelope, Outbox, Unprocessable
from outboxio.integrations.prometheus import CONTENT_TYPE, OutboxCollector, metrics_text
from outboxio.statistics.metrics import FIGURES, METRICS
from outboxio.testing import memory_outbox
from tests.kit import promtool
from tests.kit.app import Emit, MoneyDeposited, WalletOpened, eventually

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
Envelope = EventEnvelope[MoneyDeposited]
Labels = tuple[tuple[str, str], ...]


@pytest.fixture
async def outbox() -> AsyncIterator[Outbox]:
    async with memory_outbox(namespace="shop") as outbox:
        yield outbox


def values(outbox: Outbox, *more: Outbox) -> dict[str, dict[Labels, float]]:
    """Every sample by name and labels, without the labels namespace and shard."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(metrics_text(outbox, *more).decode()):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("namespace", "shard")))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


async def work(outbox: Outbox) -> None:
    """Runs of each kind: one succeeds, one is dead."""

    @outbox.handler(MoneyDeposited, name="receipt")
    async def receipt(envelope: Envelope) -> None: ...

    @outbox.handler(MoneyDeposited, name='odd "name"\\n\n')
    async def odd(envelope: Envelope) -> None:
        raise Unprocessable("no")

    await outbox.execute(Emit((1,)))
    await outbox.drain()


async def test_promtool_accepts_the_metrics_in_every_phase(outbox: Outbox) -> None:
    promtool.check("metrics", given=metrics_text(outbox))
    await work(outbox)
    promtool.check("metrics", given=metrics_text(outbox))
    async with outbox.running():
        promtool.check("metrics", given=metrics_text(outbox))
    assert "text/plain" in CONTENT_TYPE


async def test_counters_and_histograms_match_the_statistics(outbox: Outbox) -> None:
    await work(outbox)
    found = values(outbox)

    consumed = found["messaging_client_consumed_messages_total"]
    assert consumed[("handler", "receipt"), ("outcome", "succeeded")] == 1
    assert consumed[("handler", "receipt"), ("outcome", "dead")] == 0
    assert consumed[("handler", 'odd "name"\\n\n'), ("outcome", "dead")] == 1
    assert found["messaging_client_sent_messages_total"] == {(("event_type", "MoneyDeposited"),): 1}
    durations = found["messaging_process_duration_seconds_bucket"]
    labels = (("error_type", ""), ("handler", "receipt"))
    assert durations[(*labels, ("le", "+Inf"), ("outcome", "succeeded"))] == 1
    assert found["messaging_process_duration_seconds_count"][(*labels, ("outcome", "succeeded"))] == 1
    dead = (("error_type", "Unprocessable"), ("handler", 'odd "name"\\n\n'), ("outcome", "dead"))
    assert found["messaging_process_duration_seconds_count"][dead] == 1
    assert found["outboxio_delivery_lag_seconds_count"][(("handler", "receipt"),)] == 1
    assert found["outboxio_actions_total"] == {(("action", "Emit"), ("outcome", "committed")): 1}


class Order(Event, type_name="Order", aliases={"OldOrder"}): ...


async def test_types_without_a_class_share_a_label_value(outbox: Outbox) -> None:
    @outbox.handler(Order, name="orders")
    async def orders(envelope: EventEnvelope[Order]) -> None: ...

    @outbox.handler("ByName", name="mirror", raw=True)
    async def mirror(envelope: EventEnvelope[bytes]) -> None: ...

    class LateOrder(Order, type_name="LateOrder"): ...

    named = ["Order", "OldOrder", "LateOrder", "ByName"]
    given = [*named, *(f"from-outside-{number}" for number in range(500))]
    await outbox.inbox.receive_many(
        [{"source": type, "external_id": "1", "type": type, "payload": {}} for type in given]
    )
    await outbox.inbox.receive(source="s", external_id="2", type="from-outside-0", payload={})

    expected = {**dict.fromkeys(named, 1), "other": 501}
    found = values(outbox)["messaging_client_sent_messages_total"]
    assert {dict(labels)["event_type"]: value for labels, value in found.items()} == expected
    assert outbox.statistics["default"].sent == expected
    assert b"from-outside" not in metrics_text(outbox)


async def test_buckets_are_cumulative(outbox: Outbox) -> None:
    histogram = outbox.statistics["default"].of("h").successes
    for seconds in (0.001, 0.02, 0.02, 7.0, 1000.0):
        histogram.add(seconds)
    buckets = values(outbox)["messaging_process_duration_seconds_bucket"]
    counts = [
        buckets[("error_type", ""), ("handler", "h"), ("le", le), ("outcome", "succeeded")]
        for le in ("0.001", "0.0025", "0.025", "5.0", "10.0", "300.0", "+Inf")
    ]
    assert counts == [1, 1, 3, 3, 4, 4, 5]


async def test_a_process_exports_roles_locks_and_runs_while_running(outbox: Outbox) -> None:
    released, started = asyncio.Event(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="slow", concurrency=7)
    async def slow(envelope: Envelope) -> None:
        started.set()
        await released.wait()

    handler = (("handler", "slow"),)
    async with outbox.running():
        await outbox.execute(Emit((1,)))
        await started.wait()
        found = values(outbox)
        assert found["outboxio_running"] == {(("role", "fanout"),): 1, (("role", "handling"),): 1}
        assert found["outboxio_lock_held"] == {(("lock", "fanout"),): 1, (("lock", "dispatch/slow"),): 1}
        assert found["outboxio_runs_active"][handler] == 1
        assert found["outboxio_runs_limit"][handler] == 7
        assert found["outboxio_runs_stuck"][handler] == 0
        assert found["outboxio_loop_lag_seconds"][()] < 10
        released.set()
    found = values(outbox)
    assert "outboxio_running" not in found
    assert set(found["outboxio_lock_held"].values()) == {0}
    assert found["outboxio_runs_active"][handler] == 0


async def test_table_figures_come_from_the_process_that_fans_out(outbox: Outbox) -> None:
    collector = OutboxCollector(outbox)  # reads the figures
    await work(outbox)
    await outbox.admin.pause("receipt")
    async with outbox.running():
        await outbox.execute(Emit((1, 2)))
        await eventually(lambda: "outboxio_due_age_seconds" in values(outbox))
    names = {metric.prometheus_name for metric in FIGURES}
    assert not names & {family.name for family in collector.collect()}


async def test_the_figures_match_the_tables(outbox: Outbox) -> None:
    OutboxCollector(outbox)
    await work(outbox)
    await outbox.admin.pause("receipt")
    await outbox.execute(Emit((1, 2)))
    await outbox.drain()
    outbox.handler(WalletOpened, name="idle")(work)  # type: ignore[arg-type]
    async with outbox.running():
        await eventually(lambda: outbox.statistics["default"].figures is not None)
        found = values(outbox)
    receipt, odd, idle = ((("handler", name),) for name in ("receipt", 'odd "name"\\n\n', "idle"))
    assert found["outboxio_notifications_due"][receipt] == 2
    assert found["outboxio_notifications_due"][idle] == 0
    assert found["outboxio_due_age_seconds"][idle] == 0
    assert found["outboxio_notifications_dead"][odd] == 3
    assert found["outboxio_notifications_dead_recently"][odd] == 3
    assert found["outboxio_events_undelivered"] == {(): 0}
    assert found["outboxio_unroutable"] == {(): 0}


async def test_a_user_registry_serves_the_metrics_from_a_thread(outbox: Outbox) -> None:
    registry = CollectorRegistry()
    registry.register(OutboxCollector(outbox))
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        async with outbox.running():
            await work_while_scraped(outbox, url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def work_while_scraped(outbox: Outbox, url: str) -> None:
    """Scrape from a thread while events are handled."""
    texts: list[str] = []

    def scrape() -> None:
        for _ in range(20):
            with urllib.request.urlopen(url) as answer:
                texts.append(answer.read().decode())

    thread = threading.Thread(target=scrape)
    thread.start()
    while thread.is_alive():
        await outbox.execute(Emit((1,)))
    thread.join()
    assert len(texts) == 20
    assert "outboxio_running" in texts[-1]


async def test_a_second_collector_is_refused_and_one_collector_takes_several_outboxes(outbox: Outbox) -> None:
    registry = CollectorRegistry()
    async with memory_outbox(namespace="stock") as other:
        await work(outbox)
        registry.register(OutboxCollector(outbox))
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(OutboxCollector(other))
        promtool.check("metrics", given=metrics_text(outbox, other))
        text = metrics_text(outbox, other).decode()
        assert {'namespace="shop"', 'namespace="stock"'} <= set(re.findall(r'namespace="\w+"', text))


def test_the_metrics_page_lists_every_metric_with_type_and_labels() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    described = {
        name: (prometheus, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, prometheus, kind, labels in rows
    }
    expected = {
        metric.name: (
            metric.prometheus_name + ("_total" if metric.kind == "counter" else ""), metric.kind, metric.labels,
        )
        for metric in METRICS
    }  # fmt: skip
    assert described == expected
