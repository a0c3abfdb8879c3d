"""Statements that are written once for all dialects.

Each table that only operators use is a module in ``storage/tables``. Its statements are constants with named
parameters, and each dialect renders them in its syntax on first use:

- ``:name`` is a parameter.
- A *marker* in braces stands for syntax that differs, such as ``{table events events_causation}`` for a table with the
  index to use. The markers are in ``syntax.py``.
- A *part* is a marker whose text the statement supplies itself, for example the conditions of a search.
- A dialect that needs a different plan or statement has a separate text.

``python -m outboxio.storage`` prints the statements as rendered for a dialect.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import cached_property, lru_cache
from types import UnionType
from typing import Any, Generic, Protocol, Self, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.structs import asdict, astuple

from outboxio.storage.syntax import Syntax
from outboxio.support.codec import decode_names, is_list, is_object

R = TypeVar("R")
T = TypeVar("T")

_DOCUMENTS = (dict, list, tuple, Mapping, Sequence, msgspec.Raw)

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_MARKER = re.compile(r"\{(\w+)(?: ([^{}]*))?\}")


class Text:
    """A statement, or a part of statements.

    ``postgres``, ``mysql`` (also for MariaDB), ``mariadb`` and ``sqlite`` replace ``text`` for these dialects; they are
    empty if the dialect has no such statement.
    """

    def __init__(
        self,
        text: str,
        *,
        postgres: str | None = None,
        mysql: str | None = None,
        mariadb: str | None = None,
        sqlite: str | None = None,
    ) -> None:
        self._text = text
        self._texts = {
            "postgres": postgres, "mysql": mysql, "mariadb": mysql if mariadb is None else mariadb, "sqlite": sqlite,
        }  # fmt: skip

    def source(self, syntax: Syntax) -> str:
        """Return the text for a dialect, with markers."""
        source = self._texts[syntax.dialect]
        return self._text if source is None else source


Parts = Mapping[str, str | Text]
"""Texts by the name of the marker that they replace."""


class Statement(Text):
    """A statement that changes rows."""

    def __init__(self, text: str, *, needs: Query[Any] | None = None, **texts: str | None) -> None:
        """``needs``: if this query returns no row, the statement changes nothing. SQLite runs it first, without the
        write lock."""
        super().__init__(text, **texts)
        self.needs = needs
        self.parts: Parts = {}
        self.texts: dict[Syntax, str] = {}
        """The rendered texts."""

    def having(self, **parts: str | Text) -> Self:
        """Return the statement with these parts, which may contain markers."""
        filled: Self = _having(self, tuple(parts.items()))
        return filled

    def rendered(self, syntax: Syntax) -> str:
        """Return the text in the syntax of a dialect, with parameters still as ``:name``."""
        if (text := self.texts.get(syntax)) is None:
            text = self.source(syntax)
            while _MARKER.search(text):  # the arguments of a marker may contain markers
                text = _MARKER.sub(lambda marker: self._replacement(marker, syntax), text)
            # The text is empty if the dialect does not have the statement.
            text = self.texts[syntax] = text and syntax.finished(self._shaped(text.strip(), syntax), self.columns)
        return text

    def _replacement(self, marker: re.Match[str], syntax: Syntax) -> str:
        if marker[2] is not None or (part := self.parts.get(marker[1])) is None:
            return syntax.replacement(marker)
        return part if isinstance(part, str) else part.source(syntax)

    def _shaped(self, text: str, syntax: Syntax) -> str:
        """Return the whole text, for queries that one statement runs many times."""
        return text

    @property
    def columns(self) -> int:
        """The number of columns that the statement returns."""
        return 0


S = TypeVar("S", bound=Statement)


@lru_cache(maxsize=512)
def _having(statement: S, parts: tuple[tuple[str, str | Text], ...]) -> S:
    filled = copy.copy(statement)
    filled.parts, filled.texts = {**statement.parts, **dict(parts)}, {}
    return filled


class Query(Statement, Generic[R]):
    """A statement that returns rows of the type ``row``.

    ``row``: a ``tuple[...]``, a ``Struct`` whose fields are the columns in this order, or the type of a single column.
    Columns whose type is a list, dict or struct are JSON text.
    """

    def __init__(
        self,
        text: str,
        row: type[R],
        *,
        fields: Sequence[str] | None = None,
        make: Callable[[dict[str, Any]], R] | None = None,
        lenient: bool = False,
        each: str = "",
        **texts: str | None,
    ) -> None:
        """``fields``: the fields of the struct that are columns, in this order, if not all are.

        ``make``: creates the struct from the driver's values, by field, for columns with documents of other tools.

        ``each``: for :meth:`Port.fetch_each`, the parameters that differ between runs, and their types as in
        ``{rows ...}``.

        ``lenient``: replace bytes that are not valid UTF-8, which other tools can store in SQLite, by U+FFFD."""
        super().__init__(text, needs=None, **texts)
        self._each = each
        self._row: Any = row
        self._fields = _fields_of(row, fields)
        self._made_by = make
        self.lenient = lenient

    def rows(self, raw: Sequence[Sequence[Any]]) -> list[R]:
        """Convert the rows of a driver."""
        rows = [[int(value) if type(value) is Decimal else value for value in row] for row in raw]
        for column, decode in self._documents.items():
            for row in rows:
                if row[column] is not None:
                    row[column] = decode(row[column])
        return [self._make(row) for row in msgspec.convert(rows, list[self._read], strict=False)]  # type: ignore[name-defined]  # a generated type

    @property
    def columns(self) -> int:
        return len(self._types)

    def _shaped(self, text: str, syntax: Syntax) -> str:
        return syntax.for_each(text, self._each) if self._each else text

    @cached_property
    def _types(self) -> Sequence[Any]:
        if self._fields is not None:
            return list(self._fields.values())
        return get_args(self._row) if get_origin(self._row) is tuple else [self._row]

    @cached_property
    def _documents(self) -> dict[int, Callable[[Any], Any]]:
        """The decoders of the columns with JSON text."""
        kinds = () if self._made_by else self._types
        return {column: _decoder(kind) for column, kind in enumerate(kinds) if _is_document_type(kind)}

    @cached_property
    def _read(self) -> type[msgspec.Struct]:
        """The type of a row with decoded documents. Rows are converted as a whole, for speed."""
        kinds = [Any if self._made_by or n in self._documents else kind for n, kind in enumerate(self._types)]
        names = self._fields or [f"c{number}" for number in range(self.columns)]
        return msgspec.defstruct(
            "Read", list(zip(names, kinds, strict=True)), array_like=True, forbid_unknown_fields=True
        )

    @cached_property
    def _make(self) -> Callable[[Any], R]:
        row = self._row
        if self._fields is not None:
            make = self._made_by
            return (lambda read: row(**asdict(read))) if make is None else (lambda read: make(asdict(read)))
        return astuple if get_origin(row) is tuple else (lambda read: astuple(read)[0])  # type: ignore[return-value]  # R is that tuple or value


class Jumps(Query[str]):
    """All distinct values of a column except the empty string, by jumps along an index (a loose index scan).

    ``text`` is a query for the first value ``> :start``. The rows between two values are not read.
    """

    def __init__(self, text: str, *, mysql: str | None = None, mariadb: str | None = None) -> None:
        super().__init__(text, str, mysql=mysql, mariadb=mariadb)

    def _shaped(self, text: str, syntax: Syntax) -> str:
        return syntax.jumping(text)


class Runner(Protocol):
    """Runs statements: a port, or an open transaction of a port."""

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        """Return the rows of a query."""
        ...

    async def execute(self, statement: Statement, **values: Any) -> int:
        """Run a statement, on a port in autocommit mode; return the number of changed rows."""
        ...


class Port(Runner, Protocol):
    """Runs the statements of ``storage/tables``; one class for each dialect."""

    async def fetch_each(self, query: Query[R], each: Sequence[Mapping[str, Any]], **values: Any) -> list[R]:
        """Return the rows of a query that is run for each of these sets of values, in as few messages as possible."""
        ...

    async def transaction(self, work: Callable[[Runner], Coroutine[Any, Any, T]]) -> T:
        """Call ``work`` in a transaction, which commits unless ``work`` raises. ``work`` may only await statements.

        ``work`` may be called again, and on SQLite it runs in the thread of the connection.
        """
        ...

    async def change_and_fetch(self, change: Statement, query: Query[R], **values: Any) -> list[R]:
        """Run both in a transaction. If no row was changed, the query is skipped and the result is empty."""

        async def work(transaction: Runner) -> list[R]:
            changed = await transaction.execute(change, **values)
            return await transaction.fetch(query, **values) if changed else []

        return await self.transaction(work)

    def prepared(self, statement: Statement, values: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
        """Return a statement and its positional arguments, for a session of the dialect."""
        ...


def parameters(text: str) -> list[str]:
    """Return the names of the parameters, each as often as it occurs."""
    return _PARAMETER.findall(text)


@lru_cache(maxsize=1024)
def numbered(text: str) -> tuple[str, Sequence[str]]:
    """Replace parameters by ``$1``, ``$2``; return the text and the names of the parameters in this order."""
    names: dict[str, str] = {}
    for name in parameters(text):
        names.setdefault(name, f"${len(names) + 1}")
    return _PARAMETER.sub(lambda found: names[found[1]], text), list(names)


def with_placeholders(text: str, placeholder: Callable[[str], str]) -> str:
    """Replace each parameter by ``placeholder(name)``."""
    return _PARAMETER.sub(lambda found: placeholder(found[1]), text)


def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Return a decoder. A malformed list of names, which another tool may have written, counts as empty."""
    return decode_names if tuple[str, ...] in (kind, *get_args(kind)) else msgspec.json.Decoder(kind).decode


