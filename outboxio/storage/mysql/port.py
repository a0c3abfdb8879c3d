"""Runs the statements of ``storage/tables`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from outboxio.storage.mysql.connection import MOST_BRANCHES, LoopConnection, change_rows, fetch
from outboxio.storage.mysql.flavour import FLAVOURS, Server
from outboxio.storage.mysql.jumps import jump
from outboxio.storage.statement import (
    Jumps,
    Port,
    Query,
    Runner,
    Statement,
    as_document,
    is_document,
    parameters,
    with_placeholders,
)
from outboxio.storage.syntax import MysqlSyntax
from outboxio.support.codec import is_list

R = TypeVar("R")
T = TypeVar("T")

SYNTAX = {name: MysqlSyntax(name, flavour.words) for name, flavour in FLAVOURS.items()}


class MysqlPort(Port):
    """The port over a loop's connection."""

    def __init__(self, connection: LoopConnection, server: Server) -> None:
        self._connection = connection
        self._server = server

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        return query.rows(await self._connection.use(lambda connection: self._fetch(connection, query, values)))

    async def fetch_each(self, query: Query[R], each: Sequence[Mapping[str, Any]], **values: Any) -> list[R]:
        async def work(connection: Any) -> list[tuple[Any, ...]]:
            found = list[tuple[Any, ...]]()
            for start in range(0, len(each), MOST_BRANCHES):
                some = enumerate(each[start : start + MOST_BRANCHES])
                branches = [self.named(query, {**values, **one}, f"{place}_") for place, one in some]
                sql = " UNION ALL ".join(f"({branch})" for branch, _ in branches)
                found += await fetch(connection, sql, {n: v for _, own in branches for n, v in own.items()})
            return found

        return query.rows(await self._connection.use(work)) if each else []

    async def execute(self, statement: Statement, **values: Any) -> int:
        return int(
            await self._connection.repeated(lambda connection: change_rows(connection, *self.named(statement, values)))
        )

    async def transaction(self, work: Callable[[Runner], Coroutine[Any, Any, T]]) -> T:
        result: T = await self._connection.in_transaction(lambda connection: work(_Transaction(self, connection)))
        return result

    def prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        sql = statement.rendered(SYNTAX[self._server.flavour.name])
        return with_placeholders(sql, lambda _: "%s"), [as_argument(values[name]) for name in parameters(sql)]

    async def _fetch(self, connection: Any, query: Query[Any], values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        if isinstance(query, Jumps):
            sql, arguments = self.named(query, {**values, "start": ""})
            return [(value,) for value in await jump(connection, sql.replace("> %(start)s", "{behind}"), arguments)]
        return await fetch(connection, *self.named(query, values))

    def named(self, statement: Statement, values: Mapping[str, Any], prefix: str = "") -> tuple[str, dict[str, Any]]:
        """The statement in the flavour of the server, which is known when a connection is open.

        ``prefix``: of the names of the arguments.
        """
        arguments = dict[str, Any]()

        def placeholder(name: str) -> str:
            value, name = values[name], prefix + name
            if is_list(value) and not is_document(value):
                arguments.update((f"{name}{number}", as_argument(item)) for number, item in enumerate(value))
                return ", ".join(f"%({name}{number})s" for number in range(len(value))) or "NULL"
            arguments[name] = as_argument(value)
            return f"%({name})s"

        sql = statement.rendered(SYNTAX[self._server.flavour.name])
        return with_placeholders(sql, placeholder), arguments


def as_argument(value: Any) -> Any:
    """A value as the driver takes it."""
    if is_document(value):
        return as_document(value)
    return str(value) if isinstance(value, UUID) else value


class _Transaction:
    def __init__(self, port: MysqlPort, connection: Any) -> None:
        self._port = port
        self._connection = connection

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        return query.rows(await fetch(self._connection, *self._port.named(query, values)))

    async def execute(self, statement: Statement, **values: Any) -> int:
        return await change_rows(self._connection, *self._port.named(statement, values))
