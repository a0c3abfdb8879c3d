"""OpenTelemetry metrics: instruments that read the statistics when they are collected (decision 40).

OpenTelemetry has no observable histogram. So each value is recorded when it occurs, which takes 16 us per run; a batch
is a single run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry.metrics import (
    CallbackOptions,
    Meter,
    MeterProvider,
    Observation,
    get_meter_provider,
)
from opentelemetry.metrics import Histogram as Instrument

from outboxio.integrations.opentelemetry import names
from outboxio.model.outcome import Outcome
from outboxio.statistics import metrics as catalog
from outboxio.statistics.figures import DURATIONS, LAGS, Histogram
from outboxio.statistics.handlers import HandlerStatistics, JobStatistics
from outboxio.statistics.metrics import METRICS, Metric, Sample, measure
from outboxio.statistics.shard import ShardStatistics
from outboxio.version import __version__

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

Attributes = dict[str, str]

FRESH = 0.05  # seconds for which one measurement serves all instruments of a collection

_OF_CONVENTIONS = {
    "handler": names.SUBSCRIPTION, "event_type": names.DESTINATION, "operation": names.OPERATION_NAME,
    "error_type": names.ERROR_TYPE,
}  # fmt: skip
_OPERATIONS = {catalog.PROCESS_DURATION: "process", catalog.CONSUMED: "process", catalog.SENT: "send"}


_OF_DURATIONS = (catalog.PROCESS_DURATION, catalog.OPERATION_DURATION, catalog.JOB_DURATION)


class OutboxMetrics:
    """OpenTelemetry instruments for the statistics of any number of outboxes.

    Example::

        metrics = OutboxMetrics(meter_provider)
        metrics.add(outbox)
    """

    def __init__(self, meter_provider: MeterProvider | None = None, *, histograms: bool = True) -> None:
        """``meter_provider``: by default the global provider of the process.

        ``histograms=False`` leaves out durations and lags, for example if Prometheus exports them.
        """
        provider = get_meter_provider() if meter_provider is None else meter_provider
        meter = provider.get_meter(names.INSTRUMENTATION, __version__, names.SCHEMA_URL)
        self._sources: list[tuple[str, Mapping[str, ShardStatistics]]] = []
        self._measured: Mapping[Metric, Sequence[Sample]] = {}
        self._measured_at = float("-inf")
        self._histograms: dict[Metric, Instrument] = {}
        for metric in METRICS:
            if metric.kind != "histogram":
                self._observe(meter, metric)
            elif histograms:
                bounds = DURATIONS if metric in _OF_DURATIONS else LAGS
                self._histograms[metric] = meter.create_histogram(
                    metric.name, metric.unit, metric.help, explicit_bucket_boundaries_advisory=bounds
                )

    def add(self, outbox: Outbox) -> None:
        """Export the metrics of an outbox. Call it before ``running()``: histograms miss the handlers that have run."""
        self._sources.append((outbox.namespace, outbox.statistics))
        for shard, statistics in outbox.statistics.items():
            statistics.figures_wanted = True
            if self._histograms:
                self._listen(statistics, {names.NAMESPACE: outbox.namespace, names.SHARD: shard})

    # --- read at collection ----------------------------------------------------------------------

    def _observe(self, meter: Meter, metric: Metric) -> None:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(_number(sample), attributes_of(sample)) for sample in self._samples(metric)]

        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(metric.name, [observe], metric.unit, metric.help)

    def _samples(self, metric: Metric) -> Sequence[Sample]:
        now = time.monotonic()
        if now - self._measured_at > FRESH:
            measured: dict[Metric, list[Sample]] = {}
            for namespace, shards in self._sources:
                for sample in measure(namespace, shards):
                    measured.setdefault(sample.metric, []).append(sample)
            self._measured, self._measured_at = measured, now
        return self._measured.get(metric, ())

    # --- recorded when they occur ----------------------------------------------------------------

    def _listen(self, statistics: ShardStatistics, place: Attributes) -> None:
        def recorded(metric: Metric, bounds: Sequence[float], **labels: str) -> RecordedHistogram:
            attributes = place | _attributes(metric, labels)
            return RecordedHistogram(bounds, self._histograms[metric], attributes)

        statistics.new_handler = lambda name: RecordedStatistics(name, recorded)
        statistics.jobs.new = lambda name: JobStatistics(
            lambda outcome: recorded(catalog.JOB_DURATION, DURATIONS, job=name, outcome=outcome)
        )
        statistics.sends = recorded(catalog.OPERATION_DURATION, DURATIONS, operation="send")
        statistics.settles = recorded(catalog.OPERATION_DURATION, DURATIONS, operation="settle")
        statistics.fanout_lag = recorded(catalog.FANOUT_LAG, LAGS)
        statistics.keyed_locks.waits = recorded(catalog.KEYED_LOCK_WAIT, DURATIONS)


class RecordedHistogram(Histogram):
    """A histogram that also records each value in OpenTelemetry."""

    __slots__ = ("_attributes", "_instrument")

    def __init__(self, bounds: Sequence[float], instrument: Instrument, attributes: Attributes) -> None:
        super().__init__(bounds)
        self._instrument = instrument
        self._attributes = attributes

    def add(self, seconds: float) -> None:
        super().add(seconds)
        self._instrument.record(seconds, self._attributes)


class RecordedStatistics(HandlerStatistics):
    """The statistics of a handler, with histograms that are recorded in OpenTelemetry."""

    __slots__ = ("_name", "_new")

    def __init__(self, name: str, new: Callable[..., RecordedHistogram]) -> None:
        self._name = name
        self._new = new
        super().__init__()

    def ended(self, outcome: Outcome, lag_us: int, seconds: float) -> None:
        kind = self.count(outcome)
        durations = self.successes if kind == "succeeded" else self.durations_of(kind, outcome.error_type)
        durations.add(seconds)
        self.lag.add(max(0, lag_us) * 1e-6)

    def new_durations(self, outcome: str, error_type: str) -> Histogram:
        labels = {"handler": self._name, "outcome": outcome}
        if error_type:
            labels["error_type"] = error_type
        return self._new(catalog.PROCESS_DURATION, DURATIONS, **labels)

    def new_lag(self) -> Histogram:
        return self._new(catalog.LAG, LAGS, handler=self._name)


def attributes_of(sample: Sample) -> Attributes:
    """Return the attributes of a value: those of the messaging conventions, and ``outboxio.*`` for all others."""
    namespace, shard, *values = sample.labels
    labels = dict(zip(sample.metric.labels, values, strict=True))
    return {names.NAMESPACE: namespace, names.SHARD: shard} | _attributes(sample.metric, labels)


def _attributes(metric: Metric, labels: Mapping[str, str]) -> Attributes:
    if "handler" in labels and labels.get("outcome") == "failed":
        labels = {**labels, "outcome": names.RETRY}  # as in spans
    if not metric.name.startswith("messaging."):
        return {f"outboxio.{label}": value for label, value in labels.items()}
    attributes = {names.MESSAGING_SYSTEM: names.SYSTEM}
    if (operation := _OPERATIONS.get(metric)) is not None:
        attributes[names.OPERATION_NAME] = operation
    return attributes | {_OF_CONVENTIONS.get(label, f"outboxio.{label}"): value for label, value in labels.items()}


def _number(sample: Sample) -> float:
    return 0.0 if isinstance(sample.value, Histogram) else sample.value
