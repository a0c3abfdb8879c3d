"""Jumps along an index from each value of a column to the next value, whatever the number of rows between.

Each jump starts at the value of the jump before, so that many jumps go in a single message, from variable to variable.
A recursive statement would read every row between two values, and so would a comparison with NULL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outboxio.storage.mysql.connection import fetch

LAST = "REPEAT(_utf8mb4 X'F48FBFBF', 255)"
"""A text that is greater than every value of a column."""
FEWEST_JUMPS, MOST_JUMPS = 8, 64  # in a message

_values = msgspec.json.Decoder(list[str | None]).decode


async def jump(connection: Any, next_value: str, args: Mapping[str, Any]) -> list[str]:
    """All values greater than the empty text, in the order of the index.

    ``next_value``: a query for the first value that is greater than ``{behind}``.
    """
    values: list[str] = []
    jumps, last = FEWEST_JUMPS, ""
    while True:
        statements = [f"SET @outboxio_0 = {_jump(next_value, '%(outboxio_last)s')}"]
        for number in range(1, jumps):
            statements.append(f"SET @outboxio_{number} = {_jump(next_value, f'@outboxio_{number - 1}')}")
        statements.append(f"SELECT JSON_ARRAY({', '.join(f'@outboxio_{number}' for number in range(jumps))})")
        [(found,)] = await fetch(connection, "; ".join(statements), {**args, "outboxio_last": last})
        fresh = [value for value in _values(found) if value is not None and value[:1] != _BEYOND]
        values += fresh
        if len(fresh) < jumps:
            return values
        jumps, last = MOST_JUMPS, fresh[-1]


_BEYOND = "\U0010ffff"


def _jump(next_value: str, behind: str) -> str:
    return f"IFNULL(({next_value.replace('{behind}', behind)}), {LAST})"


class Leapfrog:
    """The values that two columns have in common, each column with an index.

    Each step jumps to the next value in one index, and then to the next value, not before the first, in the other. So a
    few values in either index take a few jumps, however many values the other index has.
    """

    def __init__(self, first: str, second: str) -> None:
        """Two queries for the first value that is ``{behind}``, for example ``> 'a'``."""
        self._first = first
        self._second = second

    async def common(self, connection: Any, args: Mapping[str, Any], most: int) -> list[str]:
        """The common values, after at most ``most`` steps."""
        values: list[str] = []
        behind, taken, steps = ">= %(outboxio_last)s", 0, FEWEST_JUMPS
        last = ""
        while taken < most:
            statements: list[str] = []
            for number in range(steps):
                statements += self._step(number, behind)
            variables = ", ".join(f"@outboxio_{number}, @outboxio_other_{number}" for number in range(steps))
            statements.append(f"SELECT JSON_ARRAY({variables})")
            [(found,)] = await fetch(connection, "; ".join(statements), {**args, "outboxio_last": last})
            pairs = _values(found)
            seen = list(zip(pairs[::2], pairs[1::2], strict=True))
            values += [one for one, other in seen if one is not None and one == other and one[:1] != _BEYOND]
            taken += steps
            one, other = seen[-1]
            if one is None or other is None or _BEYOND in (one[:1], other[:1]):
                return values
            behind, last = ("> %(outboxio_last)s", one) if one == other else (">= %(outboxio_last)s", other)
            steps = MOST_JUMPS
        return values

    def _step(self, number: int, first_behind: str) -> list[str]:
        one, other, before, before_other = (
            f"@outboxio_{number}", f"@outboxio_other_{number}", f"@outboxio_{number - 1}", f"@outboxio_other_{number - 1}",
        )  # fmt: skip
        if number:
            equal, greater = self._next(self._first, f"> {before}"), self._next(self._first, f">= {before_other}")
            jump = f"IF({before} = {before_other}, {equal}, {greater})"
        else:
            jump = self._next(self._first, first_behind)
        return [f"SET {one} = {jump}", f"SET {other} = {self._next(self._second, f'>= {one}')}"]

    @staticmethod
    def _next(query: str, behind: str) -> str:
        return f"IFNULL(({query.replace('{behind}', behind)}), {LAST})"
