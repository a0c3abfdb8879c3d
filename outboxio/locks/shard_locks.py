"""The keyed locks of a shard: the lines of this process, the lock sessions, and the rows of the fencing terms."""

from __future__ import annotations

import asyncio

from outboxio.actions.nesting import refuse_in_transaction
from outboxio.locks.lines import Lines
from outboxio.locks.sessions import LockSessions, Process
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.lock_name import LockName
from outboxio.settings import Settings
from outboxio.statistics.keyed_locks import KeyedLockStatistics
from outboxio.storage.protocols import Database

TERM_ROWS = 64  # rows in leases for the terms of all keys of a namespace, because keys are without number


class ShardLocks:
    """What the keyed locks of a shard share."""

    def __init__(
        self,
        outbox: object,
        process: Process,
        database: Database,
        settings: Settings,
        guard: EventLoopGuard,
        statistics: KeyedLockStatistics,
    ) -> None:
        """``outbox``: recognises a call inside a transaction of the same outbox."""
        self.namespace = process.namespace
        self.shard = database.name
        self.statistics = statistics
        self.lines = Lines()
        heartbeat = settings.lock_heartbeat.total_seconds()
        self.sessions = LockSessions(database, process, settings.lock_sessions, heartbeat)
        self._outbox = outbox
        self._has_one_writer = database.has_one_writer
        self._guard = guard
        guard.when_taken_over(self._begin_anew)

    def _begin_anew(self) -> None:
        self.lines = Lines()
        self.statistics.held = self.statistics.waiting = 0
        self.sessions.begin_anew()

    def enter(self) -> asyncio.AbstractEventLoop:
        """Bind the outbox to the running event loop."""
        return self._guard.enter()

    def refuse_term_in_transaction(self) -> None:
        """Raise :class:`WaitsForItself` inside a transaction on a database with a single writer."""
        if self._has_one_writer:
            remedy = "ask for the term before the transaction begins"
            refuse_in_transaction(self._outbox, "lock.term()", remedy, [self.shard])

    def term_row(self, name: LockName) -> str:
        """The row of the fencing term: keys share ``TERM_ROWS`` rows, by the digest of the key."""
        return LockName(self.namespace, "lock", partition=1 + name.digest[0] % TERM_ROWS).lease
