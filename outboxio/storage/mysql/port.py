"""How MySQL and MariaDB spell the statements of ``storage/tables``, and run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import UUID

from outboxio.storage.mysql.connection import LoopConnection, execute, fetch
from outboxio.storage.mysql.flavour import FLAVOURS, Flavour, Server
from outboxio.storage.statement import (
    Query,
    Statement,
    Syntax,
    as_document,
    columns_of,
    is_document,
    with_placeholders,
)

R = TypeVar("R")

_TYPES = {"int": "INT", "bigint": "BIGINT", "bool": "BOOLEAN", "timestamp": "DATETIME(6)"}


class MysqlSyntax(Syntax):
    dialect = "mysql"

    def __init__(self, flavour: Flavour) -> None:
        self._words = flavour.words
        self._types = {**_TYPES, "text": flavour.words["text"], "document": flavour.words["document"]}
        self._types["id"] = flavour.words["id"]

    def replacement(self, marker: Any) -> str:
        if marker[2] is None and marker[1] in self._words:
            return self._words[marker[1]]
        return super().replacement(marker)

    def table(self, arguments: str) -> str:
        name, index, alias = (*arguments.split(), "", "")[:3]
        forced = f"FORCE INDEX ({'PRIMARY' if index == 'primary' else index})" if index else ""
        return " ".join(filter(None, (f"eventlog.{name}", alias, forced)))

    def text(self, column: str) -> str:
        return column

    def json(self, value: str) -> str:
        return value

    def among(self, arguments: str) -> str:
        column, values = arguments.split()
        return f"{column} IN ({values})"

    ids = among

    def rows(self, arguments: str) -> str:
        values, name, columns = arguments.split(maxsplit=2)
        listed = ", ".join(f"{column} {self._types[kind]} PATH '$.{column}'" for column, kind in columns_of(columns))
        return f"JSON_TABLE({values}, '$[*]' COLUMNS ({listed})) {name}"

    def upsert(self, arguments: str) -> str:
        _, _, columns = arguments.partition(":")
        names, _, table = columns.partition(" from ")
        source = f"{table}." if table else ":"
        return f"ON DUPLICATE KEY UPDATE {', '.join(f'{n.strip()} = {source}{n.strip()}' for n in names.split(','))}"

    def keep(self, key: str) -> str:
        column = key.partition(",")[0]
        return f"ON DUPLICATE KEY UPDATE {column} = VALUES({column})"  # changes nothing

    def now(self) -> str:
        return "UTC_TIMESTAMP(6)"


SYNTAX = {name: MysqlSyntax(flavour) for name, flavour in FLAVOURS.items()}


class MysqlPort:
    """The port over a loop's connection."""

    def __init__(self, connection: LoopConnection, server: Server) -> None:
        self._connection = connection
        self._server = server

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        return query.rows(await self._connection.use(lambda connection: self._fetch(connection, query, values)))

    async def execute(self, statement: Statement, **values: Any) -> int:
        return int(
            await self._connection.repeated(lambda connection: execute(connection, *self._prepared(statement, values)))
        )

    async def change_and_fetch(self, change: Statement, query: Query[R], **values: Any) -> list[R]:
        async def work(connection: Any) -> list[Any]:
            changed = await execute(connection, *self._prepared(change, values))
            return await self._fetch(connection, query, values) if changed else []

        return query.rows(await self._connection.in_transaction(work))

    async def _fetch(self, connection: Any, query: Query[Any], values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return await fetch(connection, *self._prepared(query, values))

    def _prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The statement in the flavour of the server, which is known when a connection is open."""
        arguments = dict[str, Any]()

        def placeholder(name: str) -> str:
            value = values[name]
            if isinstance(value, list) and not is_document(value):
                arguments.update((f"{name}{number}", as_argument(item)) for number, item in enumerate(value))
                return ", ".join(f"%({name}{number})s" for number in range(len(value)))
            arguments[name] = as_argument(value)
            return f"%({name})s"

        sql = statement.rendered(SYNTAX[self._server.flavour.name])
        return with_placeholders(sql, placeholder), arguments


def as_argument(value: Any) -> Any:
    """A value as the driver takes it."""
    if is_document(value):
        return as_document(value)
    return str(value) if isinstance(value, UUID) else value
