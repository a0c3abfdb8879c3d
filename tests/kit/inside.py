"""The only place in the tests that knows the private names of an outbox.

Each function takes the outbox and, where the outbox has several shards, the name of a shard. From ``run_of`` on the
parts exist only inside ``running()`` and during ``drain()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outboxio import Outbox, Overview, Transaction
from outboxio.dispatch.settler import Settler
from outboxio.health.notices import FindingWatch
from outboxio.locks.keyed_lock import KeyedLock
from outboxio.model.lock_name import LockName
from outboxio.model.outcome import Lease, Outcome
from outboxio.runtime.running import finding_watches
from outboxio.runtime.shard_run import ShardRun
from outboxio.telemetry import Telemetry, protocol


def shard_of(outbox: Outbox, shard: str = "default") -> Any:
    """The shard, which lasts as long as the outbox (``runtime.shard.ShardRuntime``)."""
    return outbox._shards[shard]


def database_of(outbox: Outbox, shard: str = "default") -> Any:
    """The database of a shard (``storage.protocols.Database``), with its repositories."""
    return shard_of(outbox, shard).database


def clock_of(outbox: Outbox, shard: str = "default") -> Any:
    """The clock of a shard (``support.clock.ShardClock``)."""
    return shard_of(outbox, shard).clock


def handlers_of(outbox: Outbox) -> list[Any]:
    """The registered handlers (``handlers.handler.Handler``)."""
    return list(outbox._handlers)


def owner_of(outbox: Outbox, shard: str = "default") -> str:
    """The name under which this process holds locks and sends wake-ups: host, process and a random part."""
    return str(shard_of(outbox, shard).environment.owner)


def telemetry_of_process() -> list[Telemetry]:
    """The telemetry of all outboxes of the process, such as Sentry's."""
    return list(protocol._of_process)


def session_of(tx: Transaction) -> Any:
    """The session in which a transaction is open (``storage.protocols.Session``)."""
    return tx._session


def is_running(outbox: Outbox, shard: str = "default") -> bool:
    """True between entering and leaving ``running()``, and during ``drain()``."""
    return shard_of(outbox, shard).work is not None


def run_of(outbox: Outbox, shard: str = "default") -> Any:
    """The current shard run: the loops and their components."""
    run = shard_of(outbox, shard).work
    assert run is not None, "the outbox is not running"
    return run


def locks_of(outbox: Outbox, shard: str = "default") -> Any:
    """The lock manager of the present shard run."""
    return run_of(outbox, shard).locks


def seen_owners_of(outbox: Outbox, shard: str = "default") -> set[str]:
    """The owners of partitions, as last read by the process."""
    return {lease.owner for lease in run_of(outbox, shard).membership._share._cluster.leases.values()}


def lock_sessions_of(outbox: Outbox, shard: str = "default") -> list[Any]:
    """The open sessions with keyed locks (``locks.session.LockSession``)."""
    return [session for session in outbox._locks[shard].sessions._members if session.is_open]


def locked_keys_of(outbox: Outbox, shard: str = "default") -> list[str]:
    """The keys that tasks of this process hold or wait for."""
    return [name.handler_name for name in outbox._locks[shard].queues._queues]


def connection_of(lock: KeyedLock) -> Any:
    """The driver's connection that holds a keyed lock."""
    assert lock._session is not None
    return lock._session._session._session._connection  # type: ignore[attr-defined]  # not on SQLite


def lock_loop_of(outbox: Outbox, shard: str = "default") -> Any:
    """The loop that drives the lock manager."""
    return run_of(outbox, shard).loops.locks


def fanout_of(outbox: Outbox, shard: str = "default") -> Any:
    """The fan-out of the present shard run."""
    return run_of(outbox, shard).fanout


def dispatcher_of(outbox: Outbox, shard: str = "default") -> Any:
    """The dispatcher of the present shard run."""
    return run_of(outbox, shard).dispatcher


def cursors_of(outbox: Outbox, shard: str = "default") -> dict[str, Any]:
    """The scan state of partition 0 of each stored handler name (``HandlerCursor``)."""
    cursors = dispatcher_of(outbox, shard)._cursors.by_slot
    return {name: cursor for (name, partition), cursor in cursors.items() if partition == 0}


def queues_of(outbox: Outbox, shard: str = "default") -> dict[str, Any]:
    """The rows in memory of each handler (``HandlerQueue``)."""
    return dispatcher_of(outbox, shard)._queues


def poison_guard_of(outbox: Outbox, shard: str = "default") -> Any:
    """The memory of processes that ended during a run (``PoisonGuard``)."""
    return dispatcher_of(outbox, shard)._core.guard


def report_lock_changes(taken: Callable[[LockName, Lease], None], lost: Callable[[LockName], None]) -> None:
    """Have every shard run of this process call ``taken`` and ``lost`` before it acts on a change of its locks."""
    lock_taken, lock_lost = ShardRun.lock_taken, ShardRun.lock_lost

    def report_taken(self: ShardRun, name: LockName, lease: Lease) -> None:
        taken(name, lease)
        lock_taken(self, name, lease)

    def report_lost(self: ShardRun, name: LockName) -> None:
        lost(name)
        lock_lost(self, name)

    ShardRun.lock_taken, ShardRun.lock_lost = report_taken, report_lost  # type: ignore[method-assign]


def report_outcomes(ended: Callable[[Outcome], None]) -> None:
    """Have every settler of this process call ``ended`` with each outcome, before the settler keeps the outcome."""
    add = Settler.add

    def report(self: Settler, outcome: Outcome) -> None:
        ended(outcome)
        add(self, outcome)

    Settler.add = report  # type: ignore[method-assign]


async def fresh_overview(outbox: Outbox) -> Overview:
    """``outbox.admin.overview()`` without a cache, with a complete check of the tables."""
    reader = outbox._health.overviews
    reader._read_at = float("-inf")
    for collector in reader.collectors.values():
        collector._checked_at = float("-inf")
    return await outbox.admin.overview()


def finding_watch_of(outbox: Outbox, receiver: str, deliver: Any, **options: Any) -> FindingWatch:
    """A notifier of findings, as ``running()`` makes one for each function, and ``outboxio watch`` for a webhook."""
    [watch] = finding_watches(list(outbox._shards.values()), {receiver: deliver}, **options)
    return watch


def watching_of(outbox: Outbox) -> list[Any]:
    """The tasks of the present ``running()`` that notify functions of findings."""
    running = outbox._lifecycle.running
    assert running is not None, "the outbox is not running"
    return running._watching
