"""The walks of a search on MySQL and MariaDB: which index a walk reads, and what the index holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from outboxio.model.notification import State
from outboxio.model.operating.filter import Search
from outboxio.storage.mysql.columns import BY_DUE, BY_EVENT, BY_LINE
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.matching import Conditions
from outboxio.storage.mysql.ordering import BLOCKED as BLOCKED_PART
from outboxio.storage.mysql.probes import BY_DEAD
from outboxio.storage.searching.walks import ALL, BLOCKED, DEAD, KEYED, KEYLESS, WAITING, Request, rest_of


class Walk(Struct, frozen=True):
    """A walk along an index: the columns ``one`` and ``two`` of each row, a part of the walk for each request.

    ``{number}`` in a statement: the number of the request.
    """

    one: str
    two: str
    parts: Sequence[str]
    """FROM and WHERE of the places in the index whose rows are merged."""
    order: str
    """The order with the columns ``one`` and ``two``."""

    def reading(self, matching: Conditions, *, only_counts: bool) -> str:
        """The statement that reads a part of the walk. The last row is read only if the part has all wanted rows.

        The texts are put together in the order of the walk, which a derived table does not promise.
        """
        has_texts = matching.has_texts.replace("{told}", "i.told")
        last = self._rows(f"{self.one} AS one, {self.two} AS two", "LIMIT 1 OFFSET %(before_{number})s")
        columns, found = f"{matching.text} AS is_match, {matching.told} AS told", "NULL"
        if not only_counts or len(self.parts) > 1:
            columns += f", {self.one} AS one, {self.two} AS two"
        if not only_counts:
            columns += ", CAST(n.id AS CHAR) COLLATE utf8mb4_bin AS id"
            of_result = self.order.replace("one", "i.one").replace("two", "i.two")
            found = f"""GROUP_CONCAT(IF(i.is_match AND {has_texts}, JSON_ARRAY({_key_of("i")}, i.id), NULL)
    ORDER BY {of_result})"""
        rows = self._rows(columns, "LIMIT %(size_{number})s")
        return f"""
(SELECT {{number}} AS number, COUNT(*), SUM(i.is_match AND {has_texts}), (SELECT {_key_of("k")} FROM ({last}) k), {found}
FROM ({rows}) i)
"""

    def _rows(self, columns: str, limit: str) -> str:
        own = self.order.replace("one", self.one).replace("two", self.two)
        if len(self.parts) == 1:
            return f"SELECT {columns} {self.parts[0]} ORDER BY {own} {limit}"
        each = (f"(SELECT {columns} {part} ORDER BY {own} LIMIT %(size_{{number}})s)" for part in self.parts)
        return f"{' UNION ALL '.join(each)} ORDER BY {self.order} {limit}"


def _key_of(row: str) -> str:
    texts = (f"CAST({row}.{column} AS CHAR) COLLATE utf8mb4_bin" for column in ("one", "two"))
    return f"JSON_ARRAY({', '.join(texts)})"


_ONE, _TWO = "%(one_{number})s", "%(two_{number})s"
_BEFORE = f"({{one}} = {_ONE} AND {{two}} < {_TWO} OR {{one}} < {_ONE})"
_NAME = "%(name_of_{number})s"


def _dead(date: str, of_handler: str) -> str:
    before = _BEFORE.replace("{one}", date).replace("{two}", "n.id")
    since = f"{date} >= IFNULL(%(dead_since)s, '1000-01-01')"
    return f"FROM {BY_DEAD} WHERE n.namespace = %(namespace)s AND {of_handler} = {_NAME} AND {since} AND {before}"


# On MariaDB, the index has the DEAD and the EXPIRED rows of a handler in two places.
_OF_STATE = {
    state: _dead("n.updated_date", f"n.state = '{state}' AND n.handler_name") for state in (State.DEAD, State.EXPIRED)
}
_NEWEST_FIRST = "one DESC, two DESC"
_DEAD_ROWS = Walk("n.dead_date", "n.id", [_dead("n.dead_date", "n.dead_handler")], _NEWEST_FIRST)
_DEAD_ROWS_OF = {
    states: Walk("n.updated_date", "n.id", [_OF_STATE[state] for state in states], _NEWEST_FIRST)
    for states in ((State.DEAD,), (State.EXPIRED,), (State.DEAD, State.EXPIRED))
}
_IN_LINE = f"FROM {BY_LINE} WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED_PART} AND n.handler_name = {_NAME}"
_WALKS = {
    (WAITING, 0): Walk(
        "n.next_retry_at", "n.sequence",
        [f"""FROM {BY_DUE} WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = {_NAME}
    AND n.partition_number = %(part_{{number}})s
    AND {_BEFORE.replace("{one}", "n.next_retry_at").replace("{two}", "n.sequence")}"""],
        _NEWEST_FIRST,
    ),
    (BLOCKED, KEYED): Walk(
        "n.ordering_key", "n.sequence",
        [f"{_IN_LINE} AND (n.ordering_key = {_ONE} AND n.sequence > {_TWO} OR n.ordering_key > {_ONE})"],
        "one, two",
    ),
    (BLOCKED, KEYLESS): Walk(
        "''", "n.sequence", [f"{_IN_LINE} AND n.ordering_key IS NULL AND n.sequence > {_TWO}"], "two",
    ),
    (ALL, 0): Walk(
        "n.event_id", "n.handler_name",
        [f"FROM {BY_EVENT} WHERE {_BEFORE.replace('{one}', 'n.event_id').replace('{two}', 'n.handler_name')}"],
        _NEWEST_FIRST,
    ),
}  # fmt: skip
HAS_SEQUENCE = {WAITING, BLOCKED}


def walk_of(walk: str, search: Search, request: Request, server: Server) -> Walk:
    """The walk along the index that holds the states of the search, as far as an index of the server does."""
    if walk != DEAD:
        return _WALKS[walk, request.stretch.part if walk == BLOCKED else 0]
    if server.flavour.name == "mysql":
        return _DEAD_ROWS
    return _DEAD_ROWS_OF[tuple(state for state in _OF_STATE if state in search.states)]


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
        f"two_{number}": int(two) if walk in HAS_SEQUENCE else two,
    }
