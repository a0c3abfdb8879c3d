"""Metrics: the names, units and labels under which the statistics leave the process.

One table serves Prometheus and OpenTelemetry. :func:`measure` reads the present values from memory, from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from outboxio.statistics.buckets import Histogram
from outboxio.statistics.figures import Figures
from outboxio.statistics.handlers import OUTCOMES, HandlerStatistics
from outboxio.statistics.shard import ShardStatistics

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Metric(Struct, frozen=True):
    """A metric. The labels ``namespace`` and ``shard`` come before ``labels``."""

    name: str
    """The name in OpenTelemetry."""
    kind: Kind
    unit: str
    """``s``, or the counted thing in braces, as OpenTelemetry wants."""
    labels: Labels
    help: str

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


def _metric(name: str, kind: Kind, unit: str, labels: str, help: str) -> Metric:
    return Metric(name, kind, unit, tuple(labels.split()), help)


PROCESS_DURATION = _metric(
    "messaging.process.duration", "histogram", "s", "handler outcome error_type",
    "Duration of the runs of a handler. A batch is a single run.",
)  # fmt: skip
SENT = _metric(
    "messaging.client.sent.messages", "counter", "{message}", "event_type", "Events that this process has written."
)
CONSUMED = _metric(
    "messaging.client.consumed.messages", "counter", "{message}", "handler outcome",
    "Notifications by the outcome of a run, or of their end without a run. A failed notification is retried.",
)  # fmt: skip
OPERATION_DURATION = _metric(
    "messaging.client.operation.duration", "histogram", "s", "operation",
    "Duration of writing: send is the insert of events with its COMMIT, settle the write of equal outcomes.",
)  # fmt: skip
LAG = _metric(
    "outboxio.delivery.lag", "histogram", "s", "handler",
    "Time from the moment at which a notification was due to the start of its run.",
)  # fmt: skip
FANOUT_LAG = _metric(
    "outboxio.fanout.lag", "histogram", "s", "",
    "Time from a commit of this process to the end of the fan-out round that follows, once for each round.",
)  # fmt: skip
FANNED_OUT = _metric("outboxio.fanout.events", "counter", "{event}", "", "Events that this process has fanned out.")
DUE = _metric("outboxio.notifications.due", "gauge", "{notification}", "handler", "Notifications that are due now.")
RETRYING = _metric(
    "outboxio.notifications.retrying", "gauge", "{notification}", "handler",
    "Notifications that are due later: they wait for a retry, or for their moment.",
)  # fmt: skip
DEAD = _metric(
    "outboxio.notifications.dead", "gauge", "{notification}", "handler",
    "DEAD and EXPIRED notifications that retention still keeps.",
)  # fmt: skip
DEAD_RECENTLY = _metric(
    "outboxio.notifications.dead_recently", "gauge", "{notification}", "handler",
    "DEAD and EXPIRED notifications that ended within the last hour.",
)  # fmt: skip
BLOCKED = _metric(
    "outboxio.notifications.blocked", "gauge", "{notification}", "handler",
    "Notifications that wait behind others of their ordering key.",
)  # fmt: skip
DUE_AGE = _metric(
    "outboxio.due.age", "gauge", "s", "handler", "Time for which the oldest due notification has been due."
)
KEYS_PARKED = _metric(
    "outboxio.keys.parked", "gauge", "{key}", "handler", "Ordering keys that wait for the decision of an operator."
)
UNDELIVERED = _metric(
    "outboxio.events.undelivered",
    "gauge",
    "{event}",
    "",
    "Events that wait for fan-out, of types that a handler wants.",
)
UNWANTED = _metric(
    "outboxio.events.unwanted", "gauge", "{event}", "", "Events that wait, of types that no handler wants."
)
UNDELIVERED_AGE = _metric(
    "outboxio.undelivered.age", "gauge", "s", "", "Time for which the oldest of these events has waited."
)
UNROUTABLE = _metric(
    "outboxio.unroutable", "gauge", "{notification}", "",
    "Notifications for handlers that no process announces any more, and resting notifications.",
)  # fmt: skip
ACTIVE = _metric("outboxio.runs.active", "gauge", "{run}", "handler", "Runs that go on in this process.")
STUCK = _metric("outboxio.runs.stuck", "gauge", "{run}", "handler", "Runs that ignore their cancellation.")
LIMIT = _metric("outboxio.runs.limit", "gauge", "{run}", "handler", "Runs at the same time in this process, at most.")
ALERT_AGE = _metric(
    "outboxio.alert.age", "gauge", "s", "handler",
    "Age of the oldest due notification from which the handler counts as behind.",
)  # fmt: skip
PAUSED = _metric("outboxio.paused", "gauge", "{handler}", "handler", "1 if an operator has paused the handler.")
REFUSED = _metric(
    "outboxio.outcomes.refused", "counter", "{outcome}", "",
    "Outcomes that were not written, because another process holds the handler, or the row is settled.",
)  # fmt: skip
LOOP_FAILURES = _metric("outboxio.loop.failures", "counter", "{round}", "loop", "Rounds of a loop that failed.")
LOCK_CHANGES = _metric(
    "outboxio.lock.changes", "counter", "{change}", "lock", "How often this process has taken or lost a cluster lock."
)
LOCK_HELD = _metric(
    "outboxio.lock.held", "gauge", "{lock}", "lock",
    "Cluster locks that this process holds: fanout, or dispatch/ and the handler, one for each partition.",
)  # fmt: skip
RUNNING = _metric(
    "outboxio.running", "gauge", "{process}", "role", "1 while this process is in running() with this role."
)
LOOP_LAG = _metric(
    "outboxio.loop.lag", "gauge", "s", "",
    "Longest time in the last 15 s that the event loop needed to answer; one value for all shards of a process.",
)  # fmt: skip
STANDSTILLS = _metric(
    "outboxio.loop.standstills", "counter", "{standstill}", "",
    "How often the event loop stood still for about a second or longer.",
)  # fmt: skip
POOL_USED = _metric(
    "outboxio.pool.used", "gauge", "{connection}", "", "Connections of the pool that actions and handlers have in use."
)
PURGED = _metric("outboxio.purge.rows", "counter", "{row}", "kind", "Rows that retention has removed, by table.")
ACTIONS = _metric(
    "outboxio.actions", "counter", "{action}", "action outcome",
    "Transactions of actions: committed, refused (rolled back), or unknown (the connection was lost during COMMIT).",
)  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order in which they are exported."""

