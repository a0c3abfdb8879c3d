"""The walks of a search on MySQL and MariaDB: which index a walk reads, and what the index holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from outboxio.model.notification import State
from outboxio.model.operating.groups import Search
from outboxio.storage.mysql.columns import BY_DEAD, BY_DUE, BY_EVENT, BY_LINE
from outboxio.storage.mysql.flavour import Server, Statement, by_flavour, for_flavours
from outboxio.storage.mysql.matching import Conditions
from outboxio.storage.mysql.ordering import BLOCKED as BLOCKED_PART
from outboxio.storage.mysql.values import as_json
from outboxio.storage.searching.walks import (
    ALL,
    BLOCKED,
    DEAD,
    KEYED,
    KEYLESS,
    WAITING,
    Request,
    Stretch,
    rest_of,
    start_of,
)


class Walk(Struct, frozen=True):
    """A walk along an index: the columns ``one`` and ``two`` of each row, a part of the walk for each request.

    ``{number}`` in a statement: the number of the request.
    """

    one: str
    two: str
    parts: Sequence[str]
    """FROM and WHERE of the places in the index whose rows are merged."""
    behind: str
    """The condition on rows behind the row at which the part begins."""
    order: str
    """The order with the columns ``one`` and ``two``."""
    has_namespace: bool = True
    """True if the index holds the namespace. Otherwise rows of other namespaces are passed."""

    def reading(self, matching: Conditions, request: Request, since: datetime | None, *, only_counts: bool) -> str:
        """The statement that reads a part of the walk.

        A list of all rows needs no key of the last row beside. The key of the last of many rows is faster to read than
        to put together, and the statement takes longer to plan.

        The texts are put together in the order of the walk, which a derived table does not promise.
        """
        # A range of an index takes longer to plan than equal columns.
        bounds = "" if request.after in _BEGINNINGS else f" AND {self.behind}"
        bounds += "" if since is None else f" AND {self.one} >= %(dead_since)s"
        has_texts = matching.has_texts.replace("{told}", "i.told")
        columns = f"{matching.text} AS is_match, {matching.told} AS told, {self.one} AS one, {self.two} AS two"
        own_order = self.order.replace("one", "i.one").replace("two", "i.two")
        number, found = f"SUM(i.is_match AND {has_texts})", "NULL"
        read, passed = "COUNT(*)", ""
        last_row = self._rows(f"{self.one} AS one, {self.two} AS two", bounds, "LIMIT 1 OFFSET %(before_{number})s")
        last_read = f"SELECT {_key_of('k')} FROM ({last_row}) k"
        if not self.has_namespace:
            columns += ", n.namespace = %(namespace)s AS is_own"
            read, passed = "COUNT(IF(i.is_own, 1, NULL))", f", COUNT(IF(i.is_own, NULL, 1)), ({last_read})"
            last = _last_of(f"IF(i.is_own, {_key_of('i')}, NULL)", own_order)
        elif only_counts:
            last = last_read
        else:
            last = "NULL" if matching.takes_all else _last_of(_key_of("i"), own_order)
        if not only_counts:
            columns += ", CAST(n.id AS CHAR) COLLATE utf8mb4_bin AS id"
            is_match = f"i.is_match AND {has_texts}"
            found = f"GROUP_CONCAT(IF({is_match}, JSON_ARRAY({_key_of('i')}, i.id), NULL) ORDER BY {own_order})"
            number = "NULL"  # to judge a text takes long
        rows = self._rows(columns, bounds, "LIMIT %(size_{number})s")
        return f"""
