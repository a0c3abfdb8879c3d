"""What SQLite's errors mean to us, by result code; by text only where SQLite has no code for it."""

from __future__ import annotations

import re
import sqlite3

# Another process writes, or two raced to set up the shared memory of one file.
_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_REFUSES_VALUE = {sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
_UNREACHABLE = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
}

# For all errors in a statement there is one code, SQLITE_ERROR, so here the text must be asked.
_LACKS_SCHEMA = re.compile(r"no such (table|column|index): |has no column named ")


def is_transient(error: BaseException) -> bool:
    return _code(error) in _TRANSIENT


def refuses_value(error: BaseException) -> bool:
    if _code(error) in _REFUSES_VALUE:
        return True
    if isinstance(error, sqlite3.ProgrammingError):
        return str(error).startswith("Error binding parameter")  # of a type that it does not know
    # Refused by sqlite3 before SQLite saw it: a lone surrogate, an integer over 64 bits, a text over 2 GB.
    return isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | UnicodeEncodeError | OverflowError)


def is_unreachable(error: BaseException) -> bool:
    return _code(error) in _UNREACHABLE or isinstance(error, OSError)


def lacks_schema(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and _LACKS_SCHEMA.search(str(error)) is not None


def _code(error: BaseException) -> int | None:
    """The primary result code: what is more is in the upper bits. Errors of the module itself have none."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
