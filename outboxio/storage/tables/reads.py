"""The reads of a scan over notifications: the conditions of a search and the queries along the indexes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from outboxio.model.lock_name import MAX_PARTITIONS
from outboxio.model.notification import State
from outboxio.model.operating.groups import Search
from outboxio.storage.statement import Parts, Port, Query, Text
from outboxio.storage.tables.notifications import StoredNotifications
from outboxio.storage.tables.probes import Probes
from outboxio.storage.tables.scans import (
    ALL,
    BLOCKED,
    DEAD,
    KEYED,
    KEYLESS,
    MAX_INDEX_ENTRIES,
    STATES_OF,
    WAITING,
    Bounds,
    ReadRequest,
    ReadResult,
    Segment,
    conditions_of,
    residual_of,
)

# --- conditions ------------------------------------------------------------------------------------

# These conditions use no index: the scan decides which rows are read. The values are parameters.
_EQUAL = ("ordering_key", "model_id", "action_name", "action_id", "correlation_id")
_OF_EVENTS = {
    "event_types": "{among n.event_type :event_types}",
    **{column: f"n.{column} = :{column}" for column in _EQUAL},
    "since": "n.event_date >= :since",
    "until": "n.event_date < :until",
}
_OF_NOTIFICATIONS = {
    **_OF_EVENTS,
    "states": "{among n.state :states}",
    "names": "{among n.handler_name :names}",
    "since": "n.updated_date >= :since",
    "until": "n.updated_date < :until",
}

# The last error as a JSON array of type and message. It is NULL, or holds null, if the errors are not an array of
# objects. The document is read once, because it may be stored out of line and compressed.
LAST_ERROR = Text(
    "",
    postgres="""(SELECT jsonb_build_array(l.error -> 'type', l.error -> 'message')
    FROM (SELECT n.errors -> -1 AS error OFFSET 0) AS l)""",
    mysql="IF(CONVERT(JSON_TYPE(n.errors) USING utf8mb4) COLLATE utf8mb4_bin = 'ARRAY', {last_error}, NULL)",
    sqlite="""CASE WHEN NOT json_valid(n.errors) THEN NULL WHEN json_type(n.errors) = 'array'
    THEN json_extract(n.errors, '$[#-1].type', '$[#-1].message') || '' END""",
)
_CHEAP = Text("TRUE", mysql="{may_have}")
"""A condition that is cheaper than reading the last error."""


def _mysql_is_text(index: int) -> str:
    return f"CONVERT(JSON_TYPE(JSON_EXTRACT({{error}}, '$[{index}]')) USING utf8mb4) COLLATE utf8mb4_bin = 'STRING'"


def _mysql_text(index: int) -> str:
    return f"JSON_UNQUOTE(JSON_EXTRACT({{error}}, '$[{index}]')) COLLATE utf8mb4_bin"


# The condition on the last error, {error}, which must be two strings. GLOB is case-sensitive on SQLite.
_HAS_TEXTS = Text(
    "",
    postgres="""jsonb_typeof({error} -> 0) = 'string' AND jsonb_typeof({error} -> 1) = 'string'
    AND ({error} ->> 0) || ': ' || ({error} ->> 1) LIKE :error ESCAPE '|'""",
    mysql=f"""IF({_mysql_is_text(0)} AND {_mysql_is_text(1)},
    CONCAT({_mysql_text(0)}, ': ', {_mysql_text(1)}) LIKE :error ESCAPE '|', FALSE)""",
    sqlite="""json_type({error}, '$[0]') = 'text' AND json_type({error}, '$[1]') = 'text'
    AND json_extract({error}, '$[0]') || ': ' || json_extract({error}, '$[1]') GLOB :glob""",
)

NO_ERROR: Parts = {"matches": "TRUE", "error_if_matches": "NULL", "has_texts": "TRUE"}
_AN_ERROR: Parts = {
    "error_if_matches": "CASE WHEN n.namespace = :namespace AND {matches} AND {cheap} THEN {stored_error} END",
    "stored_error": LAST_ERROR,
    "cheap": _CHEAP,
    "has_texts": _HAS_TEXTS,
}


def matching_events(search: Search) -> tuple[str, dict[str, Any]]:
    """Return the conditions on an event ``n`` and their values. Events have no state, handler or error."""
    conditions, values = _conditions(search, _OF_EVENTS)
    return " AND ".join(["n.namespace = :namespace", *conditions]), values


def matching(search: Search) -> tuple[Parts, dict[str, Any]]:
    """Return the conditions on a notification ``n``, except the namespace, as statement parts, and their values."""
    conditions, values = _conditions(search, _OF_NOTIFICATIONS)
    if search.names == ():
        conditions = ["FALSE"]
    parts: Parts = {**NO_ERROR, "matches": " AND ".join(conditions) or "TRUE"}
    if not search.error:
        return parts, values
    texts = {"error": like(search.error), "glob": glob(search.error), "word": longest_word(search.error)}
    return {**parts, **_AN_ERROR}, {**values, **texts, "escaped": "\\u00"}


def _conditions(search: Search, conditions: dict[str, str]) -> tuple[list[str], dict[str, Any]]:
    values = {field: getattr(search, field) for field in conditions_of(search) if field in conditions}
    listed = {field: _texts(value) if isinstance(value, tuple) else value for field, value in values.items()}
    return [conditions[field] for field in values], listed


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values]


# --- patterns of texts that appear in this order, with any text before, between and after ---------

_LIKE = re.compile(r"[%_|]")
_GLOB = re.compile(r"[*?\[]")
_WORDS = re.compile(r"[A-Za-z0-9_]+(?: [A-Za-z0-9_]+)*")


def like(texts: Sequence[str]) -> str | None:
    """Return the pattern for ``LIKE ... ESCAPE '|'``; ``None`` without texts."""
    return _joined("%", [_LIKE.sub(r"|\g<0>", text) for text in texts])


def glob(texts: Sequence[str]) -> str | None:
    """Return the pattern for SQLite's case-sensitive ``GLOB``."""
    return _joined("*", [_GLOB.sub(r"[\g<0>]", text) for text in texts])


