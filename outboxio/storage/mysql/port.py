"""Runs the statements of ``storage/tables`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from outboxio.storage.mysql.connection import MAX_BRANCHES, LoopConnection, change_rows, fetch
from outboxio.storage.mysql.flavour import FLAVOURS, Server
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

# --- jumps -----------------------------------------------------------------------------------------
#
# Jumps along an index (a loose index scan), from each value of a column to the next, no matter how many rows are in
# between.
#
# Each jump starts at the value of the previous one. A message contains many jumps, which pass the values on in
# variables. A recursive statement would read every row between two values, and so would a comparison with NULL.
#
# A *query* here reads the first value that is ``{behind}``, for example ``> 'a'``.

MIN_JUMPS, MAX_JUMPS = 8, 32  # in a message

# Greater than every value of a column: the end of the index.
END = "REPEAT(_utf8mb4 X'F48FBFBF', 255)"
_END = "\U0010ffff" * 255

_START = "%(outboxio_start)s"

Begin = tuple[str, str]
"""The operator and the value of the first jump, for example ``(">", "a")``."""

_values = msgspec.json.Decoder(list[str]).decode


async def jump(connection: Any, query: str, args: Mapping[str, Any]) -> list[str]:
    """Return all values of a column that are greater than the empty text, in the order of the index."""
    values: list[str] = []
    jumps, begin = MIN_JUMPS, (">", "")
    while True:
        found = await next_values(connection, query, args, begin, jumps)
        values += found
        if len(found) < jumps:
            return values
        jumps, begin = min(2 * jumps, MAX_JUMPS), (">", found[-1])


async def next_values(connection: Any, query: str, args: Mapping[str, Any], begin: Begin, jumps: int) -> list[str]:
    """Return the next ``jumps`` values; fewer at the end of the index."""
    relation, start = begin
    variables = [f"@outboxio_{number}" for number in range(jumps)]
    texts = [_next(query, relation, _START), *(_next(query, ">", before) for before in variables[:-1])]
    found = await _assigned(connection, variables, texts, {**args, "outboxio_start": start})
    return [value for value in found if value != _END]


STEPS = 64  # in a message

FROM_BEGINNING: Begin = (">=", "")


async def jump_together(
    connection: Any, first: str, second: str, args: Mapping[str, Any], begin: Begin
) -> tuple[list[str], Begin | None]:
    """Return the values that two columns have in common, within 64 steps, and where to continue; ``None`` at the end.

    A step jumps to the next value in the first index, and then to the same or the next value in the second index. So if
    either index has only a few values, there are only a few steps.
    """
    relation, start = begin
    ones, others = ([f"@outboxio_{kind}_{number}" for number in range(STEPS)] for kind in ("one", "other"))
    jumps = [_next(first, relation, _START)]
    for one, other in zip(ones[:-1], others[:-1], strict=True):
        jumps.append(f"IF({one} = {other}, {_next(first, '>', one)}, {_next(first, '>=', other)})")
    texts = [text for one, jump in zip(ones, jumps, strict=True) for text in (jump, _next(second, ">=", one))]
    variables = [variable for pair in zip(ones, others, strict=True) for variable in pair]
    found = await _assigned(connection, variables, texts, {**args, "outboxio_start": start})
    values = [one for one, other in zip(found[::2], found[1::2], strict=True) if one == other != _END]
    one, other = found[-2:]
    if other == _END:
        return values, None
    return values, (">", one) if one == other else (">=", other)


async def _assigned(connection: Any, variables: list[str], texts: list[str], args: Mapping[str, Any]) -> list[str]:
    """Assign the expressions to the variables in order, and return the values."""
    statements = [f"SET {variable} = {text}" for variable, text in zip(variables, texts, strict=True)]
    statements.append(f"SELECT JSON_ARRAY({', '.join(variables)})")
    [(found,)] = await fetch(connection, "; ".join(statements), args)
    return _values(found)


def _next(query: str, relation: str, value: str) -> str:
    return f"IFNULL(({query.replace('{behind}', f'{relation} {value}')}), {END})"


# --- the port --------------------------------------------------------------------------------------


R = TypeVar("R")
T = TypeVar("T")

SYNTAX = {name: MysqlSyntax(name, flavour.fragments) for name, flavour in FLAVOURS.items()}


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
            for start in range(0, len(each), MAX_BRANCHES):
                some = enumerate(each[start : start + MAX_BRANCHES])
                branches = [self.named(query, {**values, **one}, f"{number}_") for number, one in some]
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
        """Return the statement in the flavour of the server, which is known once a connection is open.

        ``prefix``: the prefix of the argument names.
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
    """Convert a value for the driver."""
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
