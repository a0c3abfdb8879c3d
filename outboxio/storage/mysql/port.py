"""Runs the statements of ``storage/tables`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import UUID

from outboxio.storage.mysql.connection import LoopConnection, execute, fetch
from outboxio.storage.mysql.flavour import FLAVOURS, Server
from outboxio.storage.statement import (
    Query,
    Statement,
    as_document,
    is_document,
    with_placeholders,
)
from outboxio.storage.syntax import MysqlSyntax

R = TypeVar("R")

SYNTAX = {name: MysqlSyntax(flavour.words) for name, flavour in FLAVOURS.items()}


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