def longest_word(texts: Sequence[str]) -> str:
    """Return the longest part of the texts that JSON does not escape, within type or message; possibly empty."""
    return max((word for text in texts for word in _WORDS.findall(text)), key=len, default="")


def _joined(wildcard: str, texts: Sequence[str]) -> str | None:
    return wildcard.join(["", *texts, ""]) if texts else None


# --- scans -----------------------------------------------------------------------------------------

_TABLE = "{table event_notifications event_notifications_"
# On MySQL a comparison of rows would not limit the read of an index.
_MYSQL_BEFORE = "({one} = :one AND {two} < :two OR {one} < :one)"
_BEFORE = Text("({one}, {two}) < (:one, :two)", mysql=_MYSQL_BEFORE)
_LATEST = "coalesce(nullif(:one, '9999-12-31 23:59:59.999999'), 'infinity')"
"""PostgreSQL can store dates that are later than Python's last date."""

_ROWS = """
SELECT {one} AS one, {two} AS two, n.id, n.namespace = :namespace AS is_own,
  n.namespace = :namespace AND {matches} AS is_match, {error_if_matches} AS error
FROM {source} AND {after} {since} ORDER BY {order} LIMIT :size
"""
_READ = """
SELECT :number, count(CASE WHEN n.is_own THEN 1 END), {last {key} if n.is_own by {by}}, {passed},
  {list {key}, n.id id if n.is_match AND {has_texts} by {by}}
FROM ({rows}) n
"""


