"""The values of ``outbox.health()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from outboxio.runtime.lifecycle import Phase

Status = Literal["ok", "degraded", "down"]
Fit = Literal["fits", "missing", "newer", "unknown"]

SEVERITY: Mapping[Status, int] = {"ok": 0, "degraded": 1, "down": 2}


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

    status: Status
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
