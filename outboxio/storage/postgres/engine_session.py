"""Transactions on connections of a SQLAlchemy engine. SQLAlchemy begins and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from outboxio.errors import ConfigurationError
from outboxio.storage.engines.unit import Unit
from outboxio.storage.postgres.connection import as_asyncpg
from outboxio.storage.postgres.errors import Plans
from outboxio.storage.postgres.session import ENDING_TIMEOUT, PostgresSession
from outboxio.support.aio import TimeLimit


class UnitSession(PostgresSession):
    """The transaction of a unit."""

    def __init__(self, unit: Unit, limit: TimeLimit, plans: Plans) -> None:
        super().__init__(as_asyncpg(unit.driver), limit=limit, plans=plans)
        self._unit = unit

    @property
    def unit(self) -> Unit:
        return self._unit

    async def begin(self, *, soon: bool = False) -> None:
        await self._start(_Transaction(self._unit, getattr(self._connection, "begin", None)))
        if not self._connection.is_in_transaction():
            raise ConfigurationError(
                "the engine has isolation_level='AUTOCOMMIT', which begins no transaction; create the engine with "
                "another isolation level"
            )

    async def begin_reading(self) -> None:
        await self.begin()
        await self._connection.execute("SET TRANSACTION READ ONLY")

    async def rollback(self) -> None:
        if self._is_gone():
            self.discard()
        else:
            async with asyncio.timeout(ENDING_TIMEOUT):
                await self._unit.rollback()

    def discard(self) -> None:
        self._unit.is_broken = True
        super().discard()


class _Transaction:
    """SQLAlchemy's transaction, with the methods of an asyncpg transaction."""

    def __init__(self, unit: Unit, begin: Callable[[], Awaitable[None]] | None) -> None:
        """``begin``: the ``begin`` method of a psycopg connection."""
        self._unit = unit
        self._begin = begin
        self.commit = unit.commit
        self.rollback = unit.rollback

    async def start(self) -> None:
        await self._unit.begin(self._send_begin)

    async def _send_begin(self, connection: Any) -> None:
        """Send BEGIN now, with the engine's isolation level. SQLAlchemy itself delays it until the first statement."""
        begin = self._begin or connection.connection.dbapi_connection._start_transaction
        await begin()