def _scan(
    source: str | Text, *, one: str, two: str, types: tuple[str, str], order: str | Text, **parts: str | Text
) -> Query[ReadResult]:
    """Return the query that reads a part of a scan.

    ``source``: FROM and WHERE of the rows along an index. ``one``, ``two``: the columns by which the rows are ordered.
    """
    own: Parts = {
        **NO_ERROR, "source": source, "one": one, "two": two, "key": f"n.one {types[0]}, n.two {types[1]}",
        "order": order, "error": "n.error", "after": _BEFORE, "since": "", "rows": _ROWS, "passed": "0, NULL",
        "by": "n.one DESC, n.two DESC", **parts,
    }  # fmt: skip
    fields = ("number", "read", "last", "skipped", "reached", "matches")
    each = f"number int, name text, part int, one {types[0]}, two {types[1]}, size int"
    return Query(_READ, ReadResult, fields=fields, each=each).having(**own)


_OF_NAME = "n.namespace = :namespace AND n.handler_name = :name"
_DEAD = f"{_TABLE}dead n}} WHERE n.namespace = :namespace AND {{dead}} AND {{dead_name}} = :name"
# On MariaDB, the DEAD and the EXPIRED rows of a handler lie in two ranges of the index.
_MARIADB_DEAD = " UNION ALL ".join(
    "(" + _ROWS.replace("{source}", f"{_TABLE}dead n}} WHERE {_OF_NAME} AND n.state = '{state}'") + ")"
    for state in ("DEAD", "EXPIRED")
)
_DUE = f"{_TABLE}partition n}} WHERE {_OF_NAME} AND {{unfinished}}"
_DUE_ON_SQLITE = _DUE.replace("_partition", "_due")  # there are no partitions
_QUEUE = f"{_TABLE}line n}} WHERE {_OF_NAME}"

READS = {
    (DEAD, 0): _scan(
        _DEAD, one="{dead_date}", two="n.id", types=("timestamp", "id"), order="{dead_date} DESC, n.id DESC",
        rows=Text(_ROWS, mariadb=f"{_MARIADB_DEAD} ORDER BY one DESC, two DESC LIMIT :size"),
        after=Text(
            "({one}, {two}) < (:one, :two)", postgres=f"({{one}}, {{two}}) < ({_LATEST}, :two)", mysql=_MYSQL_BEFORE
        ),
    ),
    # On PostgreSQL, the partition is in both bounds and in the order, as in FIND_DUE (notifications.py).
    (WAITING, 0): _scan(
        Text(_DUE, mysql=f"{_DUE} AND n.partition_number = :part", sqlite=_DUE_ON_SQLITE),
        one="n.next_retry_at", two="n.sequence", types=("timestamp", "bigint"),
        order=Text(
            "n.next_retry_at DESC, n.sequence DESC",
            postgres="n.partition_number DESC, n.next_retry_at DESC, n.sequence DESC",
        ),
        after=Text(
            "({one}, {two}) < (:one, :two)",
            postgres=f"""n.partition_number >= :part
  AND (n.partition_number, {{one}}, {{two}}) < (:part, {_LATEST}, :two)""",
            mysql=_MYSQL_BEFORE,
        ),
    ),
    (BLOCKED, KEYED): _scan(
        f"{_QUEUE} AND {{in_queue}} AND n.ordering_key IS NOT NULL",
        one="n.ordering_key", two="n.sequence", types=("text", "bigint"), order="n.ordering_key, n.sequence",
        by="n.one, n.two",
        after=Text("({one}, {two}) > (:one, :two)", mysql="({one} = :one AND {two} > :two OR {one} > :one)"),
    ),
    (BLOCKED, KEYLESS): _scan(
        f"{_QUEUE} AND {{blocked}} AND n.ordering_key IS NULL",
        one="''", two="n.sequence", types=("text", "bigint"),
        order=Text("n.ordering_key, n.sequence", mysql="n.sequence"), by="n.one, n.two", after="{two} > :two",
    ),
    # The index does not hold the namespace, so rows of other namespaces are skipped.
    (ALL, 0): _scan(
        f"{_TABLE}event n}} WHERE TRUE",
        one="n.event_id", two="n.handler_name", types=("id", "text"), order="n.event_id DESC, n.handler_name DESC",
        passed="count(CASE WHEN NOT n.is_own THEN 1 END), {last {key} by {by}}",
    ),
}  # fmt: skip


