"""Runs the statements of ``storage/tables`` on PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.statement import Query, Statement, as_document, is_document, numbered
from outboxio.storage.syntax import PostgresSyntax

R = TypeVar("R")

SYNTAX = PostgresSyntax()

_PLAIN = {str, int, float, bool, type(None), datetime, UUID}


class PostgresPort:
    """The port over a loop's connection."""

    def __init__(self, connection: LoopConnection) -> None:
        self._connection = connection

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        sql, names = numbered(query.texts.get(SYNTAX) or query.rendered(SYNTAX))
        arguments = [v if type(v := values[name]) in _PLAIN else self._argument(v) for name in names]
        found = await self._connection.fetch(sql, *arguments)
        return query.rows(found) if found else []

    async def fetch_each(self, query: Query[R], each: Sequence[Mapping[str, Any]], **values: Any) -> list[R]:
        return await self.fetch(query, each=list(each), **values) if each else []

    async def execute(self, statement: Statement, **values: Any) -> int:
        sql, arguments = self.prepared(statement, values)
        return await self._connection.execute(sql, *arguments)

    async def change_and_fetch(self, change: Statement, query: Query[R], **values: Any) -> list[R]:
        async def work(connection: Any) -> list[Any]:
            sql, arguments = self.prepared(change, values)
            if not row_count(await connection.execute(sql, *arguments)):
                return []
            sql, arguments = self.prepared(query, values)
            return list(await connection.fetch(sql, *arguments))

        return query.rows(await self._connection.in_transaction(work, timeout=self._connection.timeout))

    def prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        sql, names = numbered(statement.rendered(SYNTAX))
        return sql, [v if type(v := values[name]) in _PLAIN else self._argument(v) for name in names]

    def _argument(self, value: Any) -> Any:
        if is_document(value):
            return self._connection.encoding.escaped_in_json(as_document(value))
        return [str(item) for item in value] if isinstance(value, list) else value
