"""Statements that are written once for all dialects.

A table that only operators use is a module in ``storage/tables``. Its statements are constants with named parameters,
and each dialect renders them in its own syntax at the first use:

- ``:name`` is a parameter.
- A *marker* in braces stands for syntax that differs, such as ``{table events events_causation}`` for a table with the
  index to use. The methods of :class:`Syntax` are the markers.
- A dialect that needs a different plan or a different statement has its own text beside the shared text.

``python -m outboxio.storage`` prints every statement as a dialect receives it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Generic, Protocol, TypeVar, Union, get_args, get_origin

import msgspec

R = TypeVar("R")

_DOCUMENTS = (dict, list, tuple, Mapping, Sequence, msgspec.Raw)

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_MARKER = re.compile(r"\{(\w+)(?: ([^{}]*))?\}")


class Statement:
    """A statement that changes rows.

    ``postgres``, ``mysql`` (also for MariaDB) and ``sqlite`` are texts for these dialects in place of ``text``.
    """

    def __init__(
        self,
        text: str,
        *,
        postgres: str | None = None,
        mysql: str | None = None,
        sqlite: str | None = None,
        needs: Query[Any] | None = None,
    ) -> None:
        """``needs``: a query without which the statement changes nothing. SQLite runs it first, without its only lock
        for writing."""
        self.needs = needs
        self._text = text
        self._texts = {"postgres": postgres, "mysql": mysql, "sqlite": sqlite}
        self._rendered: dict[Syntax, str] = {}

    def rendered(self, syntax: Syntax) -> str:
        """The text in the syntax of a dialect, with parameters still as ``:name``."""
        if (text := self._rendered.get(syntax)) is None:
            source = self._texts[syntax.dialect]
            text = _MARKER.sub(syntax.replacement, self._text if source is None else source).strip()
            text = self._rendered[syntax] = syntax.finished(text, self)
        return text

    @property
    def columns(self) -> int:
        """The number of columns that the statement returns."""
        return 0


class Query(Statement, Generic[R]):
    """A statement that returns rows of the type ``row``.

    ``row``: a ``tuple[...]``, a ``Struct`` whose fields are the columns in this order, or the type of a single column.
    A column whose type is a list, a dict or a struct is JSON text.
    """

    def __init__(
        self,
        text: str,
        row: type[R],
        *,
        postgres: str | None = None,
        mysql: str | None = None,
        sqlite: str | None = None,
        fields: Sequence[str] | None = None,
        lenient: bool = False,
    ) -> None:
        """``fields``: the fields of the struct that are columns, in this order, if not all are.

        ``lenient``: bytes that are not valid UTF-8, which other tools can store in SQLite, become U+FFFD."""
        super().__init__(text, postgres=postgres, mysql=mysql, sqlite=sqlite)
        self._row: Any = row
        self._fields = _fields_of(row, fields)
        self.lenient = lenient

    def rows(self, raw: Iterable[Sequence[Any]]) -> list[R]:
        """The rows of a driver as values."""
        convert, make = self._converters, self._make
        return [make(*[to(value) for to, value in zip(convert, row, strict=True)]) for row in raw]

    @property
    def columns(self) -> int:
        return len(self._types)

    @cached_property
    def _types(self) -> Sequence[Any]:
        if self._fields is not None:
            return list(self._fields.values())
        return get_args(self._row) if get_origin(self._row) is tuple else [self._row]

    @cached_property
    def _converters(self) -> Sequence[Callable[[Any], Any]]:
        return [_converter(kind) for kind in self._types]

    @cached_property
    def _make(self) -> Callable[..., R]:
        row, fields = self._row, self._fields
        if fields is not None:
            return lambda *values: row(**dict(zip(fields, values, strict=True)))
        return (lambda *values: values) if get_origin(row) is tuple else (lambda value: value)  # type: ignore[return-value]


class Syntax(ABC):
    """The syntax of a dialect. The public methods below ``finished`` are the markers of statements."""

    dialect: str

    def replacement(self, marker: re.Match[str]) -> str:
        """The text that replaces a marker."""
        name, arguments = marker[1], marker[2]
        return getattr(self, name)() if arguments is None else getattr(self, name)(arguments)  # type: ignore[no-any-return]

    def finished(self, text: str, statement: Statement) -> str:
        """The text after all markers were replaced."""
        return text

    @abstractmethod
    def table(self, arguments: str) -> str:
        """``FROM {table events events_causation e}``: a table, the index to read it along, and an alias.

        The index ``primary`` is the primary key. ``{table events}`` leaves the choice to the database.
        """

    @abstractmethod
    def text(self, column: str) -> str:
        """``{text payload}``: a column of JSON as text."""

    @abstractmethod
    def json(self, value: str) -> str:
        """``{json :payload}``: a parameter or column of text as a value of a JSON column."""

    @abstractmethod
    def among(self, arguments: str) -> str:
        """``{among name :names}``: the column is one of a list of texts, which must not be empty."""

    @abstractmethod
    def ids(self, arguments: str) -> str:
        """``{ids id :ids}``: the column is one of a list of UUIDs, which must not be empty."""

    @abstractmethod
    def rows(self, arguments: str) -> str:
        """``FROM {rows :runs r name text, starts int}``: a list of dicts as the table ``r``.

        The types are ``text``, ``document`` (a long text), ``int``, ``bigint``, ``bool``, ``timestamp`` and ``id``.
        """

    @abstractmethod
    def upsert(self, arguments: str) -> str:
        """``INSERT ... {upsert id: name, date}``: where a row with this key exists, assign the new values.

        ``{upsert id: name from r}``: the values are columns of the inserted table ``r``.
        """

    @abstractmethod
    def keep(self, key: str) -> str:
        """``INSERT ... {keep namespace, name}``: where a row with this key exists, do nothing."""

    @abstractmethod
    def now(self) -> str:
        """``{now}``: the time of the database, in UTC."""


class Port(Protocol):
    """How the tables of operators are read and written: one class for each dialect."""

    async def fetch(self, query: Query[R], **values: Any) -> list[R]:
        """The rows of a query."""
        ...

    async def execute(self, statement: Statement, **values: Any) -> int:
        """Run a statement as a transaction of its own; the number of changed rows."""
        ...

    async def change_and_fetch(self, change: Statement, query: Query[R], **values: Any) -> list[R]:
        """Run both in a transaction. Without a changed row, the query is skipped, and the result is empty."""
        ...


def numbered(text: str) -> tuple[str, list[str]]:
    """A text with ``$1``, ``$2`` in place of parameters, and the names of the parameters in this order."""
    names: dict[str, str] = {}
    for name in _PARAMETER.findall(text):
        names.setdefault(name, f"${len(names) + 1}")
    return _PARAMETER.sub(lambda found: names[found[1]], text), list(names)


def with_placeholders(text: str, placeholder: Callable[[str], str]) -> str:
    """A text with ``placeholder(name)`` in place of each parameter."""
    return _PARAMETER.sub(lambda found: placeholder(found[1]), text)


def _fields_of(row: Any, chosen: Sequence[str] | None = None) -> dict[str, Any] | None:
    """The fields of a struct and their types, all or the chosen ones; ``None`` for other types."""
    if not (isinstance(row, type) and issubclass(row, msgspec.Struct)):
        return None
    types = {field.name: field.type for field in msgspec.structs.fields(row)}
    return types if chosen is None else {name: types[name] for name in chosen}


def _converter(kind: Any) -> Callable[[Any], Any]:
    """A function from a value of a driver to a value of this type. Lists, dicts and structs come as JSON text."""
    if kind is Any:
        return lambda value: value
    wanted = [part for part in get_args(kind) or [kind] if part is not NoneType] if _is_union(kind) else [kind]
    if any(_fields_of(part) is not None or (get_origin(part) or part) in _DOCUMENTS for part in wanted):
        decode = msgspec.json.Decoder(kind).decode
        return lambda value: None if value is None else decode(value)

    def convert(value: Any) -> Any:
        return msgspec.convert(int(value) if isinstance(value, Decimal) else value, kind, strict=False)

    return convert


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def columns_of(text: str) -> list[tuple[str, str]]:
    """The names and types in ``name text, starts int``."""
    return [(name, kind) for name, kind in (column.split() for column in text.split(","))]


def as_document(value: Any) -> str:
    """A value as JSON text. A timestamp in a list of rows is the text that SQLite stores, and that all servers read."""
    if isinstance(value, list):
        value = [{n: _plain(v) for n, v in row.items()} if isinstance(row, dict) else row for row in value]
    return msgspec.json.encode(value).decode()


def _plain(value: Any) -> Any:
    return value.isoformat(" ", "microseconds") if isinstance(value, datetime) else value


def is_document(value: Any) -> bool:
    """True for a parameter that is sent as JSON text: a dict, a ``Raw`` value, or a list of dicts."""
    return isinstance(value[0] if isinstance(value, list) and value else value, dict | msgspec.Raw)


def delete(table: str, where: str, *, order: str) -> Statement:
    """A statement that deletes up to ``:limit`` rows of a table, in the order of an index."""
    found = f"FROM eventlog.{table} WHERE {where} ORDER BY {order} LIMIT :limit"
    return Statement(
        f"DELETE {found}",
        postgres=f"DELETE FROM eventlog.{table} WHERE ctid = ANY (ARRAY(SELECT ctid {found}))",
        sqlite=f"DELETE FROM eventlog.{table} WHERE rowid IN (SELECT rowid {found})",
        needs=Query(f"SELECT 1 {found.replace(':limit', '1')}", int),
    )
