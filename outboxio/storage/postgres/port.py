"""How PostgreSQL spells the statements of ``storage/tables``, and runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.statement import Query, Statement, Syntax, as_document, columns_of, is_document, numbered

R = TypeVar("R")

_TYPES = {"document": "text", "bool": "boolean", "id": "uuid"}


class PostgresSyntax(Syntax):
    dialect = "postgres"

    def table(self, arguments: str) -> str:
        # The settings of a loop's connection leave the planner no other index.
        name, _, alias = (*arguments.split(), "", "")[:3]
        return f"eventlog.{name} {alias}".rstrip()

    def text(self, column: str) -> str:
        return f"{column}::text"

    def json(self, value: str) -> str:
        return f"{value}::text::jsonb"

    def among(self, arguments: str) -> str:
        column, values = arguments.split()
        return f"{column} = ANY ({values}::text[])"

    def ids(self, arguments: str) -> str:
        column, values = arguments.split()
        return f"{column} = ANY ({values}::text[]::uuid[])"

    def rows(self, arguments: str) -> str:
        values, name, columns = arguments.split(maxsplit=2)
        listed = ", ".join(f"{column} {_TYPES.get(kind, kind)}" for column, kind in columns_of(columns))
        return f"json_to_recordset({values}::text::json) AS {name}({listed})"

    def upsert(self, arguments: str) -> str:
        key, _, columns = arguments.partition(":")
        names = columns.partition(" from ")[0].split(",")
        return f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(f'{n.strip()} = excluded.{n.strip()}' for n in names)}"

    def keep(self, key: str) -> str:
        return f"ON CONFLICT ({key}) DO NOTHING"

    def now(self) -> str:
        return "(clock_timestamp() AT TIME ZONE 'UTC')"


SYNTAX = PostgresSyntax()


class PostgresPort:
    """The port over a loop's connection."""

    def __init__(self, connection: LoopConnection) -> None:
        self._connection = connection

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        sql, arguments = self._prepared(query, values)
        return query.rows(await self._connection.fetch(sql, *arguments))

    async def execute(self, statement: Statement, **values: Any) -> int:
        sql, arguments = self._prepared(statement, values)
        return await self._connection.execute(sql, *arguments)

    async def change_and_fetch(self, change: Statement, query: Query[R], **values: Any) -> list[R]:
        async def work(connection: Any) -> list[Any]:
            sql, arguments = self._prepared(change, values)
            if not row_count(await connection.execute(sql, *arguments)):
                return []
            sql, arguments = self._prepared(query, values)
            return list(await connection.fetch(sql, *arguments))

        return query.rows(await self._connection.in_transaction(work, timeout=self._connection.timeout))

    def _prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        sql, names = numbered(statement.rendered(SYNTAX))
        return sql, [self._argument(values[name]) for name in names]

    def _argument(self, value: Any) -> Any:
        if is_document(value):
            return self._connection.encoding.escaped_in_json(as_document(value))
        return [str(item) for item in value] if isinstance(value, list) else value