FIGURES = (
    DUE,
    RETRYING,
    DEAD,
    DEAD_RECENTLY,
    BLOCKED,
    DUE_AGE,
    KEYS_PARKED,
    UNDELIVERED,
    UNDELIVERED_AGE,
    UNWANTED,
    UNROUTABLE,
)
"""The metrics of the tables, which only the holder of the fan-out lock exports."""


def measure(namespace: str, shards: Mapping[str, ShardStatistics]) -> Iterator[Sample]:
    """The present values of an outbox. Only metrics with a value are there."""
    for shard, statistics in shards.items():
        for metric, labels, value in _of_shard(statistics):
            yield Sample(metric, (namespace, shard, *labels), value)


_Value = tuple[Metric, Labels, "float | Histogram"]


def _of_shard(shard: ShardStatistics) -> Iterator[_Value]:
    for name, handler in list(shard.handlers.items()):
        yield from _of_handler(name, handler)
    yield from _counted(SENT, shard.sent)
    yield OPERATION_DURATION, ("send",), shard.sends
    yield OPERATION_DURATION, ("settle",), shard.settles
    yield FANOUT_LAG, (), shard.fanout_lag
    yield FANNED_OUT, (), shard.fanned_out
    yield REFUSED, (), shard.refused
    yield STANDSTILLS, (), shard.standstills
    yield from _counted(LOOP_FAILURES, shard.loop_failures)
    yield from _counted(LOCK_CHANGES, shard.lock_changes)
    yield from _counted(LOCK_HELD, shard.locks_held)
    yield from _counted(PURGED, shard.purged)
    for (action, outcome), number in list(shard.actions.items()):
        yield ACTIONS, (action, outcome), number
    yield from _of_run(shard)


def _of_handler(name: str, handler: HandlerStatistics) -> Iterator[_Value]:
    yield PROCESS_DURATION, (name, "succeeded", ""), handler.successes
    for (outcome, error_type), histogram in list(handler.failures.items()):
        yield PROCESS_DURATION, (name, outcome, error_type), histogram
    for outcome in OUTCOMES:
        yield CONSUMED, (name, outcome), getattr(handler, outcome)
    yield LAG, (name,), handler.lag
    yield ACTIVE, (name,), handler.in_flight
    yield STUCK, (name,), handler.stuck
    if (queue := handler.queue) is not None:
        yield LIMIT, (name,), queue.limit
    if handler.alert_age is not None:
        yield ALERT_AGE, (name,), handler.alert_age


def _of_run(shard: ShardStatistics) -> Iterator[_Value]:
    live = shard.live
    if live is None:
        return
    for role in live.roles:
        yield RUNNING, (role,), 1
    paused = live.paused
    for name in list(shard.handlers):
        yield PAUSED, (name,), int(name in paused)
    yield LOOP_LAG, (), live.loop_lag
    yield POOL_USED, (), live.connections_in_use
    if (figures := shard.figures) is not None:
        yield from _of_tables(figures)


def _of_tables(figures: Figures) -> Iterable[_Value]:
    for name, handler in figures.handlers.items():
        label = (name,)
        yield DUE, label, handler.due
        yield RETRYING, label, handler.retrying
        yield DEAD, label, handler.dead
        yield DEAD_RECENTLY, label, handler.dead_recently
        yield BLOCKED, label, handler.blocked
        yield DUE_AGE, label, handler.due_age
        yield KEYS_PARKED, label, handler.parked_keys
    yield UNDELIVERED, (), figures.undelivered
    yield UNDELIVERED_AGE, (), figures.undelivered_age
    yield UNWANTED, (), figures.unwanted
    yield UNROUTABLE, (), figures.unroutable


def _counted(metric: Metric, counts: Mapping[str, int]) -> Iterator[_Value]:
    for label, number in list(counts.items()):
        yield metric, (label,), number
