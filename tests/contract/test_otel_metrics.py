"""OpenTelemetry metrics, as a real SDK collects them. The same on each database, so the tests run in memory."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outboxio import Batch, EventEnvelope, Outbox, Unprocessable
from outboxio.integrations.opentelemetry import OpenTelemetry
from outboxio.statistics.figures import DURATIONS
from outboxio.statistics.handlers import HandlerStatistics
from outboxio.statistics.metrics import FIGURES, METRICS
from tests.kit.app import Emit, MoneyDeposited
from tests.kit.jobs import metrics_include_jobs, ran

Attributes = tuple[tuple[str, Any], ...]
PLACE = {"outboxio.namespace": "shop", "outboxio.shard": "default"}


class Collected:
    """The metrics of a reader."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        data = reader.get_metrics_data()
        found = [] if data is None else data.resource_metrics
        scopes = [scope for resource in found for scope in resource.scope_metrics]
        self.scopes = {(scope.scope.name, scope.scope.schema_url) for scope in scopes}
        self.metrics: dict[str, Any] = {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> dict[Attributes, Any]:
        """The points of a metric by their attributes, without namespace and shard."""
        points: dict[Attributes, Any] = {}
        for point in self.metrics[name].data.data_points:
            attributes = dict(point.attributes)
            assert {key: attributes.pop(key) for key in PLACE} == PLACE
            points[tuple(sorted(attributes.items()))] = point
        return points


def key(**attributes: Any) -> Attributes:
    return tuple(sorted((name.replace("__", "."), value) for name, value in attributes.items()))


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Any:
    provider = MeterProvider(metric_readers=[reader])
    yield provider
    provider.shutdown()


async def worked(telemetry: OpenTelemetry) -> Outbox:
    """An outbox after two runs of one handler and a batch of another."""
    outbox = Outbox("sqlite://", namespace="shop", telemetry=telemetry)
    await outbox.migrate()

    @outbox.handler(MoneyDeposited, name="receipt")
    async def receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
        if envelope.event.amount == 2:
            raise ValueError("no")

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=10))
    async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        raise Unprocessable("no")

    await outbox.execute(Emit((1, 2)))
    await outbox.drain()
    return outbox


MESSAGING = {"messaging__system": "outboxio", "messaging__operation__name": "process"}


async def test_counters_and_histograms_agree_with_the_statistics(provider: Any, reader: InMemoryMetricReader) -> None:
    async with await worked(OpenTelemetry(meter_provider=provider)) as outbox:
        found = Collected(reader)
        statistics = outbox.statistics["default"]

    assert found.scopes == {("outboxio", "https://opentelemetry.io/schemas/1.44.0")}
    handler = {**MESSAGING, "messaging__destination__subscription__name": "receipt"}
    consumed = found.points("messaging.client.consumed.messages")
    assert consumed[key(**handler, outboxio__outcome="succeeded")].value == 1
    assert consumed[key(**handler, outboxio__outcome="retry")].value == 1
    sent = found.points("messaging.client.sent.messages")
    assert [(dict(attributes)["messaging.destination.name"], point.value) for attributes, point in sent.items()] == [
        ("MoneyDeposited", 2)
    ]
    durations = found.points("messaging.process.duration")
    succeeded = durations[key(**handler, outboxio__outcome="succeeded")]
    assert succeeded.count == 1
    assert tuple(succeeded.explicit_bounds) == DURATIONS
    assert list(succeeded.bucket_counts) == statistics.of("receipt").successes.buckets
    assert durations[key(**handler, outboxio__outcome="retry", error__type="ValueError")].count == 1
    lags = found.points("outboxio.delivery.lag")
    assert {dict(attributes)["outboxio.handler"]: point.count for attributes, point in lags.items()} == {
        "receipt": 2, "report": 2,
    }  # fmt: skip
    operations = found.points("messaging.client.operation.duration")
    counts = {dict(attributes)["messaging.operation.name"]: point.count for attributes, point in operations.items()}
    assert counts == {"send": 1, "settle": statistics.settles.number}


async def test_types_from_senders_share_an_attribute_value(provider: Any, reader: InMemoryMetricReader) -> None:
    async with await worked(OpenTelemetry(meter_provider=provider)) as outbox:
        for number in range(3):
            await outbox.inbox.receive(source="s", external_id=str(number), type=f"from-outside-{number}", payload={})
        sent = Collected(reader).points("messaging.client.sent.messages")

    assert {dict(attributes)["messaging.destination.name"]: point.value for attributes, point in sent.items()} == {
        "MoneyDeposited": 2, "other": 3,
    }  # fmt: skip


async def test_a_batch_records_one_duration_per_call(provider: Any, reader: InMemoryMetricReader) -> None:
    async with await worked(OpenTelemetry(meter_provider=provider)):
        durations = Collected(reader).points("messaging.process.duration")
    calls = [
        point.count
        for attributes, point in durations.items()
        if dict(attributes)["messaging.destination.subscription.name"] == "report"
    ]
    assert calls == [3]  # the pair, and each row alone


async def test_every_metric_has_its_name_unit_and_description(provider: Any, reader: InMemoryMetricReader) -> None:
    outbox = await worked(OpenTelemetry(meter_provider=provider))

    @outbox.job("close-day", every="1h")
    async def close_day() -> None: ...

    async with outbox, outbox.running():
        outbox.statistics["default"].purged_from("events", 0)
        await ran(outbox)
        await outbox.admin.run_job_now("close-day")
        await ran(outbox, succeeded=1)
        await metrics_include_jobs(outbox)
        async with outbox.lock("k"):
            pass
        found = Collected(reader).metrics
    described = {name: (metric.unit, metric.description) for name, metric in found.items()}
    assert described == {
        metric.name: (metric.unit, metric.help) for metric in METRICS if metric.name != "outboxio.fanout.lag"
    }  # no commit came while fan-out was running
    assert {metric.name for metric in FIGURES} <= set(found)


async def test_without_histograms_a_run_does_not_call_opentelemetry(
    provider: Any, reader: InMemoryMetricReader
) -> None:
    async with await worked(OpenTelemetry(meter_provider=provider, histograms=False)) as outbox:
        found = Collected(reader).metrics
        assert type(outbox.statistics["default"].of("receipt")) is HandlerStatistics
    assert [metric.name for metric in METRICS if metric.kind == "histogram" and metric.name in found] == []
    assert "messaging.client.consumed.messages" in found


async def test_without_metrics_nothing_is_exported_and_the_tables_are_not_read() -> None:
    async with await worked(OpenTelemetry()) as outbox:
        assert not outbox.statistics["default"].figures_wanted
        assert type(outbox.statistics["default"].of("receipt")) is HandlerStatistics


async def test_one_telemetry_object_serves_several_outboxes(provider: Any, reader: InMemoryMetricReader) -> None:
    telemetry = OpenTelemetry(meter_provider=provider)
    async with await worked(telemetry), Outbox("sqlite://", namespace="stock", telemetry=telemetry) as other:
        await other.migrate()
        await other.execute(Emit((1,)))
        points = Collected(reader).metrics["outboxio.actions"].data.data_points
    assert sorted((point.attributes["outboxio.namespace"], point.value) for point in points) == [
        ("shop", 1), ("stock", 1),
    ]  # fmt: skip
