"""The overview, as operators and programs read it. Moments are naive UTC, durations are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal
from uuid import UUID

from msgspec import Struct

Level = Literal["ok", "degraded", "down"]
"""``down``: nothing works, or nobody works. ``degraded``: a part needs an operator."""

MOST = 10_000
"""Every number is counted up to this bound. A number that is equal to the bound stands for the bound or more."""


class Finding(Struct, frozen=True, kw_only=True):
    """A fault, found by a rule."""

    rule: str
    """The name of the rule, which never changes: alerts, health and the runbook use the name."""
    level: Level
    sentence: str
    remedy: str
    """A command that mends the fault, or that says more."""
    handler: str | None = None
    shard: str | None = None
    job: str | None = None


class HandlerStatus(Struct, frozen=True, kw_only=True):
    """A handler of the namespace, on all shards together."""

    handler_name: str
    aliases: tuple[str, ...]
    event_types: tuple[str, ...]
    topics: tuple[str, ...]
    level: Level
    """The worst level of the findings about the handler."""
    last_seen_date: datetime | None
    """The last announcement of a process with the handler; at most 1 minute ago while such a process runs."""
    due: int
    oldest_due: float | None
    """The time for which the first due notification has waited; ``None`` if no notification is due."""
    waiting: int
    """Notifications that are due later: delayed, scheduled, or waiting for a retry."""
    deferred: int
    """Notifications that wait for a version of their event that no process that runs the handler has."""
    blocked: int
    dead: int
    """DEAD and EXPIRED notifications that retention keeps."""
    dead_hour: int
    """DEAD and EXPIRED notifications of the last hour."""
    newest_dead: datetime | None
    parked_keys: int
    paused_since: datetime | None
    holders: Mapping[str, tuple[str, ...]]
    """The processes that hold the handler, by shard."""
    unheld: Mapping[str, tuple[int, ...]]
    """The partitions that no process holds, by shard."""
    runs: int
    """Notifications that were handled in the last 5 minutes, with failures."""
    fail_share: float | None
    """The share of failures among these, 0 to 1; ``None`` without any."""
    per_minute: float
    """Successes per minute, over the last 5 minutes."""
    minutes: tuple[int, ...]
    """Successes of each of the last 60 minutes, the oldest first."""
    duration_p50: float | None
    duration_p95: float | None
    """The bound below which 95 % of the runs of the last hour ended."""
    lag_p95: float | None
    """The bound below which 95 % of the runs of the last hour began after they were due."""
    in_flight: int
    limit: int
    """The runs at the same time that all processes together allow; 0 if unknown."""
    stuck: int


class StuckRunStatus(Struct, frozen=True, kw_only=True):
    """A run that ignores its cancellation, by the report of its process."""

    handler: str
    event_id: str | None = None
    """``None`` if the event's id cannot be read."""
    since: datetime
    """The moment of the cancellation."""
    at: str = ""
    """The line of code at which the run waits."""


class InstanceStatus(Struct, frozen=True, kw_only=True):
    """A process in ``running()``, by its own report."""

    instance: str
    """The name of the process: host, process id and a random part."""
    version: str
    roles: tuple[str, ...]
    started_date: datetime
    last_seen_date: datetime
    is_alive: bool
    """False if three reports are missing."""
    loop_lag: float | None
    clock_offset: float | None
    """The wall clock of the machine minus the clock of the database."""
    in_flight: int
    stuck: int
    handlers: tuple[str, ...]
    shards: tuple[str, ...]
    stuck_runs: tuple[StuckRunStatus, ...] = ()


class ShardStatus(Struct, frozen=True, kw_only=True):
    """A shard."""

    shard: str
    is_reachable: bool
    error: str | None
    schema: str | None
    """What is wrong with the tables; ``None`` if nothing is."""
    pending: tuple[str, ...]
    """The contract files that ``outboxio migrate --contract`` would apply."""
    fanout_holder: str | None
    fanout_since: datetime | None
    undelivered: int
    """Events that wait for fan-out, of types and topics with a handler."""
    oldest_undelivered: float | None
    clock_offset: float | None
    """The wall clock of this machine minus the clock of the database."""
    took: float
    """The duration of the questions to the shard."""


class KeyStatus(Struct, frozen=True, kw_only=True):
    """A parked ordering key."""

    handler_name: str
    """The stored name of the handler."""
    ordering_key: str
    notification_id: UUID
    """The notification that parks the key: DEAD or EXPIRED."""
    event_id: UUID
    since: datetime
    blocked: int
    """The notifications that wait behind, counted up to a bound."""
    shard: str


class LockStatus(Struct, frozen=True, kw_only=True):
    """A cluster lock: fan-out of a shard, or a partition of a stored handler name."""

    shard: str
    role: Literal["fanout", "dispatch"]
    handler_name: str | None
    partition: int
    owner: str | None
    """The process that has taken the lock last, and not given back; ``None`` if the lock is free."""
    since: datetime | None
    is_alive: bool | None
    """True if the owner has reported within three delays; ``None`` without a report, or without an owner."""


class OverviewFigures(Struct, frozen=True, kw_only=True):
    """The figures of all handlers and shards together."""

    undelivered: int
    oldest_undelivered: float | None
    due: int
    oldest_due: float | None
    waiting: int
    blocked: int
    dead: int
    dead_hour: int
    parked_keys: int
    unroutable: int
    """Notifications of handlers that no process has, and notifications of event versions that no process has."""
    per_minute: float
    minutes: tuple[int, ...]
    lag_p95: float | None
    in_flight: int
    stuck: int


class Overview(Struct, frozen=True, kw_only=True):
    """The state of an outbox at a glance.

    Example::

        overview = await outbox.admin.overview()
        print(overview.level)  # degraded
        for finding in overview.findings:
            print(finding.sentence, finding.remedy)
    """

    level: Level
    verdict: list[str]
    """Sentences, the worst first. A single sentence that begins with ``All is well`` if there is no finding."""
    findings: tuple[Finding, ...]
    figures: OverviewFigures
    handlers: tuple[HandlerStatus, ...]
    """The worst first."""
    instances: tuple[InstanceStatus, ...]
    shards: tuple[ShardStatus, ...]
    namespace: str
    read_date: datetime
    """The moment of the overview, by the clock of the first shard. An overview is used again for 1 s."""
    took: float
    """The duration of the questions to all shards."""
