"""The promises of outboxio that every simulation checks, in the rows and in each change of a state."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from outboxio.handlers.options import OnDeadKey
from outboxio.outbox import Outbox
from outboxio.testing.simulation.loop import Scheduler, noted

TERMINAL = "('SUCCEEDED', 'DEAD', 'EXPIRED', 'SKIPPED')"

RECORD_WRITES = """
CREATE TABLE simulated_writes (
    id TEXT, handler TEXT, ordering_key TEXT, sequence INTEGER, before TEXT, after TEXT, process TEXT, holder TEXT,
    step INTEGER, time REAL, error TEXT, message TEXT
);
CREATE TRIGGER simulated_writes AFTER UPDATE OF state ON eventlog_event_notifications BEGIN
    INSERT INTO simulated_writes VALUES (
        new.id, new.handler_name, new.ordering_key, new.sequence, old.state, new.state, simulated_process(),
        simulated_holder(new.namespace, new.handler_name), simulated_step(), simulated_time(),
        json_extract(new.errors, '$[#-1].type'), json_extract(new.errors, '$[#-1].message')
    );
END;
CREATE TRIGGER simulated_first_terms AFTER INSERT ON eventlog_leases BEGIN SELECT simulated_raise(new.name); END;
CREATE TRIGGER simulated_terms AFTER UPDATE OF term ON eventlog_leases BEGIN SELECT simulated_raise(new.name); END;
"""

UNFINISHED = f"""
SELECT handler_name, state, attempts, json_extract(payload, '$'), json_extract(errors, '$[#-1].type'),
json_extract(errors, '$[#-1].message'), state = 'BLOCKED' AND EXISTS (
    SELECT 1 FROM eventlog_event_notifications AS dead WHERE dead.handler_name = n.handler_name
    AND dead.ordering_key = n.ordering_key AND dead.state IN ('DEAD', 'EXPIRED') AND dead.sequence < n.sequence)
FROM eventlog_event_notifications AS n WHERE state NOT IN {TERMINAL} ORDER BY sequence
"""
UNDELIVERED = """
SELECT event_type FROM eventlog_events WHERE delivered = 0 AND event_type IS NOT NULL ORDER BY sequence
"""
OUTCOMES = """
SELECT w.time, w.step, w.process, w.handler, json_extract(n.payload, '$'), w.before, w.after, w.error, w.message
FROM simulated_writes AS w JOIN eventlog_event_notifications AS n USING (id) WHERE w.before <> w.after
ORDER BY w.step, w.rowid
"""
REOPENED = """
SELECT handler, before, after, process, step FROM simulated_writes WHERE before IN ('SUCCEEDED', 'SKIPPED')
AND NOT (after IN ('PENDING', 'BLOCKED') AND EXISTS (
    SELECT 1 FROM eventlog_operations WHERE kind IN ('replay', 'retry')))
ORDER BY step
"""
OVERTAKEN = f"""
SELECT late.handler, late.ordering_key, late.process, late.step, early.step
FROM simulated_writes AS early JOIN simulated_writes AS late USING (handler, ordering_key)
WHERE late.sequence < early.sequence AND late.after IN {TERMINAL} AND early.after = 'SUCCEEDED'
AND early.step < late.step AND late.before NOT IN {TERMINAL} AND NOT EXISTS (
    SELECT 1 FROM simulated_writes AS other WHERE other.id = late.id AND other.step < early.step
    AND other.after IN {TERMINAL})
"""


def _shown(error: str | None, message: str | None, state: str) -> str:
    return f" by {error}: {message}" if error and state not in ("PENDING", "SUCCEEDED") else ""


def record_writer(
    sqlite: sqlite3.Connection,
    scheduler: Scheduler,
    name: str,
    holder: Callable[[str, str], str | None],
    raised: Callable[[str], None],
) -> None:
    """Create the SQL functions that give the triggers the writing process and its step.

    ``raised`` is called with a lease whose term rises.
    """
    sqlite.create_function("simulated_process", 0, lambda: name)
    sqlite.create_function("simulated_step", 0, lambda: scheduler.steps)
    sqlite.create_function("simulated_time", 0, lambda: scheduler.now)
    sqlite.create_function("simulated_holder", 2, holder)
    sqlite.create_function("simulated_raise", 1, raised)


class Properties:
    """Reads the database of a simulation, outside of its time and its faults."""

    def __init__(self, path: str, scheduler: Scheduler) -> None:
        self._path, self._scheduler = path, scheduler
        self._connection: sqlite3.Connection | None = None
        self._ordered: set[str] = set()
        self._parking: set[str] = set()
        """The handlers whose keys wait for an operator behind a DEAD or EXPIRED row."""
        self._types: set[str] = set()

    def add_handlers_of(self, outbox: Outbox) -> None:
        """Add the handlers of a process."""
        # The options of handlers are internal to outboxio, and so is the simulation.
        registry = outbox._handlers  # pyright: ignore[reportPrivateUsage]
        self._ordered.update(handler.name for handler in registry if handler.options.ordered)
        self._parking.update(h.name for h in registry if h.options.ordered and h.options.on_dead_key is OnDeadKey.PARK)
        self._types.update(wanted.event_type for wanted in registry.subscriptions() if wanted.event_type)

    def fetch(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        return self._opened().execute(sql, args).fetchall()

    def execute(self, sql: str, *args: Any) -> None:
        self._opened().execute(sql, args).close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def unfinished(self) -> list[str]:
        """Describe the notifications that are not terminal and the events without notifications, one sentence each."""
        found = [
            f"a notification of {handler} is {state} after {attempts} attempts: {payload}"
            + (f", the last error is {error}: {message}" if error else "")
            for handler, state, attempts, payload, error, message, is_behind in self.fetch(UNFINISHED)
            if not (is_behind and handler in self._parking)
        ]
        return found + [
            f"an event {kind} has no notifications" for (kind,) in self.fetch(UNDELIVERED) if kind in self._types
        ]

    def outcomes(self) -> list[str]:
        """Return a line of the trace for each change of a state."""
        return [
            noted(
                time, step, process, f"** {handler} with {payload}: {before} -> {after}{_shown(error, message, after)}"
            )
            for time, step, process, handler, payload, before, after, error, message in self.fetch(OUTCOMES)
        ]

    def check(self) -> None:
        """Raise AssertionError with all broken promises."""
        broken = list(self._broken())
        assert not broken, "; ".join(broken[:5])

    def _broken(self) -> Iterator[str]:
        for handler, before, after, process, step in self.fetch(REOPENED):
            yield f"a notification of {handler} went from {before} to {after}, by {process} at step {step}"
        for handler, key, process, step, earlier in self.fetch(OVERTAKEN):
            if handler in self._ordered:
                yield (
                    f"{handler}: an event of key {key!r} ended at step {step} by {process}, after a later event of the "
                    f"key, which ended at step {earlier}"
                )

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA busy_timeout = 0").close()
            record_writer(
                self._connection, self._scheduler, "scenario", lambda namespace, handler: None, lambda lease: None
            )
        return self._connection
