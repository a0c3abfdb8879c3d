"""Jumps along an index from each value of a column to the next value, whatever the number of rows between.

Each jump starts at the value of the jump before, so that many jumps go in a single message, from variable to variable.
A recursive statement would read every row between two values, and so would a comparison with NULL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outboxio.storage.mysql.connection import fetch

FEWEST_JUMPS, MOST_JUMPS = 8, 32  # in a message

# Greater than every value of a column: the end of the index.
_END = "REPEAT(_utf8mb4 X'F48FBFBF', 255)"
_FIRST_OF_END = "\U0010ffff"

_START = "%(outboxio_start)s"

_values = msgspec.json.Decoder(list[str]).decode


async def jump(connection: Any, query: str, args: Mapping[str, Any]) -> list[str]:
    """All values of a column that are greater than the empty text, in the order of the index.

    ``query``: a query for the first value that is ``{behind}``, for example ``> 'a'``.
    """
    values: list[str] = []
    jumps, start = FEWEST_JUMPS, ""
    while True:
        variables = [f"@outboxio_{number}" for number in range(jumps)]
        texts = [_next(query, ">", before) for before in (_START, *variables[:-1])]
        found = await _assigned(connection, variables, texts, {**args, "outboxio_start": start})
        fresh = [value for value in found if not _is_end(value)]
        values += fresh
        if len(fresh) < jumps:
            return values
        jumps, start = min(2 * jumps, MOST_JUMPS), fresh[-1]


STEPS = 64  # in a message

FROM_BEGINNING = (">=", "")
"""The relation and the value with which the first step begins."""


async def jump_together(
    connection: Any, first: str, second: str, args: Mapping[str, Any], begin: tuple[str, str]
) -> tuple[list[str], tuple[str, str] | None]:
    """The values that two columns have in common, within 64 steps; and where to go on, ``None`` at the end.

    A step jumps to the next value in the first index, and then to the next value, not before the first, in the second.
    So a few values in either index take a few steps, however many values the other index has. Both queries are as in
    :func:`jump`.
    """
    relation, start = begin
    ones, others = ([f"@outboxio_{kind}_{number}" for number in range(STEPS)] for kind in ("one", "other"))
    jumps = [_next(first, relation, _START)]
    for one, other in zip(ones[:-1], others[:-1], strict=True):
        jumps.append(f"IF({one} = {other}, {_next(first, '>', one)}, {_next(first, '>=', other)})")
    texts = [text for one, jump in zip(ones, jumps, strict=True) for text in (jump, _next(second, ">=", one))]
    variables = [variable for pair in zip(ones, others, strict=True) for variable in pair]
    found = await _assigned(connection, variables, texts, {**args, "outboxio_start": start})
    values = [one for one, other in zip(found[::2], found[1::2], strict=True) if one == other and not _is_end(one)]
    one, other = found[-2:]
    if _is_end(other):
        return values, None
    return values, (">", one) if one == other else (">=", other)


async def _assigned(connection: Any, variables: list[str], texts: list[str], args: Mapping[str, Any]) -> list[str]:
    """The values of variables, after all expressions were assigned in order."""
    statements = [f"SET {variable} = {text}" for variable, text in zip(variables, texts, strict=True)]
    statements.append(f"SELECT JSON_ARRAY({', '.join(variables)})")
    [(found,)] = await fetch(connection, "; ".join(statements), args)
    return _values(found)


def _next(query: str, relation: str, value: str) -> str:
    return f"IFNULL(({query.replace('{behind}', f'{relation} {value}')}), {_END})"


def _is_end(value: str) -> bool:
    return value.startswith(_FIRST_OF_END)
