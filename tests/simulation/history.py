"""The history of a simulated world, in the lines that the checker of chaos runs reads."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from outboxio.dispatch.scheduler import Scheduler
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.workers import WorkerPool
from outboxio.runs.handler_transactions import HandlerTransactions
from outboxio.runs.opening import RowClaimer
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.shard_run import ShardRun
from outboxio.testing.simulation import World
from outboxio.testing.simulation.machine import Host
from tests.chaos.case import Final, Owed, Stored
from tests.chaos.history import Line
from tests.chaos.worker import Instance, watch_locks, watch_refusals, watch_runs, watch_transactions

TABLES = (
    "CREATE TABLE chaos_effects (handler TEXT, event TEXT)",
    "CREATE TABLE chaos_actions (id TEXT)",
    "CREATE TABLE chaos_keys (id TEXT PRIMARY KEY, moved INTEGER)",
    *(f"INSERT INTO chaos_keys VALUES ('{key}', 0)" for key in range(6)),
)
# An operator needs no reason.
SKIPPED = """
SELECT id FROM simulated_writes WHERE after = 'SKIPPED'
AND EXISTS (SELECT 1 FROM eventlog_operations WHERE kind IN ('skip', 'resume'))
"""


class SimulatedHistory:
    """Keeps the lines of all processes of a world. A process that is started again is another process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hosts: dict[str, Host] = {}
        self._last = 0
        self.lines: list[Line] = []

    def write(self, what: str, **details: Any) -> None:
        host = self._world.scheduler.running
        assert host is not None
        name = self.name_of(host)
        self._hosts[name] = host
        # Several lines of a step come one after the other, too.
        self._last = max(self._last + 1, int(self._world.now * 1e9))
        self.lines.append(Line(what, self._last, name, **details))

    def outside(self, what: str, time: float, **details: Any) -> None:
        """Add something that was seen in the database, with its virtual time in seconds."""
        self.lines.append(Line(what, int(time * 1e9), **details))

    def name_of(self, host: Host) -> str:
        """The process in the lines."""
        return f"{host.name}.{host.pid}"

    def end(self) -> list[Line]:
        """All lines, with the ends of the processes."""
        now = int(self._world.now * 1e9) + 1
        for name, host in self._hosts.items():
            died = now if host.died_at is None else int(host.died_at * 1e9)
            self.lines.append(Line("exit", died, how=name))
        return sorted(self.lines, key=lambda line: line.at)


class LeavingProcess:
    """Whether the process whose callback runs is shutting down, checked as in the chaos worker."""

    def __init__(self, world: World) -> None:
        self._world = world

    def is_set(self) -> bool:
        running = self._world.scheduler.running
        return any(process.host is running and process.leaving.is_set() for process in self._world.processes)


@contextmanager
def watched(world: World, history: SimulatedHistory) -> Generator[Instance]:
    """Let all outboxes write what they do to the history, as the worker of a chaos run does."""
    places = [
        (ShardRun, "lock_taken"), (ShardRun, "lock_lost"), (ShardRun, "locks_proven_until"), (LockManager, "release"),
        (LockManager, "_release_names"), (WorkerPool, "_has_time"), (Scheduler, "next_run"), (RowClaimer, "finish"),
        (HandlerTransactions, "run"), (Settler, "_refuse"),
    ]  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    instance = Instance(history, world.seed)  # type: ignore[arg-type]
    try:
        watch_locks(history, LeavingProcess(world))  # type: ignore[arg-type]
        watch_runs(instance)
        watch_transactions(instance)
        watch_refusals(history)  # type: ignore[arg-type]
        yield instance
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


def final(world: World, names: Mapping[str, str]) -> Final:
    """The rows at the end. ``names``: of handlers that were renamed, the first name."""
    skipped = {id for (id,) in world.fetch(SKIPPED)}
    return Final(
        events=[
            Stored(id=id, action=action, type=kind, cause=cause or "", delivered=bool(delivered))
            for id, action, kind, cause, delivered in world.fetch(
                "SELECT id, action_id, event_type, causation_id, delivered FROM eventlog_events"
                " WHERE event_type IS NOT NULL AND source IS NULL"  # the history lacks the events of the inbox
            )
        ],
        notifications=[
            Owed(
                id=id,
                event=event,
                handler=names.get(handler, handler),
                state=state,
                has_reason=errors not in ("[]", None) or id in skipped,
            )
            for id, event, handler, state, errors in world.fetch(
                "SELECT id, event_id, handler_name, state, errors FROM eventlog_event_notifications"
            )
        ],
        effects=list(world.fetch("SELECT handler, event FROM chaos_effects")),  # type: ignore[arg-type]
        actions=[id for (id,) in world.fetch("SELECT id FROM chaos_actions")],
    )
