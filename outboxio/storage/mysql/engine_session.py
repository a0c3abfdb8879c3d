"""Transactions on connections of a SQLAlchemy engine. SQLAlchemy ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.storage.engines.unit import Unit
from outboxio.storage.mysql import driver
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.session import MysqlSession

ENDING_TIMEOUT = 10.0  # seconds for ROLLBACK


class UnitSession(MysqlSession):
    """The transaction of a unit. SQLAlchemy sends COMMIT and ROLLBACK, so that the session's events fire."""

    _ending = ()

    def __init__(self, unit: Unit, server: Server) -> None:
        super().__init__(unit.driver, server)
        self._unit = unit

    @property
    def unit(self) -> Unit:
        return self._unit

    async def begin(self, *, soon: bool = False) -> None:
        await self._unit.begin()
        await super().begin(soon=soon)

    async def begin_reading(self) -> None:
        await self._unit.begin()
        await super().begin_reading()

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        # Releasing our savepoint, which proves the transaction, would end the savepoints that began after it.
        await self._unit.release_savepoints()
        await super().commit(action, events)

    async def rollback(self) -> None:
        self._is_to_begin = False
        # A task that the action did not await would read the response to ROLLBACK, or lose its own response.
        is_running = self._is_running or driver.reads(self._connection) is not None
        if is_running or driver.is_closed(self._connection):
            self.discard()
        else:
            async with asyncio.timeout(ENDING_TIMEOUT):
                await self._unit.rollback()

    def discard(self) -> None:
        self._unit.is_broken = True
        super().discard()

    async def _end(self) -> None:
        driver.refuse_second_reader(self._connection)
        self._server.statement_limit.begin(self._connection, self._server.on_timeout)
        try:
            await self._unit.commit()
        finally:
            self._server.statement_limit.end(self._connection)
