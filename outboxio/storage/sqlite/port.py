"""Runs the statements of ``storage/tables`` on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_value
from outboxio.storage.statement import Query, Statement, as_document, is_document, numbered
from outboxio.storage.syntax import SqliteSyntax
from outboxio.support.clock import utc_now

R = TypeVar("R")

_rows = msgspec.json.Decoder(list[list[Any]]).decode


SYNTAX = SqliteSyntax()


class SqlitePort:
    """The port over the connections of a database."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        arguments = _arguments(values)
        found = await self._connections.inspect(query.rendered(SYNTAX), arguments, legible=query.lenient)
        return query.rows(_rows(found))

    async def fetch_each(self, query: Query[R], each: Sequence[Mapping[str, Any]], **values: Any) -> list[R]:
        if not each:
            return []
        sql = query.rendered(SYNTAX)
        found = await self._connections.inspect_each([(sql, _arguments({**values, **one})) for one in each])
        return query.rows(row for rows in found for row in _rows(rows))

    async def execute(self, statement: Statement, **values: Any) -> int:
        if statement.needs is not None and not await self.fetch(statement.needs, **values):
            return 0
        return await self._connections.write(statement.rendered(SYNTAX), _arguments(values))

    async def change_and_fetch(self, change: Statement, query: Query[R], **values: Any) -> list[R]:
        arguments = _arguments(values)

        def work(connection: sqlite3.Connection) -> str:
            changed = connection.execute(change.rendered(SYNTAX), arguments).rowcount
            return fetch_value(connection, query.rendered(SYNTAX), arguments) if changed else "[]"

        return query.rows(_rows(await self._connections.transact(work)))

    def prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        (sql, names), arguments = numbered(statement.rendered(SYNTAX)), _arguments(values)
        return sql, [arguments[name] for name in names]


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    values = {**values, "database_now": utc_now()}
    return {n: as_document(v) if isinstance(v, list) or is_document(v) else as_value(v) for n, v in values.items()}
