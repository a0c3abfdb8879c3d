"""Parses outboxio's SQL files: the tables, columns, indexes and keys, each with the statements that restore it.

The files define the schema, so the required parts, and the statements that restore a missing part, are derived from
them. This module understands only the few forms of SQL in the files: CREATE TABLE, CREATE INDEX, ALTER TABLE with a
single ADD COLUMN, ADD KEY or DROP KEY, and DROP INDEX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Kind = Literal["table", "column", "index", "key", "primary key"]


class Part(Struct, frozen=True):
    """A table, column, index or key that a file creates, or adds to the table of an earlier file.

    - ``name``: the name of a column or an index; the columns of a key, with commas; empty for a table.
    - ``"primary key"``: a column that a later file adds as the primary key; any other primary key is accepted.
    - ``statements``: the statements that restore the part if it is missing.
    - ``columns``: the columns of an index, with commas.
    - ``repair``: the statements that rebuild an invalid index.
    - ``is_added``: True for a part that a later file adds to an existing table.
    """

    kind: Kind
    table: str
    name: str
    statements: tuple[str, ...]
    columns: str = ""
    repair: tuple[str, ...] = ()
    is_added: bool = False

    @property
    def description(self) -> str:
        """The name of the part in error messages."""
        return {
            "table": f"table {self.table}",
            "column": f"column {self.table}.{self.name}",
            "index": f"index {self.name}",
            "key": f"key ({self.name}) of table {self.table}",
            "primary key": f"the primary key of table {self.table}",
        }[self.kind]


class Change(Struct, frozen=True):
    """What an ALTER TABLE, CREATE INDEX or DROP INDEX adds or drops; ``table`` is empty for DROP INDEX."""

    kind: Literal["column", "index", "primary key"]
    table: str
    name: str
    drops: bool


def statements_in(text: str) -> list[str]:
    """Return the statements of a file, with comments and without the final semicolons."""
    return [statement for statement in _split(text) if _COMMENT.sub("", statement).strip()]


def parts_of(text: str) -> list[Part]:
    """Return all parts that a file creates or adds, tables before their parts."""
    statements = _statements(text)
    tables = [match for statement in statements if (match := _TABLE.fullmatch(statement))]
    created = {table["table"] for table in tables}
    indexes = [match for statement in statements if (match := _INDEX.fullmatch(statement))]
    found: list[Part] = []
    for table in tables:
        of_table = [index[0] for index in indexes if index["table"] == table["table"]]
        found.append(Part("table", table["table"], "", (table[0], *of_table)))
        found += _parts_in(table["table"], table["full"], table["body"])
    for addition in filter(None, map(_ADDITION.fullmatch, statements)):
        found += [replace(part, is_added=True) for part in _parts_added(addition)]
    for index in indexes:
        part = _index(index["table"], index["name"], index["columns"], index[0])
        found.append(replace(part, is_added=index["table"] not in created))
    return found


def change_of(statement: str) -> Change | None:
    """Return the change that a statement of a file makes to an existing table, or ``None``."""
    text = _compact(_COMMENT.sub("", statement)).rstrip("; ")
    if dropped := _DROP.fullmatch(text):
        return Change("index", dropped["table"] or "", dropped["key"] or dropped["index"], drops=True)
    if index := _INDEX.fullmatch(text):
        return Change("index", index["table"], index["name"], drops=False)
    if addition := _ADDITION.fullmatch(text):
        kind: Literal["column", "index", "primary key"] = "index" if addition["key"] else "column"
        kind = "primary key" if "PRIMARY KEY" in addition["item"] else kind
        return Change(kind, addition["table"], addition["name"], drops=False)
    return None


def with_primary_key(create: str, key: Part) -> str:
    """Return a CREATE TABLE that includes the primary key from a later file."""
    statement = _compact(_COMMENT.sub("", create))
    table, addition = _TABLE.fullmatch(statement), _ADDITION.fullmatch(_compact(key.statements[0]))
    assert table is not None
    assert addition is not None
    return f"{statement[: table.end('body')]}, {addition['item']}{statement[table.end('body') :]}"


def changes_of(text: str) -> list[Change]:
    """Return all changes that the statements of a file make to existing tables."""
    return list(filter(None, map(change_of, _statements(text))))


_COMMENT = re.compile(r"--[^\n]*")
_STATEMENT_END = re.compile(r";[ \t]*(?:\n|\Z)")
_FULL = r"(?P<full>eventlog[._](?P<table>\w+))"
_TABLE = re.compile(rf"CREATE TABLE (?:IF NOT EXISTS )?{_FULL} \((?P<body>.*)\)[^)]*")
_INDEX = re.compile(rf"CREATE INDEX (?:IF NOT EXISTS )?(?:eventlog_)?(?P<name>\w+) ON {_FULL} \((?P<columns>[^)]*)\).*")
_ADDITION = re.compile(
    rf"ALTER TABLE {_FULL} ADD (?:COLUMN )?(?:IF NOT EXISTS )?(?P<item>(?P<key>KEY )?(?P<name>\w+) .+?)"
    r"(?:, ALGORITHM=\w+)?(?:, LOCK=\w+)?"
)
_DROP = re.compile(rf"ALTER TABLE {_FULL} DROP KEY (?P<key>\w+)|DROP INDEX (?:IF EXISTS )?eventlog[._](?P<index>\w+)")
_KEY = re.compile(r"(?:PRIMARY KEY|UNIQUE) \((?P<columns>[^)]*)\)")
_NAMED_KEY = re.compile(r"(?:UNIQUE )?KEY (?P<name>\w+) \((?P<columns>.*)\)")
_GENERATES_VALUES = re.compile(r"PRIMARY KEY|IDENTITY|AUTO_INCREMENT")
_NEEDS_VALUES = re.compile(r"(?!.*\b(?:DEFAULT|GENERATED)\b).* NOT NULL")


def _statements(text: str) -> list[str]:
    return [_compact(statement) for statement in _split(_COMMENT.sub("", text))]


def _split(text: str) -> Iterator[str]:
    """Split at semicolons at the ends of lines, except within ``$$`` blocks."""
    begin = 0
    for end in _STATEMENT_END.finditer(text):
        is_in_block = text.count("$$", begin, end.start()) & 1
        if not is_in_block:
            yield text[begin : end.start()]
            begin = end.end()
    yield text[begin:]


def _parts_added(addition: re.Match[str]) -> list[Part]:
    """Return the parts that an ALTER TABLE ... ADD creates."""
    table, full, item = addition["table"], addition["full"], addition["item"]
    if "PRIMARY KEY" in item:
        return [Part("primary key", table, addition["name"], (f"ALTER TABLE {full} ADD COLUMN {item}",))]
    return list(_parts_in(table, full, item))


def _parts_in(table: str, full: str, body: str) -> Iterator[Part]:
    for item in map(_compact, _items(body)):
        name, _, definition = item.partition(" ")
        if key := _KEY.fullmatch(item):
            yield Part("key", table, key["columns"], (f"ALTER TABLE {full} ADD {item}",))
        elif index := _NAMED_KEY.fullmatch(item):
            again = f"ALTER TABLE {full} DROP KEY {index['name']}, ADD {item}"
            yield Part("index", table, index["name"], (f"ALTER TABLE {full} ADD {item}",), index["columns"], (again,))
        else:
            yield Part("column", table, name, tuple(_column_again(full, name, definition)))
            if re.search(r"\b(?:PRIMARY KEY|UNIQUE)\b", definition):
                kind = "PRIMARY KEY" if "PRIMARY KEY" in definition else "UNIQUE"
                yield Part("key", table, name, (f"ALTER TABLE {full} ADD {kind} ({name})",))


def _index(table: str, name: str, columns: str, statement: str) -> Part:
    return Part("index", table, name, (statement,), _compact(columns), (f"REINDEX INDEX eventlog.{name}",))


def _column_again(full: str, name: str, definition: str) -> Iterator[str]:
    """Yield the statements that add a column to a table with rows. Some values must be restored from a backup."""
    if _GENERATES_VALUES.search(definition):
        yield f"-- restore {full} from a backup: the values of its column {name} cannot be generated again"
    elif _NEEDS_VALUES.fullmatch(definition):
        yield f"ALTER TABLE {full} ADD COLUMN {name} {definition.replace(' NOT NULL', '')}"
        yield f"-- then fill {full}.{name} in every row from a backup, before anything uses the table"
    else:
        yield f"ALTER TABLE {full} ADD COLUMN {name} {definition}"


def _items(body: str) -> Iterator[str]:
    """Yield the items of a table's body, split at commas outside of parentheses."""
    depth, begin = 0, 0
    for at, character in enumerate(body):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            yield body[begin:at]
            begin = at + 1
    yield body[begin:]


def _compact(statement: str) -> str:
    return " ".join(statement.split())
