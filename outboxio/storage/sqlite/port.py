"""Runs the statements of ``storage/tables`` on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from outboxio.storage.sqlite.connection import fetch_lenient, fetch_value, result_of
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_value
from outboxio.storage.statement import Port, Query, Runner, Statement, as_document, is_document, numbered
from outboxio.storage.syntax import SqliteSyntax

R = TypeVar("R")
T = TypeVar("T")

_rows = msgspec.json.Decoder(list[list[Any]]).decode


SYNTAX = SqliteSyntax()

_NONE = "[]"
_PLAIN = {str, int, float, type(None)}


class SqlitePort(Port):
    """The port over the connections of a database."""

    def __init__(self, connections: Connections, *, is_of_loops: bool = False) -> None:
        """``is_of_loops``: the queries are short, and do not wait for queries of operators."""
        self._connections = connections
        self._may_be_long = not is_of_loops

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        sql = query.texts.get(SYNTAX) or query.rendered(SYNTAX)
        run = fetch_lenient if query.lenient else fetch_value
        work = partial(run, sql=sql, parameters=_arguments(values))
        found = await self._connections.read(work, may_be_long=self._may_be_long)
        return query.rows(_rows(found)) if found != _NONE else []

    async def fetch_each(self, query: Query[R], each: Sequence[Mapping[str, Any]], **values: Any) -> list[R]:
        if not each:
            return []
        sql, arguments = query.rendered(SYNTAX), [_arguments({**values, **one}) for one in each]

        def work(connection: sqlite3.Connection) -> list[Any]:
            return [fetch_value(connection, sql, one) for one in arguments]

        found = await self._connections.read(work, may_be_long=self._may_be_long)
        return query.rows([row for rows in found for row in _rows(rows)])

    async def execute(self, statement: Statement, **values: Any) -> int:
        if statement.needs is not None and not await self.fetch(statement.needs, **values):
            return 0
        sql = statement.rendered(SYNTAX)
        return await self._connections.write(sql, _arguments(values))

    async def transaction(self, work: Callable[[Runner], Coroutine[Any, Any, T]]) -> T:
        return await self._connections.transact(lambda connection: result_of(work(_Transaction(connection))))

    def prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        sql, names = numbered(statement.rendered(SYNTAX))
        arguments = _arguments(values)
        return sql, [arguments[name] for name in names]


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if type(value) in _PLAIN else _argument(value) for name, value in values.items()}


def _argument(value: Any) -> Any:
    return as_document(value) if isinstance(value, list) or is_document(value) else as_value(value)


class _Transaction:
    """The statements of a transaction. Both methods block, and run in the thread of the connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        return query.rows(_rows(fetch_value(self._connection, query.rendered(SYNTAX), _arguments(values))))

    async def execute(self, statement: Statement, **values: Any) -> int:
        return self._connection.execute(statement.rendered(SYNTAX), _arguments(values)).rowcount
