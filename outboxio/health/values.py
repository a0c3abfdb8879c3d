"""The results of ``outbox.admin.overview()`` and ``outbox.health()``. Times are naive UTC, durations are seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

from msgspec import Struct

from outboxio.support.text import cut_at_word

Level = Literal["ok", "degraded", "down"]
"""``down``: nothing works, or no process runs. ``degraded``: something needs an operator."""

MOST = 10_000
"""Counts stop here: 10,000 means 10,000 or more."""


class Finding(Struct, frozen=True, kw_only=True):
    """A fault that a rule has found."""

    rule: str
    """The name of the rule, which never changes, because alerts, health and the runbook use it."""
    level: Level
    text: str
    """What is wrong, in a sentence."""
    fix: str
    """A command that fixes the fault or shows more about it."""
    handler: str | None = None
    shard: str | None = None
    job: str | None = None
    since: datetime | None = None
    """When the fault began, by the database clock; ``None`` if unknown."""
    ended: datetime | None = None
    """When the fault was found to be gone. Set only in a finding that has ended (``outbox.on_finding``)."""


class HandlerStatus(Struct, frozen=True, kw_only=True):
    """A handler of the namespace, across all shards."""

    handler_name: str
    aliases: tuple[str, ...]
    event_types: tuple[str, ...]
    topics: tuple[str, ...]
    level: Level
    """The worst level of the findings about the handler."""
    last_seen_date: datetime | None
    """When a process last announced the handler; at most 1 minute ago while such a process runs."""
    due: int
    oldest_due: float | None
    """How long the oldest due notification has waited; ``None`` if none is due."""
    waiting: int
    """Notifications that are not due yet: delayed, scheduled, or waiting for a retry."""
    blocked: int
    dead: int
    """DEAD and EXPIRED notifications that have not been purged yet."""
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
    """Notifications handled in the last 5 minutes, including failures."""
    fail_share: float | None
    """The share of failures among ``runs``, from 0 to 1; ``None`` if there were no runs."""
    per_minute: float
    """Successes per minute, over the last 5 minutes."""
    minutes: tuple[int, ...]
    """Successes in each of the last 60 minutes, oldest first."""
    duration_p50: float | None
    duration_p95: float | None
    """The 95th percentile of the durations of the last hour's runs."""
    lag_p95: float | None
    """The 95th percentile of the delivery lag of the last hour's runs."""
    in_flight: int
    limit: int
    """The maximum number of concurrent runs in all processes together; 0 if unknown."""
    stuck: int
    limited_to: str | None = None
    """The rate of the handler, such as ``100/s``, if it is currently limiting the handler."""
    reasons: Mapping[str, int] = {}
    """Its unfinished notifications by reason, as in ``admin.waiting()``; reasons with a count of 0 are omitted."""
    options: Mapping[str, str] | None = None
    """Options that differ from the defaults, as reported by the newest process; ``None`` if no process reports any."""
    options_from: str | None = None
    """The process that reported the options."""


class StuckRunStatus(Struct, frozen=True, kw_only=True):
    """A run that ignores its cancellation, as reported by its process."""

    handler: str
    event_id: str | None = None
    """``None`` if the event's id cannot be read."""
    since: datetime
    """When the run was cancelled."""
    at: str = ""
    """The line of code that the run is waiting at."""


class InstanceStatus(Struct, frozen=True, kw_only=True):
    """A process in ``running()``, according to its report."""

    instance: str
    """The name of the process: host, process id and a random part."""
    version: str
    roles: tuple[str, ...]
    started_date: datetime
    last_seen_date: datetime
    is_alive: bool
    """False if the process missed three reports."""
    loop_lag: float | None
    clock_offset: float | None
    """The wall clock of the machine minus the database clock."""
    in_flight: int
    stuck: int
    handlers: tuple[str, ...]
    shards: tuple[str, ...]
    stuck_runs: tuple[StuckRunStatus, ...] = ()
    jobs: tuple[str, ...] = ()
    """The jobs that the process runs, because it holds their lock."""


class ShardStatus(Struct, frozen=True, kw_only=True):
    """A shard."""

    shard: str
    is_reachable: bool
    error: str | None
    schema: str | None
    """What is wrong with the tables; ``None`` if they are correct."""
    pending: tuple[str, ...]
    """The contract files that ``outboxio migrate --contract`` would apply."""
    fanout_holder: str | None
    fanout_since: datetime | None
    undelivered: int
    """Events waiting for fan-out that have a subscribed handler."""
    oldest_undelivered: float | None
    clock_offset: float | None
    """The wall clock of this machine minus the database clock."""
    took: float
    """The duration of the queries to the shard."""


class KeyStatus(Struct, frozen=True, kw_only=True):
    """A parked ordering key."""

    handler_name: str
    """The stored name of the handler."""
    ordering_key: str
    notification_id: UUID
    """The DEAD or EXPIRED notification that parks the key."""
    event_id: UUID
    since: datetime
    blocked: int
    """The number of notifications waiting behind it, counted up to a bound."""
    shard: str


class LockStatus(Struct, frozen=True, kw_only=True):
    """A cluster lock: fan-out of a shard, the jobs, or a partition of a stored handler name."""

    shard: str
    name: str
    """The name of the lock in log records, such as ``shop/dispatch/mail``."""
    role: Literal["fanout", "jobs", "dispatch"]
    handler_name: str | None
    partition: int
    owner: str | None
    """The last process that acquired the lock and has not released it; ``None`` if the lock is free."""
    since: datetime | None
    is_alive: bool | None
    """True if the owner missed fewer than three reports; ``None`` without a report or an owner."""