(SELECT {{number}} AS number, {read}, {number}, ({last}), {found}{passed} FROM ({rows}) i)
"""

    def _rows(self, columns: str, bounds: str, limit: str) -> str:
        own = self.order.replace("one", self.one).replace("two", self.two)
        if len(self.parts) == 1:
            return f"SELECT {columns} {self.parts[0]}{bounds} ORDER BY {own} {limit}"
        each = (f"(SELECT {columns} {part}{bounds} ORDER BY {own} LIMIT %(size_{{number}})s)" for part in self.parts)
        return f"{' UNION ALL '.join(each)} ORDER BY {self.order} {limit}"


def _key_of(row: str) -> str:
    texts = (f"CAST({row}.{column} AS CHAR) COLLATE utf8mb4_bin" for column in ("one", "two"))
    return f"JSON_ARRAY({', '.join(texts)})"


def _last_of(key: str, order: str) -> str:
    return f"SUBSTRING_INDEX(GROUP_CONCAT({key} ORDER BY {order} SEPARATOR '\n'), '\n', -1)"


def _before(one: str, two: str) -> str:
    return f"({one} = %(one_{{number}})s AND {two} < %(two_{{number}})s OR {one} < %(one_{{number}})s)"


_NEWEST_FIRST = "one DESC, two DESC"
_OF_NAME = "= %(name_of_{number})s"
_IS_DEAD = {state: f"n.state = '{state}' AND n.handler_name" for state in (State.DEAD, State.EXPIRED)}
"""On MariaDB, the index has the DEAD and the EXPIRED rows of a handler in two places."""


def _dead(date: str, of_handlers: Sequence[str]) -> Walk:
    parts = [f"FROM {BY_DEAD} WHERE n.namespace = %(namespace)s AND {handler} {_OF_NAME}" for handler in of_handlers]
    return Walk(date, "n.id", parts, _before(date, "n.id"), _NEWEST_FIRST)


_DEAD_ROWS = _dead("n.dead_date", ["n.dead_handler"])
_DEAD_ROWS_OF: dict[tuple[State, ...], Walk] = {
    states: _dead("n.updated_date", [_IS_DEAD[state] for state in states])
    for states in ((State.DEAD,), (State.EXPIRED,), (State.DEAD, State.EXPIRED))
}
_BEGINNINGS = {start_of(walk, Search()) for walk in (DEAD, WAITING, BLOCKED, ALL)}
_UNFINISHED = f"FROM {BY_DUE} WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name"
_IN_LINE = f"FROM {BY_LINE} WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED_PART} AND n.handler_name"
_WALKS = {
    (WAITING, 0): Walk(
        "n.next_retry_at", "n.sequence", [f"{_UNFINISHED} {_OF_NAME} AND n.partition_number = %(part_{{number}})s"],
        _before("n.next_retry_at", "n.sequence"), _NEWEST_FIRST,
    ),
    (BLOCKED, KEYED): Walk(
        "n.ordering_key", "n.sequence", [f"{_IN_LINE} {_OF_NAME} AND n.ordering_key IS NOT NULL"],
        """(n.ordering_key = %(one_{number})s AND n.sequence > %(two_{number})s
      OR n.ordering_key > %(one_{number})s)""",
        "one, two",
    ),
    (BLOCKED, KEYLESS): Walk(
        "''", "n.sequence", [f"{_IN_LINE} {_OF_NAME} AND n.ordering_key IS NULL"],
        "n.sequence > %(two_{number})s", "two",
    ),
    (ALL, 0): Walk(
        "n.event_id", "n.handler_name", [f"FROM {BY_EVENT} WHERE TRUE"], _before("n.event_id", "n.handler_name"),
        _NEWEST_FIRST, has_namespace=False,
    ),
}  # fmt: skip
_HAS_SEQUENCE = {WAITING, BLOCKED}

# Counts of many stretches, in a single plan. The server stops at the limit.
_COUNTED = """
SELECT COUNT(*), SUM(i.is_match AND {has_texts}) FROM (SELECT {matches} AS is_match, {told} AS told
  FROM JSON_TABLE(%(stretches)s, '$[*]' COLUMNS (name {text} PATH '$[0]', part {text} PATH '$[1]')) w
  STRAIGHT_JOIN {condition} = w.name {further} LIMIT %(most)s) i
"""


def _counted(condition: str, further: str = "") -> str:
    return _COUNTED.replace("{condition}", condition).replace("{further}", further)


_DEAD_OF = f"{BY_DEAD} WHERE n.namespace = %(namespace)s AND"
_COUNTS: dict[str, Statement] = {
    DEAD: by_flavour(
        mysql=_counted(f"{_DEAD_OF} n.dead_handler"),
        mariadb=_counted(f"{_DEAD_OF} n.state = w.part AND n.handler_name"),
    ),
    WAITING: for_flavours(
        _counted(_UNFINISHED.removeprefix("FROM "), "AND n.partition_number = CAST(w.part AS SIGNED)")
    ),
    BLOCKED: for_flavours(_counted(_IN_LINE.removeprefix("FROM "))),
}  # fmt: skip


def counting(server: Server, walk: str, search: Search, stretches: Sequence[Stretch]) -> tuple[Statement, str] | None:
    """The statement that counts the rows of all stretches, and the stretches; ``None`` where a range is to be read."""
    if walk not in _COUNTS or (walk == DEAD and (search.since is not None or search.until is not None)):
        return None
    pairs: Sequence[tuple[str, object]] = stretches
    if walk == DEAD and server.flavour.name == "mariadb":
        pairs = [(name, state) for name, _ in stretches for state in _IS_DEAD if state in search.states]
    elif walk == BLOCKED:
        pairs = [stretch for stretch in stretches if stretch.part == KEYED]
    return _COUNTS[walk], as_json(pairs)


def walk_of(walk: str, search: Search, request: Request, server: Server) -> Walk:
    """The walk along the index that holds the states of the search, as far as an index of the server does."""
    if walk != DEAD:
        return _WALKS[walk, request.stretch.part if walk == BLOCKED else 0]
    if server.flavour.name == "mysql":
        return _DEAD_ROWS
    return _DEAD_ROWS_OF[tuple(state for state in _IS_DEAD if state in search.states)]


def rest_on(server: Server, walk: str, search: Search) -> Search:
    """As :func:`rest_of`. These indexes hold BLOCKED rows and, on MariaDB, DEAD rows apart from all others."""
    rest = rest_of(walk, search)
    return replace(rest, states=()) if walk == BLOCKED or (walk == DEAD and server.flavour.name == "mariadb") else rest


def arguments_of(walk: str, number: int, request: Request) -> dict[str, Any]:
    """The arguments of a request."""
    one, two = request.after
    return {
        f"name_of_{number}": request.stretch.name,
        f"part_{number}": request.stretch.part,
        f"size_{number}": request.size,
        f"before_{number}": request.size - 1,
        f"one_{number}": one,
        f"two_{number}": int(two) if walk in _HAS_SEQUENCE else two,
    }