def _count(source: str, **texts: str) -> Query[ReadResult]:
    """Return the query that counts the first rows of all names, if possible from the index alone."""
    rows = "SELECT {matches} AS is_match, {error_if_matches} AS error"
    names = "{rows :listed w name text}"
    return Query(
        "SELECT count(*), count(CASE WHEN n.is_match AND {has_texts} THEN 1 END) FROM ({rows}) n",
        ReadResult,
        fields=("read", "matching"),
    ).having(
        **NO_ERROR,
        error="n.error",
        rows=Text(
            f"{rows} FROM {names} {{join}} {{source}} LIMIT :most",
            postgres=f"SELECT n.* FROM {names} CROSS JOIN LATERAL ({rows} FROM {{source}} LIMIT :most) n LIMIT :most",
        ),
        source=Text(_of_listed(source), **{dialect: _of_listed(text) for dialect, text in texts.items()}),
    )


def _of_listed(source: str) -> str:
    return re.sub(r":name\b", "w.name", source)


COUNTS = {
    DEAD: _count(
        _DEAD, mariadb=f"{{rows :ended s state text}} {{join}} {_TABLE}dead n}} WHERE {_OF_NAME} AND n.state = s.state"
    ),
    WAITING: _count(_DUE, sqlite=_DUE_ON_SQLITE),
    BLOCKED: _count(f"{_QUEUE} AND {{in_queue}}"),
}

# All notifications of some events, in any order.
READ_EVENTS = Query(
    f"""
SELECT count(*), {{list n.event_id id, n.handler_name text, n.id id if n.is_match}}
FROM (SELECT n.event_id, n.handler_name, n.id, n.namespace = :namespace AND {{matches}} AND {{has_texts}} AS is_match
  FROM {_TABLE}event n}} WHERE {{ids n.event_id :ids}}) n
""",
    ReadResult,
    fields=("read", "matches"),
).having(**NO_ERROR, error=LAST_ERROR)

# A row for each partition that may have unfinished rows. MySQL probes each partition first, because each partition that
# is read becomes a branch of a statement.
SLOTS = Query(
    "",
    tuple[str, int],
    postgres="""
SELECT w.name, generate_series(0, coalesce(p.active, 1) - 1) FROM {rows :names w name text}
LEFT JOIN eventlog.handler_partitions p ON p.namespace = :namespace AND p.handler_name = w.name
""",
    mysql=f"""
SELECT w.name, p.number FROM {{rows :names w name text}} {{join}} {{rows :numbers p number int}}
WHERE p.number < IFNULL((SELECT h.active FROM eventlog.handler_partitions h
    WHERE h.namespace = :namespace AND h.handler_name = w.name), 1)
  AND (SELECT 1 FROM {_TABLE}partition n}}
    WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = w.name
      AND n.partition_number = p.number LIMIT 1) = 1
""",
    sqlite="SELECT w.name, 0 FROM {rows :names w name text}",
)

_EVENT_IDS = "SELECT {{list i.id id}} FROM (SELECT e.id FROM {{table events {} e}} WHERE {} LIMIT :limit) i"
EVENTS_OF_CORRELATION = Query(
    _EVENT_IDS.format("events_correlation", "e.namespace = :namespace AND e.correlation_id = :value"),
    list[str],
)
EVENTS_OF_ACTION = Query(
    _EVENT_IDS.format("idx_events_action_id", "e.action_id = :value AND e.namespace = :namespace"),
    list[str],
)

# --- the reads -------------------------------------------------------------------------------------


