"""Runs the statements of ``storage/tables`` on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.statement import Port, Query, Runner, Statement, as_document, is_document, numbered
from outboxio.storage.syntax import PostgresSyntax
from outboxio.support.codec import is_list

R = TypeVar("R")
T = TypeVar("T")

SYNTAX = PostgresSyntax()

_PLAIN = {str, int, float, bool, type(None), datetime, UUID}


class PostgresPort(Port):
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

    async def transaction(self, work: Callable[[Runner], Coroutine[Any, Any, T]]) -> T:
        result: T = await self._connection.in_transaction(
            lambda connection: work(_Transaction(self, connection)), timeout=self._connection.timeout
        )
        return result

    def prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        sql, names = numbered(statement.rendered(SYNTAX))
        return sql, [v if type(v := values[name]) in _PLAIN else self._argument(v) for name in names]

    def _argument(self, value: Any) -> Any:
        if is_document(value):
            return self._connection.encoding.escaped_in_json(as_document(value))
        return [str(item) for item in value] if is_list(value) else value


class _Transaction:
    def __init__(self, port: PostgresPort, connection: Any) -> None:
        self._port = port
        self._connection = connection

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        sql, arguments = self._port.prepared(query, values)
        return query.rows(await self._connection.fetch(sql, *arguments))

    async def execute(self, statement: Statement, **values: Any) -> int:
        sql, arguments = self._port.prepared(statement, values)
        return row_count(await self._connection.execute(sql, *arguments))
