"""What ``outbox.admin.overview()`` and ``outbox.health()`` return. Times are naive UTC, durations are seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

from msgspec import Struct

from outboxio.support.text import cut_at_word

Level = Literal["ok", "degraded", "down"]
"""``down``: nothing works, or nobody works. ``degraded``: a part needs an operator."""

MOST = 10_000
"""Every number is counted up to this bound. A number that is equal to the bound stands for the bound or more."""


class Finding(Struct, frozen=True, kw_only=True):
    """A fault, found by a rule."""

    rule: str
    """The name of the rule, which never changes: alerts, health and the runbook use the name."""
    level: Level
    text: str
    """What is wrong, in a sentence."""
    fix: str
    """A command that fixes the fault, or that shows more."""
    handler: str | None = None
    shard: str | None = None
    job: str | None = None
    since: datetime | None = None
    """When the fault began, by the clock of the database; ``None`` if that is not known."""
    ended: datetime | None = None
    """When the fault was found no longer. Only in a finding that has ended (``outbox.on_finding``)."""


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
    limited_to: str | None = None
    """The rate of the handler, such as ``100/s``, if the rate holds notifications back."""
    reasons: Mapping[str, int] = {}
    """Its unfinished notifications by reason, as in ``admin.waiting()``; reasons without any are left out."""
    options: Mapping[str, str] | None = None
    """The options that differ from the defaults, by the newest process that runs; ``None`` if none reports any."""
    options_from: str | None = None
    """The process whose report has the options."""


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
    jobs: tuple[str, ...] = ()
    """The jobs that the process runs, because it holds their lock."""


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
    """A cluster lock: fan-out of a shard, the jobs, or a partition of a stored handler name."""

    shard: str
    name: str
    """The name of the lock as in the log, such as ``shop/dispatch/mail``."""
    role: Literal["fanout", "jobs", "dispatch"]
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
    reasons: Mapping[str, int] = {}
    """All unfinished notifications by reason, as in ``admin.waiting()``."""


class Overview(Struct, frozen=True, kw_only=True):
    """The state of an outbox at a glance.

    Example::

        overview = await outbox.admin.overview()
        print(overview.level)  # degraded
        for finding in overview.findings:
            print(finding.text, finding.fix)
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


# --- the health of a process ---------------------------------------------------------------------

Phase = Literal["stopped", "starting", "running", "leaving"]
"""The phase of ``running()``."""

Fit = Literal["fits", "missing", "newer", "unknown"]
"""How the tables of a shard fit this version of outboxio."""


class ShardHealth(Struct, frozen=True, kw_only=True):
    """A shard, as this process sees the shard.

    - ``reachable``: ``None`` if the database was not asked yet.
    - ``schema``: "fits"; "missing" if a table, a part of a table or a right is missing; "newer" if a newer outboxio has
      migrated the tables; "unknown" if the database was not asked yet.
    - ``clock_offset``: the seconds by which the clock of the database is ahead of the clock of this machine; ``None``
      if the offset is not measured, or the clock is the application's.
    - ``locks_held``, ``locks_lacking``: the cluster locks that this process holds, and the locks that it tries. A
      process without a lock is a healthy standby.
    """

    reachable: bool | None = None
    schema: Fit = "unknown"
    clock_offset: float | None = None
    locks_held: Sequence[str] = ()
    locks_lacking: Sequence[str] = ()


class LoopHealth(Struct, frozen=True, kw_only=True):
    """A loop of ``running()``.

    - ``last_round_age``: the seconds since the end of the last round; ``None`` before the first end.
    - ``failures``: the failed rounds since the last good round.
    - ``waits_for_database``: True if a round goes on, and waits for an answer of the database.
    """

    last_round_age: float | None = None
    failures: int = 0
    waits_for_database: bool = False


class Health(Struct, frozen=True, kw_only=True):
    """The health of an outbox in this process, and of the tables that the outbox works on.

    - ``status``: "ok"; "degraded" if a part needs attention; "down" if nothing works.
    - ``live``: False if this process has to be restarted: its event loop does not answer for 5 s, or a task of
      ``running()`` has ended. A database that is down, a backlog, dead letters and lacking locks leave it True.
    - ``ready``: True inside ``running()``, if the tables of a shard fit and the shard has answered within 30 s. False
      as soon as the outbox is left.
    - ``reasons``: why the process is not live, not ready, or not "ok", the worst reason first. Empty if all is well.
    - ``phase``: "stopped", "starting", "running" or "leaving".
    - ``shards``, ``loops``: by the name of the shard, and by the name of the loop.
    - ``lag``: the age of the oldest event without notifications, in seconds.
    - ``oldest_due``: for how many seconds the oldest due notification of a handler has waited, by handler name.
    - ``stuck``: the rows of runs that ignore their cancellation, in this process.
    - ``unroutable``: the notifications for a handler, or for a version of their event, that no process has.

    ``None``: the figure is not known.
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


# --- counts and durations in sentences -----------------------------------------------------------

_UNITS = (("s", 60.0), ("min", 60.0), ("h", 24.0))
_MOST_NAMED = 3
_LONGEST_ERROR = 120  # characters


def counted(number: int, most: int = MOST) -> str:
    """A number that was counted up to a bound: ``8,211``, or ``10,000+``."""
    return f"{most:,}+" if number >= most else f"{number:,}"


def quantity(number: int, noun: str, most: int = MOST) -> str:
    """A number with its noun: ``1 key``, ``2 keys``."""
    return f"{counted(number, most)} {noun}{'' if number == 1 else 's'}"


def waiting(number: int, noun: str, most: int = MOST) -> str:
    """What waits: ``1 event waits``, ``2 events wait``."""
    return f"{quantity(number, noun, most)} {'waits' if number == 1 else 'wait'}"


def spoken(seconds: float) -> str:
    """A duration, as exact as a person needs: ``0.4 s``, ``14 min``, ``3 h``, ``2 days``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size in _UNITS:
        if round(seconds) < 2 * size:
            return f"{round(seconds)} {unit}"
        seconds /= size
    return f"{round(seconds)} days"


def past(seconds: float) -> str:
    """How long ago a moment is, as exact as a person needs: ``just now``, ``4 s ago``, ``14 min ago``."""
    if seconds < 1:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 10 else f"{spoken(seconds)} ago"


def brief(error: str) -> str:
    """An error in a line of at most 120 characters, without a full stop, for the end of a sentence."""
    return cut_at_word(" ".join(error.split()).rstrip("."), _LONGEST_ERROR)


def listed(names: Sequence[str]) -> str:
    """Names: ``a``, ``b``, ``c`` and 2 more."""
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