class ScanReads:
    """Reads the rows of a scan."""

    def __init__(self, port: Port, bounds: Bounds, probes: Probes, notifications: StoredNotifications) -> None:
        self._port = port
        self._bounds = bounds
        self._probes = probes
        self._notifications = notifications

    @property
    def bounds(self) -> Bounds:
        return self._bounds

    def max_rows(self, scan: str, search: Search) -> int:
        """Return how many rows of a scan a search may read."""
        if scan in STATES_OF and self.residual(scan, search) == Search():
            return MAX_INDEX_ENTRIES
        return self.bounds.errors if search.error else self.bounds.rows

    def residual(self, scan: str, search: Search) -> Search:
        """Return the conditions that the index of the scan does not cover, so that each row must be read."""
        residual = residual_of(scan, search)
        return replace(residual, states=()) if scan == BLOCKED and self.bounds.blocked_alone else residual

    async def segments(self, namespace: str, scan: str, search: Search) -> list[Segment]:
        """Return the segments of a scan over rows in certain states, in order."""
        names = await self._names(namespace, scan, search)
        if scan == WAITING and names:
            numbers = [{"number": number} for number in range(MAX_PARTITIONS)]
            slots = await self._port.fetch(SLOTS, namespace=namespace, names=_as_rows(names), numbers=numbers)
            return sorted(Segment(name, part) for name, part in slots)
        parts = (KEYED, KEYLESS) if scan == BLOCKED else (0,)
        return sorted(Segment(name, part) for name in names for part in parts)

    async def _names(self, namespace: str, scan: str, search: Search) -> Sequence[str]:
        if search.names is not None:
            return search.names
        if scan == DEAD:
            return await self._probes.dead_names(namespace)
        return await self._notifications.unfinished_names(namespace)

    async def read(
        self, namespace: str, scan: str, search: Search, requests: Sequence[ReadRequest]
    ) -> Sequence[ReadResult]:
        """Return the rows of each request, in the order of the requests."""
        parts, values = matching(self.residual(scan, search))
        if scan == DEAD and search.since is not None:
            parts, values = {**parts, "since": "AND {one} >= :since"}, {**values, "since": search.since}
        found: dict[int, ReadResult] = {}
        for kind in (KEYED, KEYLESS) if scan == BLOCKED else (0,):
            each = [
                _values_of(scan, number, request)
                for number, request in enumerate(requests)
                if scan != BLOCKED or request.segment.part == kind
            ]
            query = READS[scan, kind].having(**parts)
            results = await self._port.fetch_each(query, each, namespace=namespace, **values)
            found |= {result.number: result for result in results}
        return [found[number] for number in range(len(requests))]

    async def counted(self, namespace: str, scan: str, search: Search, most: int) -> ReadResult | None:
        """Count the first ``most`` rows of a scan; ``None`` if this takes reads of each segment."""
        if scan not in COUNTS or (scan == DEAD and (search.since is not None or search.until is not None)):
            return None
        names = await self._names(namespace, scan, search)
        if not names:
            return ReadResult(read=0)
        parts, values = matching(self.residual(scan, search))
        ended = [{"state": state} for state in (State.DEAD, State.EXPIRED) if state in search.states]
        scope = {"namespace": namespace, "listed": _as_rows(names), "ended": ended, "most": most, **values}
        return (await self._port.fetch(COUNTS[scan].having(**parts), **scope))[0]

    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        """Return up to ``limit`` ids of events with the correlation id or action id of the search, in any order."""
        query = EVENTS_OF_CORRELATION if search.action_id is None else EVENTS_OF_ACTION
        value = search.action_id or search.correlation_id
        [ids] = await self._port.fetch(query, namespace=namespace, value=value, limit=limit)
        return ids or []

    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> ReadResult:
        """Return all notifications of these events, in any order. The keys are (event id, handler name)."""
        parts, values = matching(search)
        scope = {"namespace": namespace, "ids": list(event_ids), **values}
        return (await self._port.fetch(READ_EVENTS.having(**parts), **scope))[0]


def _as_rows(names: Sequence[str]) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


def _values_of(scan: str, number: int, request: ReadRequest) -> dict[str, Any]:
    (name, part), (one, two) = request.segment, request.after
    key = {"one": one, "two": int(two) if scan in (WAITING, BLOCKED) else two}
    return {"number": number, "name": name, "part": part, "size": request.size, **key}
