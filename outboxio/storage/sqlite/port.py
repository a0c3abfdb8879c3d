"""How SQLite spells the statements of ``storage/tables``, and runs them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_value
from outboxio.storage.statement import Query, Statement, Syntax, as_document, columns_of, is_document
from outboxio.support.clock import utc_now

R = TypeVar("R")

_OF_EVENTS = "sqlite_autoindex_eventlog_event_notifications_2"  # SQLite's own index of the second key

_rows = msgspec.json.Decoder(list[list[Any]]).decode


class SqliteSyntax(Syntax):
    dialect = "sqlite"

    def finished(self, text: str, statement: Statement) -> str:
        """A query returns its rows as one JSON text, because each row of its own costs a switch of threads."""
        text = text.replace("eventlog.", "eventlog_")
        if not statement.columns:
            return text
        names = ", ".join(f"c{number}" for number in range(statement.columns))
        return f"WITH found({names}) AS (\n{text}\n)\nSELECT json_group_array(json_array({names})) FROM found"

    def table(self, arguments: str) -> str:
        name, index, alias = (*arguments.split(), "", "")[:3]
        own = {"primary": f"sqlite_autoindex_eventlog_{name}_1", "event_notifications_event": _OF_EVENTS}
        forced = f"INDEXED BY {own.get(index, f'eventlog_{index}')}" if index else ""
        return " ".join(filter(None, (f"eventlog_{name}", alias and f"AS {alias}", forced)))

    def text(self, column: str) -> str:
        return column

    def json(self, value: str) -> str:
        return value

    def among(self, arguments: str) -> str:
        column, values = arguments.split()
        return f"{column} IN (SELECT value FROM json_each({values}))"

    ids = among

    def rows(self, arguments: str) -> str:
        values, name, columns = arguments.split(maxsplit=2)
        listed = ", ".join(f"json_extract(value, '$.{column}') AS {column}" for column, _ in columns_of(columns))
        return f"(SELECT {listed} FROM json_each({values})) AS {name}"

    def upsert(self, arguments: str) -> str:
        key, _, columns = arguments.partition(":")
        names = columns.partition(" from ")[0].split(",")
        return f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(f'{n.strip()} = excluded.{n.strip()}' for n in names)}"

    def keep(self, key: str) -> str:
        return f"ON CONFLICT ({key}) DO NOTHING"

    def now(self) -> str:
        return ":database_now"


SYNTAX = SqliteSyntax()


class SqlitePort:
    """The port over the connections of a database."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        arguments = _arguments(values)
        found = await self._connections.inspect(query.rendered(SYNTAX), arguments, legible=query.lenient)
        return query.rows(_rows(found))

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


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    values = {**values, "database_now": utc_now()}
    return {n: as_document(v) if isinstance(v, list) or is_document(v) else as_value(v) for n, v in values.items()}
