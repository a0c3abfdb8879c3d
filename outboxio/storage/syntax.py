"""How each dialect renders the markers of the statements in ``storage/tables`` (see ``statement.py``)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from outboxio.storage.mysql.columns import OWN_PARTITION
from outboxio.storage.postgres.columns import PARTITION_NOW


class Syntax(ABC):
    """The syntax of a dialect. The methods from ``table`` on are markers, and so are the keys of ``markers``."""

    dialect: str
    markers: Mapping[str, str]
    """The markers without arguments:

    - ``{now}``: the time of the database, in UTC.
    - ``{join}``: joins two tables in the order in which they are written.
    - ``{unfinished}``: the notification ``n`` is PENDING, FAILED or DYING, as a condition for the index of due rows.
    - ``{in_queue}``: ``n`` is in the index of key queues, of which MySQL reads only the BLOCKED rows; ``{blocked}``: it
      is in this index and BLOCKED.
    - ``{dead}``: ``n`` is DEAD or EXPIRED, as a condition for the index of ended rows; ``{dead_name}`` and
      ``{dead_date}`` are the handler name and the date in this index.
    - ``{partition}``: the partition to which ``n`` belongs now.
    - ``{for_update}``: at the end of a query that locks its rows.
    """

    def replacement(self, marker: re.Match[str]) -> str:
        """Return the text that replaces a marker."""
        name, arguments = marker[1], marker[2]
        if arguments is None:
            return self.markers[name]
        return getattr(self, name)(arguments)  # type: ignore[no-any-return]  # by name

    def finished(self, text: str, columns: int) -> str:
        """Return the final text, after all markers were replaced. ``columns``: the number of columns of a query."""
        return text

    def for_each(self, text: str, columns: str) -> str:
        """Return the query that the port runs with several sets of values. ``columns``: as in ``rows``."""
        return text

    def jumping(self, text: str) -> str:
        """Return the query that runs a query for the first value ``> :start`` again with each value found."""
        return f"""WITH RECURSIVE jumps(value) AS (
  SELECT ''
  UNION ALL
  SELECT CAST(({text.replace(":start", "jumps.value")}) AS TEXT) FROM jumps WHERE value IS NOT NULL)
