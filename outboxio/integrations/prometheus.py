"""Prometheus: a collector for the statistics of an outbox, for prometheus-client.

Handling an event has no extra cost: each scrape reads the current values from memory. The collector may be read in any
thread, as ``prometheus_client.start_http_server`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from outboxio.errors import ConfigurationError
from outboxio.statistics.figures import Histogram
from outboxio.statistics.metrics import METRICS, Metric, Sample, measure
from outboxio.statistics.shard import ShardStatistics

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigurationError(
        "outboxio.integrations.prometheus needs prometheus-client: pip install 'outboxio[prometheus]'"
    ) from error

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from outboxio.outbox import Outbox

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The content type of :func:`metrics_text`."""


class OutboxCollector(Collector):
    """Exports the metrics of outboxes from memory.

    docs/reference/metrics.md lists the metrics. Metrics read from the tables, such as ``outboxio_due_age_seconds``, are
    exported only by the process that runs the fan-out, which reads them every 15 s once a collector exists. If a
    process has several outboxes, pass them all to one collector: a registry rejects a second collector, because metric
    names must be unique.

    Example::

        from prometheus_client import REGISTRY, start_http_server

        REGISTRY.register(OutboxCollector(outbox))
        start_http_server(9100)
    """

    def __init__(self, outbox: Outbox, *more: Outbox) -> None:
        self._sources: list[tuple[str, Mapping[str, ShardStatistics]]] = []
        for one in (outbox, *more):
            self._sources.append((one.namespace, one.statistics))
            for statistics in one.statistics.values():
                statistics.figures_wanted = True

    def describe(self) -> Iterable[Family]:
        """Return the metrics without values, so that a registry can reject duplicate names."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Return the metrics that currently have values. Only reads memory."""
        families: dict[str, Any] = {}
        for namespace, shards in self._sources:
            for sample in measure(namespace, shards):
                family = families.get(sample.metric.name)
                if family is None:
                    family = families[sample.metric.name] = _family(sample.metric)
                _add(family, sample)
        yield from families.values()


def metrics_text(outbox: Outbox, *more: Outbox) -> bytes:
    """Return the metrics in Prometheus text format, for an endpoint ``/metrics`` of type :data:`CONTENT_TYPE`.

    Example::

        async def metrics(request: Request) -> Response:
            return Response(metrics_text(outbox), media_type=CONTENT_TYPE)
    """
    registry = CollectorRegistry()
    registry.register(OutboxCollector(outbox, *more))
    return generate_latest(registry)


def _family(metric: Metric) -> Any:
    kinds: dict[str, Any] = {
        "counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily,
    }  # fmt: skip
    return kinds[metric.kind](metric.prometheus_name, metric.help, labels=metric.all_labels)


def _add(family: Any, sample: Sample) -> None:
    value = sample.value
    if isinstance(value, Histogram):
        family.add_metric(sample.labels, buckets=_cumulative(value), sum_value=value.seconds)
    else:
        family.add_metric(sample.labels, value)


def _cumulative(histogram: Histogram) -> list[tuple[str, int]]:
    """Return cumulative buckets, as Prometheus requires: each counts all values up to its bound."""
    buckets: list[tuple[str, int]] = []
    total = 0
    for bound, number in zip((*map(str, histogram.bounds), "+Inf"), tuple(histogram.buckets), strict=True):
        total += number
        buckets.append((bound, total))
    return buckets
