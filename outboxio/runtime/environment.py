"""The parts of an outbox that all shards share, and the roles of a process.

:class:`OwnConnections` wraps an open connection of the caller in a session, for ``Outbox.record`` and the inbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Any

from msgspec import Struct

from outboxio.actions.executor import WritableShard
from outboxio.errors import ConfigurationError, NoTransaction
from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import DeadHook
from outboxio.jobs.job import JobSpec
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.envelope import Execute, Join
from outboxio.model.lock_name import LockName, channel_name
from outboxio.model.redaction import Redact
from outboxio.settings import Settings
from outboxio.storage.protocols import Session
from outboxio.support.ids import ProcessName
from outboxio.telemetry.protocol import TelemetryChoice


class Roles(Struct, frozen=True):
    """The kinds of work that a process does in ``running()``."""

    fanout: bool
    handling: bool


class Drained(Struct, frozen=True):
    """The work of a ``drain()`` in this process: events that were fanned out, and notifications by outcome."""

    fanned_out: int
    succeeded: int
    failed: int
    expired: int
    dead: int


class Environment(Struct, frozen=True, kw_only=True):
    """The parts of an outbox that all shards share."""

    namespace: str
    handlers: HandlerRegistry
    jobs: Mapping[str, JobSpec]
    settings: Settings
    process: ProcessName
    outbox: object
    execute: Execute
    join: Join
    resources: Any = None
    redact: Redact
    telemetry: TelemetryChoice
    on_dead: DeadHook | None = None

    @property
    def names(self) -> Iterator[str]:
        """The names from your code that are stored in the tables."""
        yield self.namespace
        yield from self.jobs
        for one in self.handlers.subscriptions():
            yield from (one.handler_name, *filter(None, (one.event_type, one.topic)), *one.aliases)

    @property
    def owner(self) -> str:
        """The name of this process and outbox, in ``leases`` and in wake-ups."""
        return self.process.text

    @property
    def channel(self) -> str:
        """The channel of the wake-ups between processes."""
        return channel_name(self.namespace)

    @property
    def fanout_lock(self) -> LockName:
        return LockName(self.namespace, "fanout")

    @property
    def jobs_lock(self) -> LockName:
        """The lock for which processes with the same jobs compete."""
        names = "\0".join(sorted(self.jobs)).encode()
        return LockName(self.namespace, "jobs", sha256(names).hexdigest()[:16])

    @property
    def may_share(self) -> bool:
        """True if the code shares handlers among processes. An operator may enable sharing later."""
        return self.settings.balance == "all" or any(
            handler.options.declared_partitions > 1 for handler in self.handlers
        )

    @property
    def longest_block(self) -> float:
        """For how many seconds a blocked event loop keeps the locks: as long as a handler may run."""
        timeouts = [handler.options.timeout or self.settings.handler_timeout for handler in self.handlers]
        longest: timedelta = max(timeouts, default=self.settings.handler_timeout)
        return max(longest, self.settings.lock_heartbeat).total_seconds()


class OwnConnections:
    """Wraps connections of the caller in sessions. It never closes a connection."""

    def __init__(self, guard: EventLoopGuard) -> None:
        self._guard = guard

    async def session_on(self, target: WritableShard, connection: Any) -> Session:
        """Return a session in the open transaction of the connection. See ``Outbox.record`` for the errors."""
        self._guard.enter()
        driver = await _unwrap_sqlalchemy(connection)
        session = target.database.wrap(driver)
        if session is None:
            found = f"{type(connection).__module__}.{type(connection).__qualname__}"
            if driver is not connection:
                found += f" over {type(driver).__module__.partition('.')[0]}"
            raise ConfigurationError(
                f"record() was given {found}, but shard {target.database.name!r} is a {target.database.dialect} "
                "database; pass a connection of its driver (asyncpg, psycopg.AsyncConnection, aiomysql, asyncmy, "
                "aiosqlite or sqlite3)"
            )
        if not session.in_transaction():
            raise NoTransaction(connection)
        await target.database.require_same_database(driver)
        return session


async def _unwrap_sqlalchemy(connection: Any) -> Any:
    """Return the driver connection of a SQLAlchemy session or connection; any other object unchanged."""
    if is_of_sqlalchemy(connection):
        from outboxio.integrations.sqlalchemy import driver_connection

        return await driver_connection(connection)
    return connection


def is_of_sqlalchemy(target: Any) -> bool:
    """Return True for an object of SQLAlchemy, which need not be installed."""
    return type(target).__module__.startswith("sqlalchemy.") or hasattr(target, "sync_session")
