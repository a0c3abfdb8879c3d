"""Classification of SQLite errors, by result code, and by text only where SQLite has no code."""

from __future__ import annotations

import re
import sqlite3

# Another process writes, or two processes initialize the shared memory of a file at the same time.
_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_REFUSES_VALUE = {sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
_UNREACHABLE = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
}

# SQLite uses the code SQLITE_ERROR for all errors in a statement, so only the text shows which name is unknown.
_LACKS_SCHEMA = re.compile(r"no such (table|column|index): |has no column named ")


# Undecodable values have no code either: bytes instead of text, and text that is not valid UTF-8.
_UNREADABLE = re.compile(r"JSON cannot hold BLOB values|Could not decode to UTF-8")


def is_transient(error: BaseException) -> bool:
    return _code(error) in _TRANSIENT


def refuses_value(error: BaseException) -> bool:
    if _code(error) in _REFUSES_VALUE:
        return True
    if isinstance(error, sqlite3.ProgrammingError):
        return str(error).startswith("Error binding parameter")  # the value has a type that sqlite3 does not support
    # The sqlite3 module itself rejects a lone surrogate, an integer over 64 bits, a text over 2 GB.
    return isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | UnicodeEncodeError | OverflowError)


def is_unreachable(error: BaseException) -> bool:
    return _code(error) in _UNREACHABLE or isinstance(error, OSError)


def lacks_rights(error: BaseException) -> bool:
    """Return False: SQLite has no users. A file without write permission counts as unreachable."""
    return False


def lacks_schema(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and _LACKS_SCHEMA.search(str(error)) is not None


def is_undecodable(error: BaseException) -> bool:
    """True if SQLite or Python cannot decode a value as text. Reading the same row again would fail again."""
    return isinstance(error, sqlite3.OperationalError) and _UNREADABLE.match(str(error)) is not None


def _code(error: BaseException) -> int | None:
    """Return the primary result code, without the extended bits. Errors of the sqlite3 module itself have no code."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
