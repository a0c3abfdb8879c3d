"""Metrics: their names, units and labels, and how each value is read from the statistics.

:data:`METRICS` is used for Prometheus and OpenTelemetry. :func:`measure` reads the current values from memory, from any
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Literal

from msgspec import Struct

from outboxio.statistics.figures import Figures, Histogram
from outboxio.statistics.handlers import JOB_OUTCOMES, OUTCOMES, JobStatistics
from outboxio.statistics.shard import Live, ShardStatistics

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, "float | Histogram"]]
"""The values of a metric on a shard, each with the values of the metric's own labels."""


class Metric(Struct, frozen=True):
    """A metric. The labels ``namespace`` and ``shard`` come before ``labels``."""

    name: str
    """The name in OpenTelemetry."""
    kind: Kind
    unit: str
    """``s``, or the counted thing in braces, as OpenTelemetry requires."""
    labels: Labels
    help: str
    read: Callable[[ShardStatistics], Values]

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus, without the suffix ``_total`` of counters."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")

    @property
    def all_labels(self) -> Labels:
        """The labels in the order of the values of a :class:`Sample`."""
        return ("namespace", "shard", *self.labels)


class Sample(Struct, frozen=True):
    """A value of a metric."""

    metric: Metric
    labels: Labels
    """The values of ``namespace``, ``shard`` and the labels of the metric."""
    value: float | Histogram


def measure(namespace: str, shards: Mapping[str, ShardStatistics]) -> Iterator[Sample]:
    """Yield the current values of an outbox, without metrics that have no value."""
    for metric in METRICS:
        for shard, statistics in shards.items():
            for labels, value in metric.read(statistics):
                yield Sample(metric, (namespace, shard, *labels), value)


# --- how each value is read -----------------------------------------------------------------------

Read = Callable[[ShardStatistics], Values]


def _field(field: str) -> Read:
    get = attrgetter(field)
    return lambda shard: [((), get(shard))]


def _counts(field: str) -> Read:
    """Read a value for each key of a mapping."""
    get = attrgetter(field)

    def read(shard: ShardStatistics) -> Values:
        counts: Mapping[str | Labels, int] = get(shard)
        return [(key if isinstance(key, tuple) else (key,), value) for key, value in list(counts.items())]

    return read


def _of_handlers(field: str) -> Read:
    """Read a value for each handler that has one."""
    get = attrgetter(field)
    return lambda shard: [
        ((name,), value) for name, handler in list(shard.handlers.items()) if (value := get(handler)) is not None
    ]


def _of_run(read: Callable[[Live, ShardStatistics], Values]) -> Read:
    """Read values of the current shard run."""
    return lambda shard: () if (live := shard.live) is None else read(live, shard)


def _of_tables(read: Callable[[Figures], Values]) -> Read:
    """Read values from the figures of the tables."""
    return _of_run(lambda live, shard: () if (figures := shard.figures) is None else read(figures))


def _durations(shard: ShardStatistics) -> Values:
    for name, handler in list(shard.handlers.items()):
        yield (name, "succeeded", ""), handler.successes
        for (outcome, error_type), histogram in list(handler.failures.items()):
            yield (name, outcome, error_type), histogram


def _consumed(shard: ShardStatistics) -> Values:
    for name, handler in list(shard.handlers.items()):
        for outcome in OUTCOMES:
            yield (name, outcome), getattr(handler, outcome)


def _paused(live: Live, shard: ShardStatistics) -> Values:
    paused = live.paused
    return [((name,), int(name in paused)) for name in list(shard.handlers)]


# --- the table -----------------------------------------------------------------------------------


def _metric(name: str, kind: Kind, unit: str, labels: str, read: Read, help: str) -> Metric:
    return Metric(name, kind, unit, tuple(labels.split()), help, read)


def _handler_gauge(name: str, unit: str, field: str, help: str) -> Metric:
    return _metric(name, "gauge", unit, "handler", _of_handlers(field), help)


def _figure(name: str, unit: str, field: str, help: str) -> Metric:
    get = attrgetter(field)
    return _metric(name, "gauge", unit, "", _of_tables(lambda figures: [((), get(figures))]), help)


def _handler_figure(name: str, unit: str, field: str, help: str) -> Metric:
    get = attrgetter(field)
    read = _of_tables(lambda figures: [((handler,), get(one)) for handler, one in figures.handlers.items()])
    return _metric(name, "gauge", unit, "handler", read, help)


def _jobs(get: Callable[[JobStatistics], float]) -> Read:
    """Read a value for each job of this process."""
    return lambda shard: [((name,), get(job)) for name, job in list(shard.jobs.by_name.items())]