class OverviewFigures(Struct, frozen=True, kw_only=True):
    """The totals for all handlers and shards."""

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
    """Notifications whose handler or event version no process has."""
    per_minute: float
    minutes: tuple[int, ...]
    lag_p95: float | None
    in_flight: int
    stuck: int
    reasons: Mapping[str, int] = {}
    """All unfinished notifications by reason, as in ``admin.waiting()``."""


class Overview(Struct, frozen=True, kw_only=True):
    """The state of an outbox.

    Example::

        overview = await outbox.admin.overview()
        print(overview.level)  # degraded
        for finding in overview.findings:
            print(finding.text, finding.fix)
    """

    level: Level
    verdict: list[str]
    """The texts of the findings, worst first; without findings, a single text that starts with ``All is well``."""
    findings: tuple[Finding, ...]
    figures: OverviewFigures
    handlers: tuple[HandlerStatus, ...]
    """Worst first."""
    instances: tuple[InstanceStatus, ...]
    shards: tuple[ShardStatus, ...]
    namespace: str
    read_date: datetime
    """When the overview was read, by the clock of the first shard. An overview is cached for 1 s."""
    took: float
    """The duration of the queries to all shards."""


# --- the health of a process ---------------------------------------------------------------------

Phase = Literal["stopped", "starting", "running", "leaving"]
"""The phase of ``running()``."""

Fit = Literal["fits", "missing", "newer", "unknown"]
"""Whether the tables of a shard match this version of outboxio."""


class ShardHealth(Struct, frozen=True, kw_only=True):
    """The state of a shard, as seen by this process.

    - ``reachable``: ``None`` if the database has not been queried yet.
    - ``schema``: "fits"; "missing" if a table, a part of a table or a privilege is missing; "newer" if a newer outboxio
      has migrated the tables; "unknown" if the database has not been queried yet.
    - ``clock_offset``: the seconds by which the database clock is ahead of this machine's clock; ``None`` if it has not
      been measured, or if your application supplies the clock.
    - ``locks_held``, ``locks_lacking``: the cluster locks that this process holds, and those that it is trying to
      acquire. A process that holds no lock is a healthy standby.
    """

    reachable: bool | None = None
    schema: Fit = "unknown"
    clock_offset: float | None = None
    locks_held: Sequence[str] = ()
    locks_lacking: Sequence[str] = ()


class LoopHealth(Struct, frozen=True, kw_only=True):
    """A loop of ``running()``.

    - ``last_round_age``: the seconds since the end of the last round; ``None`` before the first round has ended.
    - ``failures``: the failed rounds since the last successful round.
    - ``waits_for_database``: True if a round is waiting for the database.
    """

    last_round_age: float | None = None
    failures: int = 0
    waits_for_database: bool = False


class Health(Struct, frozen=True, kw_only=True):
    """The health of an outbox in this process, and of its tables.

    - ``status``: "ok"; "degraded" if a part needs attention; "down" if nothing works.
    - ``live``: False if this process must be restarted: its event loop has not responded for 5 s, or a task of
      ``running()`` has ended. Still True with an unreachable database, a backlog, dead letters or missing locks.
    - ``ready``: True inside ``running()``, if the tables of a shard match and the shard has answered within 30 s. False
      as soon as the process begins to leave ``running()``.
    - ``reasons``: why the process is not live, not ready or not "ok", worst first. Empty if all is well.
    - ``phase``: "stopped", "starting", "running" or "leaving".
    - ``shards``, ``loops``: by name.
    - ``lag``: the age of the oldest event without notifications, in seconds.
    - ``oldest_due``: how long the oldest due notification has waited, in seconds, by handler name.
    - ``stuck``: the notifications in this process whose runs ignore their cancellation.
    - ``unroutable``: the notifications whose handler or event version no process has.

    Figures that are not known are ``None``.
    """

    status: Level
    live: bool
    ready: bool
    reasons: Sequence[str]
    phase: Phase
    shards: Mapping[str, ShardHealth]
    loops: Mapping[str, LoopHealth]
    lag: float | None = None
    oldest_due: Mapping[str, float] = {}
    stuck: int = 0
    unroutable: int | None = None


# --- counts and durations as text ----------------------------------------------------------------

_UNITS = (("s", 60.0), ("min", 60.0), ("h", 24.0))
_MOST_NAMED = 3
_LONGEST_ERROR = 120  # characters


def counted(number: int, most: int = MOST) -> str:
    """Format a number that was counted up to a bound: ``8,211``, or ``10,000+``."""
    return f"{most:,}+" if number >= most else f"{number:,}"


def quantity(number: int, noun: str, most: int = MOST) -> str:
    """Format a number with its noun: ``1 key``, ``2 keys``."""
    return f"{counted(number, most)} {noun}{'' if number == 1 else 's'}"


def waiting(number: int, noun: str, most: int = MOST) -> str:
    """Format a number with its noun and verb: ``1 event waits``, ``2 events wait``."""
    return f"{quantity(number, noun, most)} {'waits' if number == 1 else 'wait'}"


def human_duration(seconds: float) -> str:
    """Format a rounded duration: ``0.4 s``, ``14 min``, ``3 h``, ``2 days``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size in _UNITS:
        if round(seconds) < 2 * size:
            return f"{round(seconds)} {unit}"
        seconds /= size
    return f"{round(seconds)} days"


def past(seconds: float) -> str:
    """Format a rounded time in the past: ``just now``, ``4 s ago``, ``14 min ago``."""
    if seconds < 1:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 10 else f"{human_duration(seconds)} ago"


def brief(error: str) -> str:
    """Shorten an error to one line of at most 120 characters without a full stop, for the end of a sentence."""
    return cut_at_word(" ".join(error.split()).rstrip("."), _LONGEST_ERROR)


def listed(names: Sequence[str]) -> str:
    """Format a list of names: ``a``, ``b``, ``c`` and 2 more."""
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