def _fields_of(row: Any, chosen: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Return the fields of a struct and their types, all or the chosen ones; ``None`` for other types."""
    if not (isinstance(row, type) and issubclass(row, msgspec.Struct)):
        return None
    types = {field.name: field.type for field in msgspec.structs.fields(row)}
    return types if chosen is None else {name: types[name] for name in chosen}


def _is_document_type(kind: Any) -> bool:
    """Return True for the type of a JSON column: a list, dict or struct, or one of these and ``None``."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    return any(_fields_of(part) is not None or (get_origin(part) or part) in _DOCUMENTS for part in parts)


def as_document(value: Any) -> str:
    """Encode a value as JSON. Timestamps in a list of rows have the format of SQLite, which all servers accept."""
    if is_list(value) and value and is_object(value[0]):
        rows: list[Any] = value
        value = [{n: _plain(v) for n, v in row.items()} for row in rows]
    return msgspec.json.encode(value).decode()


def _plain(value: Any) -> Any:
    return value.isoformat(" ", "microseconds") if isinstance(value, datetime) else value


def is_document(value: Any) -> bool:
    """Return True for a parameter that is sent as JSON text: a dict, a ``Raw`` value, or a list of dicts."""
    return isinstance(value[0] if isinstance(value, list) and value else value, dict | msgspec.Raw)


def delete(table: str, where: str, *, order: str) -> Statement:
    """Return a statement that deletes up to ``:limit`` rows of a table, in index order."""
    found = f"FROM eventlog.{table} WHERE {where} ORDER BY {order} LIMIT :limit"
    return Statement(
        f"DELETE {found}",
        postgres=f"DELETE FROM eventlog.{table} WHERE ctid = ANY (ARRAY(SELECT ctid {found}))",
        sqlite=f"DELETE FROM eventlog.{table} WHERE rowid IN (SELECT rowid {found})",
        needs=Query(f"SELECT 1 {found.replace(':limit', '1')}", int),
    )