def _job_runs(shard: ShardStatistics) -> Values:
    for name, job in list(shard.jobs.by_name.items()):
        for outcome in JOB_OUTCOMES:
            yield (name, outcome), job.runs(outcome)


def _job_durations(shard: ShardStatistics) -> Values:
    for name, job in list(shard.jobs.by_name.items()):
        for outcome, durations in job.durations.items():
            yield (name, outcome), durations


def _job_figure(name: str, unit: str, field: str, help: str) -> Metric:
    get = attrgetter(field)
    read = _of_tables(lambda figures: [((job,), float(get(one))) for job, one in figures.jobs.items()])
    return _metric(name, "gauge", unit, "job", read, help)


# fmt: off
PROCESS_DURATION = _metric(
    "messaging.process.duration", "histogram", "s", "handler outcome error_type", _durations,
    "Duration of the runs of a handler. A batch is a single run.")
SENT = _metric(
    "messaging.client.sent.messages", "counter", "{message}", "event_type", _counts("sent"),
    "Events written by this process. Types that are not in its code count as other.")
CONSUMED = _metric(
    "messaging.client.consumed.messages", "counter", "{message}", "handler outcome", _consumed,
    "Notifications by outcome, with or without a run. A failed notification is retried.")
OPERATION_DURATION = _metric(
    "messaging.client.operation.duration", "histogram", "s", "operation",
    lambda shard: [(("send",), shard.sends), (("settle",), shard.settles)],
    "Duration of writes: send is the INSERT of events with its COMMIT, settle the write of equal outcomes.")
LAG = _metric(
    "outboxio.delivery.lag", "histogram", "s", "handler", _of_handlers("lag"),
    "Time from when a notification was due to when its run started.")
FANOUT_LAG = _metric(
    "outboxio.fanout.lag", "histogram", "s", "", _field("fanout_lag"),
    "Time from a commit of this process to the end of the next fan-out round, once per round.")
KEYED_LOCK_WAIT = _metric(
    "outboxio.keyed_lock.wait", "histogram", "s", "", _field("keyed_locks.waits"),
    "Time to acquire a lock of outbox.lock().")

JOB_DURATION = _metric(
    "outboxio.job.duration", "histogram", "s", "job outcome", _job_durations, "Duration of the runs of a job.")

JOB_FIGURES: tuple[Metric, ...] = (
    _metric(
        "outboxio.notifications.waiting", "gauge", "{notification}", "handler reason",
        _of_tables(lambda figures: figures.waiting.items()),
        "Unfinished notifications by the reason why they are waiting."),
    _job_figure(
        "outboxio.job.due.age", "s", "due_age",
        "How long a job has been due without a run; 0 while the job waits, runs or is paused."),
    _job_figure(
        "outboxio.job.failing", "{job}", "failing",
        "1 if the last run of a job failed and no attempts are left."),
    _job_figure("outboxio.job.paused", "{job}", "paused", "1 if an operator has paused the job."),
)

FIGURES: tuple[Metric, ...] = (
    _handler_figure("outboxio.notifications.due", "{notification}", "due", "Notifications that are due now."),
    _handler_figure(
        "outboxio.notifications.retrying", "{notification}", "retrying",
        "Notifications that are due later: they wait for a retry or for their scheduled time."),
    _handler_figure(
        "outboxio.notifications.dead", "{notification}", "dead",
        "DEAD and EXPIRED notifications that retention still keeps."),
    _handler_figure(
        "outboxio.notifications.dead_recently", "{notification}", "dead_recently",
        "DEAD and EXPIRED notifications that ended within the last hour."),
    _handler_figure(
        "outboxio.notifications.blocked", "{notification}", "blocked",
        "Notifications that wait for an earlier one of their ordering key."),
    _handler_figure(
        "outboxio.due.age", "s", "due_age", "How long the oldest due notification has been due."),
    _handler_figure(
        "outboxio.keys.parked", "{key}", "parked_keys", "Ordering keys that are parked until an operator decides."),
    _figure(
        "outboxio.events.undelivered", "{event}", "undelivered",
        "Events that wait for fan-out and have a subscribed handler."),
    _figure(
        "outboxio.undelivered.age", "s", "undelivered_age",
        "How long the oldest event with a subscribed handler has waited for fan-out."),
    _figure("outboxio.events.unwanted", "{event}", "unwanted", "Waiting events without a subscribed handler."),
    _figure(
        "outboxio.unroutable", "{notification}", "unroutable",
        "Notifications whose handler or event version no process has."),
    *JOB_FIGURES,
)
"""The metrics of the tables, which only the holder of the fan-out lock exports."""

