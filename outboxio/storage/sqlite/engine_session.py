"""Transactions on aiosqlite connections of a SQLAlchemy engine. SQLAlchemy ends them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from outboxio.errors import ConfigurationError
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.storage.connections.checkout import CheckedOut
from outboxio.storage.engines.unit import Unit
from outboxio.storage.engines.user_engine import UserEngine
from outboxio.storage.sqlite.connection import Work, execute_when_free
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.session import SqliteSession, do_nothing
from outboxio.support.log import log_of

logger = log_of(__name__)


class UnitSession(SqliteSession):
    """The transaction of a unit. Statements of outboxio run in aiosqlite's thread."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(_ThreadOfDriver(unit.driver), do_nothing, do_nothing)
        self._unit = unit
        self._beginning = _begin

    @property
    def connection(self) -> Any:
        return self._unit.driver

    @property
    def unit(self) -> Unit:
        return self._unit

    async def begin(self, *, soon: bool = False) -> None:
        await self._unit.begin()
        await super().begin()

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        if action is not None and events:
            await self.insert_events(action, events)
        await self._unit.commit()
        self.is_open = False

    async def rollback(self) -> None:
        await self._unit.rollback()
        self.is_open = False

    def discard(self) -> None:
        self._unit.is_broken = True


class CheckedOutSession(CheckedOut[UnitSession]):
    """Takes a turn at the file, and a connection of the engine. Both are released with no transaction open."""

    def __init__(self, engine: UserEngine, connections: Connections) -> None:
        super().__init__(engine.check_out, UnitSession, _keep_error)
        self._connections = connections

    async def __aenter__(self) -> UnitSession:
        self._connections.guard.enter()
        self._turn = self._connections.turn
        await self._turn.take()
        try:
            return await super().__aenter__()
        except BaseException:
            self._turn.pass_on()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            self._turn.pass_on()


def roll_back_first(connection: Any, record: object, error: BaseException | None) -> None:
    """Roll back before the pool closes an aiosqlite connection, which SQLAlchemy does when a statement is cancelled.

    If the transaction was open, a file stays locked until all cursors of the closed connection are freed.
    """
    if not in_greenlet():
        return  # called by the garbage collector
    try:
        await_only(connection.driver_connection.rollback())
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None:
            task.cancel()  # the rollback continues in the thread; cancel the next await of the task
    except Exception as failure:
        logger.debug("ROLLBACK failed before a connection was closed: %s", failure)


class _ThreadOfDriver:
    """Runs work in the thread of an aiosqlite connection, in order with the statements of SQLAlchemy."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def submit(self, work: Work[Any]) -> Any:
        return await self._connection._execute(work, self._connection._conn)

    def run_blocking(self, work: Work[Any]) -> Any:
        # Only SqliteSession.connection calls run_blocking, and the connection of a UnitSession is the driver's.
        raise NotImplementedError("aiosqlite's thread accepts no work while the event loop is blocked; use submit()")


def _begin(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Take the write lock, unless an event listener of the engine has already begun the transaction."""
    if getattr(connection, "autocommit", None) is True:  # then the driver's commit() and rollback() do nothing
        raise ConfigurationError(
            "the engine opens connections with autocommit=True, on which SQLAlchemy cannot commit; remove this "
            "argument from connect_args"
        )
    if not connection.in_transaction:
        execute_when_free(connection, "BEGIN IMMEDIATE")
    return connection


async def _keep_error(session: UnitSession, error: BaseException) -> Exception | None:
    return None