SELECT value FROM jumps WHERE value <> ''"""

    @abstractmethod
    def table(self, arguments: str) -> str:
        """``FROM {table events events_causation e}``: a table, the index to use, and an alias.

        The index ``primary`` is the primary key. With ``{table events}`` the database chooses the index.
        """

    def id(self, column: str) -> str:
        """``{id o.event_id}``: an id in a column of ``{rows ...}``, to compare with a column of ids."""
        return column

    def text(self, column: str) -> str:
        """``{text payload}``: a JSON column as text."""
        return column

    def json(self, value: str) -> str:
        """``{json :payload}``: a text parameter or column as the value of a JSON column."""
        return value

    @abstractmethod
    def among(self, arguments: str) -> str:
        """``{among name :names}``: the column is one of a list of texts."""

    @abstractmethod
    def ids(self, arguments: str) -> str:
        """``{ids id :ids}``: the column is one of a list of UUIDs."""

    @abstractmethod
    def rows(self, arguments: str) -> str:
        """``FROM {rows :runs r name text, starts int}``: a list of dicts as the table ``r``.

        The types are ``text``, ``document`` (a long text), ``int``, ``bigint``, ``bool``, ``timestamp`` and ``id``.
        """

    def upsert(self, arguments: str) -> str:
        """``INSERT ... {upsert id: name, date}``: if a row with this key exists, assign the new values.

        ``{upsert id: name from r}``: the values are columns of the inserted table ``r``.
        """
        key, _, columns = arguments.partition(":")
        names = [name.strip() for name in columns.partition(" from ")[0].split(",")]
        return f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in names)}"

    def keep(self, arguments: str) -> str:
        """``INSERT ... {keep jobs: namespace, name}``: if a row with this key exists, do nothing."""
        return f"ON CONFLICT ({arguments.partition(':')[2].strip()}) DO NOTHING"

    @abstractmethod
    def list(self, arguments: str) -> str:
        """``{list n.date timestamp, n.id id if n.is_match by n.date DESC, n.id DESC}``: the rows with a condition.

        The result is a JSON array with an array of texts per row, or one text per row for a single column. Timestamps
        have six decimals. Without rows the result may be NULL. The order is repeated, because MySQL does not keep the
        order of a subquery.
        """

    @abstractmethod
    def last(self, arguments: str) -> str:
        """``{last ...}``: like ``list``, but only the last row; NULL without rows."""


# SQLite and PostgreSQL use a partial index if the query repeats its condition.
_IN_QUEUE = """
n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND (n.ordering_key IS NOT NULL OR n.state = 'BLOCKED')
""".strip()
_WITH_PARTIAL_INDEXES = {
    "in_queue": _IN_QUEUE,
    "blocked": f"{_IN_QUEUE} AND n.state = 'BLOCKED'",
    "dead_name": "n.handler_name",
    "dead_date": "n.updated_date",
}
_POSTGRES_TYPES = {"document": "text", "bool": "boolean", "id": "uuid"}


class PostgresSyntax(Syntax):
    dialect = "postgres"
    markers: Mapping[str, str] = {
        "now": "(clock_timestamp() AT TIME ZONE 'UTC')",
        "join": "JOIN",
        "unfinished": "n.state IN ('PENDING', 'FAILED', 'DYING')",
        "dead": "n.state IN ('DEAD', 'EXPIRED')",
        **_WITH_PARTIAL_INDEXES,
        "partition": PARTITION_NOW,
        "for_update": "FOR UPDATE",
    }

    def for_each(self, text: str, columns: str) -> str:
        names = "|".join(name for name, _ in _columns_of(columns))
        text = re.sub(rf"(?<![:\w]):({names})\b", r"one.\1", text)
        return f"SELECT found.* FROM {self.rows(f':each one {columns}')} CROSS JOIN LATERAL (\n{text}\n) found"

    def table(self, arguments: str) -> str:
        # On connections of the loops, planner settings already force the index.
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
        listed = ", ".join(f"{column} {_POSTGRES_TYPES.get(kind, kind)}" for column, kind in _columns_of(columns))
        return f"json_to_recordset({values}::text::json) AS {name}({listed})"

    def list(self, arguments: str) -> str:
        columns, condition, _ = _rows_in(arguments)
        texts = [self._as_text(column, kind) for column, kind in columns]
        value = texts[0] if len(texts) == 1 else f"json_build_array({', '.join(texts)})"
        return f"(json_agg({value}) FILTER (WHERE {condition}))::text"

    def last(self, arguments: str) -> str:
        columns, condition, _ = _rows_in(arguments)
        own = f"FILTER (WHERE {condition})"
        texts = [self._as_text(f"(array_agg({c}) {own})[count(*) {own}]", kind) for c, kind in columns]
        value = texts[0] if len(texts) == 1 else f"json_build_array({', '.join(texts)})::text"
        return f"CASE WHEN count(*) {own} > 0 THEN {value} END"

    def _as_text(self, value: str, kind: str) -> str:
        if kind != "timestamp":
            return f"({value})::text"
        return f"CASE WHEN isfinite({value}) THEN to_char({value}, 'YYYY-MM-DD HH24:MI:SS.US') ELSE ({value})::text END"


_MYSQL_MARKERS = {
    "now": "UTC_TIMESTAMP(6)",
    "join": "STRAIGHT_JOIN",
    "unfinished": "n.is_unfinished = TRUE",
    "in_queue": "n.line_part = 2",
    "blocked": "n.line_part = 2",
    "partition": OWN_PARTITION,
    "for_update": "FOR UPDATE",
}
_MYSQL_TYPES = {"int": "INT", "bigint": "BIGINT", "bool": "BOOLEAN", "timestamp": "DATETIME(6)"}


class MysqlSyntax(Syntax):
    def __init__(self, dialect: str, markers: Mapping[str, str]) -> None:
        """``markers``: those without arguments in which MySQL and MariaDB differ (``mysql/flavour.py``)."""
        self.dialect = dialect
        self.markers = {**_MYSQL_MARKERS, **markers}
        self._types = {**_MYSQL_TYPES, **{kind: markers[kind] for kind in ("text", "document", "id")}}

    def jumping(self, text: str) -> str:
        # A recursive statement would read every row between two values, so the port jumps (``mysql/port.py``).
        return text

    def table(self, arguments: str) -> str:
        name, index, alias = (*arguments.split(), "", "")[:3]
        forced = f"FORCE INDEX ({'PRIMARY' if index == 'primary' else index})" if index else ""
        return " ".join(filter(None, (f"eventlog.{name}", alias, forced)))

    def id(self, column: str) -> str:
        return self.markers["id_of"].format(column)

    def among(self, arguments: str) -> str:
        column, values = arguments.split()
        return f"{column} IN ({values})"

    ids = among

    def rows(self, arguments: str) -> str:
        values, name, columns = arguments.split(maxsplit=2)
        listed = ", ".join(f"{column} {self._types[kind]} PATH '$.{column}'" for column, kind in _columns_of(columns))
        return f"JSON_TABLE({values}, '$[*]' COLUMNS ({listed})) {name}"

    def upsert(self, arguments: str) -> str:
        _, _, columns = arguments.partition(":")
        names, _, table = columns.partition(" from ")
        source = f"{table}." if table else ":"
        return f"ON DUPLICATE KEY UPDATE {', '.join(f'{n.strip()} = {source}{n.strip()}' for n in names.split(','))}"

    def keep(self, arguments: str) -> str:
        table, _, key = arguments.partition(":")
        column = key.partition(",")[0].strip()
        return f"ON DUPLICATE KEY UPDATE {column} = eventlog.{table}.{column}"  # changes nothing

    def list(self, arguments: str) -> str:
        columns, condition, order = _rows_in(arguments)
        ordered = f" ORDER BY {order}" if order else ""
        rows = f"GROUP_CONCAT(IF({condition}, {self._as_json(columns)}, NULL){ordered})"
        return f"CONCAT('[' COLLATE utf8mb4_bin, {rows}, ']')"

    def last(self, arguments: str) -> str:
        columns, condition, order = _rows_in(arguments)
        if len(columns) == 1:
            first = "MIN" if order.endswith("DESC") else "MAX"
            return f"{first}(IF({condition}, {columns[0][0]}, NULL))"
        rows = f"GROUP_CONCAT(IF({condition}, {self._as_json(columns)}, NULL) ORDER BY {order} SEPARATOR '\n')"
        return f"SUBSTRING_INDEX({rows}, '\n', -1)"

    def _as_json(self, columns: Sequence[tuple[str, str]]) -> str:
        texts = [f"CAST({column} AS CHAR) COLLATE utf8mb4_bin" for column, _ in columns]
        return f"JSON_QUOTE({texts[0]})" if len(texts) == 1 else f"JSON_ARRAY({', '.join(texts)})"


_OF_EVENTS = "sqlite_autoindex_eventlog_event_notifications_2"  # the implicit index of the second key


class SqliteSyntax(Syntax):
    dialect = "sqlite"
    markers: Mapping[str, str] = {
        "now": ":process_now",  # all processes that can open the file have the same clock
        "join": "CROSS JOIN",
        "unfinished": "(n.state = 'PENDING' OR n.state = 'FAILED' OR n.state = 'DYING')",
        "dead": "(n.state = 'DEAD' OR n.state = 'EXPIRED')",
        **_WITH_PARTIAL_INDEXES,
        "partition": "0",
        "for_update": "",  # a write transaction holds the only write lock
    }

    def finished(self, text: str, columns: int) -> str:
        """Return all rows of a query as one JSON text, because each separate row costs a thread switch."""
        text = text.replace("eventlog.", "eventlog_")
        if not columns:
            return text
        names = ", ".join(f"c{number}" for number in range(columns))
        return f"WITH found({names}) AS (\n{text}\n)\nSELECT json_group_array(json_array({names})) FROM found"

    def table(self, arguments: str) -> str:
        name, index, alias = (*arguments.split(), "", "")[:3]
        own = {
            "primary": f"sqlite_autoindex_eventlog_{name}_1",
            "event_notifications_event": _OF_EVENTS,
            "event_notifications_partition": "eventlog_event_notifications_due",  # each handler has a single partition
        }
        forced = f"INDEXED BY {own.get(index, f'eventlog_{index}')}" if index else ""
        if index == "events_sequence":  # the sequence is the rowid
            forced = "NOT INDEXED"
        return " ".join(filter(None, (f"eventlog_{name}", alias and f"AS {alias}", forced)))

    def among(self, arguments: str) -> str:
        column, values = arguments.split()
        return f"{column} IN (SELECT value FROM json_each({values}))"

    ids = among

    def rows(self, arguments: str) -> str:
        values, name, columns = arguments.split(maxsplit=2)
        listed = ", ".join(f"json_extract(value, '$.{column}') AS {column}" for column, _ in _columns_of(columns))
        return f"(SELECT {listed} FROM json_each({values})) AS {name}"

    def list(self, arguments: str) -> str:
        columns, condition, _ = _rows_in(arguments)
        # Appending the empty string makes the JSON a string, also within the JSON text of all rows.
        return f"json_group_array({self._as_json(columns)}) FILTER (WHERE {condition}) || ''"

    def last(self, arguments: str) -> str:
        columns, condition, order = _rows_in(arguments)
        if len(columns) == 1:
            first = "min" if order.endswith("DESC") else "max"
            return f"{first}({columns[0][0]}) FILTER (WHERE {condition})"
        return f"json_extract(json_group_array({self._as_json(columns)}) FILTER (WHERE {condition}), '$[#-1]') || ''"

    def _as_json(self, columns: Sequence[tuple[str, str]]) -> str:
        texts = [f"CAST({column} AS TEXT)" for column, _ in columns]
        return texts[0] if len(texts) == 1 else f"json_array({', '.join(texts)})"


def _rows_in(text: str) -> tuple[list[tuple[str, str]], str, str]:
    """Parse the columns, condition and order in ``n.id id if n.is_match by n.id DESC``."""
    text, _, order = text.partition(" by ")
    columns, _, condition = text.partition(" if ")
    return _columns_of(columns), condition or "TRUE", order


def _columns_of(text: str) -> list[tuple[str, str]]:
    """Parse the names and types in ``name text, starts int``."""
    return [(name, kind) for name, kind in (column.split() for column in text.split(","))]