METRICS: tuple[Metric, ...] = (
    PROCESS_DURATION, SENT, CONSUMED, OPERATION_DURATION, LAG, FANOUT_LAG, JOB_DURATION,
    _metric(
        "outboxio.job.runs", "counter", "{run}", "job outcome", _job_runs,
        "Runs of a job: succeeded, failed, timed_out, or interrupted when the process ended."),
    _metric(
        "outboxio.job.missed", "counter", "{time}", "job", _jobs(lambda job: job.missed),
        "Scheduled times of a job that were missed."),
    _metric(
        "outboxio.job.stuck", "gauge", "{run}", "job", _jobs(lambda job: job.stuck),
        "Runs of a job that ignore their cancellation."),
    _metric(
        "outboxio.fanout.events", "counter", "{event}", "", _field("fanned_out"),
        "Events that this process has fanned out."),
    *FIGURES,
    _handler_gauge("outboxio.runs.active", "{run}", "in_flight", "Active runs in this process."),
    _handler_gauge("outboxio.runs.stuck", "{run}", "stuck", "Runs that ignore their cancellation."),
    _metric(
        "outboxio.runs.unavailable", "counter", "{run}", "handler", _of_handlers("unavailable"),
        "Runs that found a service unavailable, which opens the circuit breaker of the handler."),
    _handler_gauge("outboxio.runs.limit", "{run}", "limit", "Maximum number of concurrent runs in this process."),
    _handler_gauge(
        "outboxio.alert.age", "s", "alert_age",
        "Age of the oldest due notification above which the handler counts as behind."),
    _metric(
        "outboxio.paused", "gauge", "{handler}", "handler", _of_run(_paused),
        "1 if an operator has paused the handler."),
    _metric(
        "outboxio.outcomes.refused", "counter", "{outcome}", "", _field("refused"),
        "Outcomes that were not written because another process holds the handler, or the row is already settled."),
    _metric(
        "outboxio.loop.failures", "counter", "{round}", "loop", _counts("loop_failures"),
        "Failed rounds of a loop."),
    _metric(
        "outboxio.lock.changes", "counter", "{change}", "lock", _counts("lock_changes"),
        "How often this process has acquired or lost a cluster lock."),
    _metric(
        "outboxio.lock.held", "gauge", "{lock}", "lock", _counts("locks_held"),
        "Cluster locks held by this process: fanout, or dispatch/ and the handler, one per partition."),
    KEYED_LOCK_WAIT,
    _metric(
        "outboxio.keyed_lock.held", "gauge", "{lock}", "", _field("keyed_locks.held"),
        "Locks of outbox.lock() held by this process."),
    _metric(
        "outboxio.keyed_lock.waiting", "gauge", "{task}", "", _field("keyed_locks.waiting"),
        "Tasks of this process that wait for a lock of outbox.lock()."),
    _metric(
        "outboxio.keyed_lock.timeouts", "counter", "{request}", "", _field("keyed_locks.timeouts"),
        "Requests for a lock of outbox.lock() that timed out."),
    _metric(
        "outboxio.keyed_lock.lost", "counter", "{lock}", "", _field("keyed_locks.lost"),
        "Locks of outbox.lock() that were lost because their session ended."),
    _metric(
        "outboxio.running", "gauge", "{process}", "role",
        _of_run(lambda live, shard: [((role,), 1) for role in live.roles]),
        "1 while this process is in running() with this role."),
    _metric(
        "outboxio.loop.lag", "gauge", "s", "", _of_run(lambda live, shard: [((), live.loop_lag)]),
        "Longest response time of the event loop in the last 15 s; one value for all shards of a process."),
    _metric(
        "outboxio.loop.standstills", "counter", "{standstill}", "", _field("standstills"),
        "How often the event loop was blocked for about a second or longer."),
    _metric(
        "outboxio.pool.used", "gauge", "{connection}", "", _of_run(lambda live, shard: [((), live.connections_in_use)]),
        "Pool connections in use by actions and handlers."),
    _metric(
        "outboxio.purge.rows", "counter", "{row}", "kind", _counts("purged"),
        "Rows removed by retention, by table."),
    _metric(
        "outboxio.actions", "counter", "{action}", "action outcome", _counts("actions"),
        "Transactions of actions: committed, refused (rolled back), or unknown (the connection was lost during COMMIT)."
    ),
)
"""All metrics, in the order in which they are exported."""
# fmt: on
