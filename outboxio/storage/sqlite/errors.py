"""The meaning of SQLite's errors: by result code, and by text only where SQLite has no code."""

from __future__ import annotations

import re
import sqlite3

# A second process writes, or two processes set up the shared memory of a file at the same time.
_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_REFUSES_VALUE = {sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
_UNREACHABLE = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
}

# SQLite has the single code SQLITE_ERROR for all errors in a statement, so only the text tells which name is unknown.
_LACKS_SCHEMA = re.compile(r"no such (table|column|index): |has no column named ")


# Values that cannot be read have no code either: bytes in place of a text, and bytes that are no text.
_UNREADABLE = re.compile(r"JSON cannot hold BLOB values|Could not decode to UTF-8")


def is_transient(error: BaseException) -> bool:
    return _code(error) in _TRANSIENT


def refuses_value(error: BaseException) -> bool:
    if _code(error) in _REFUSES_VALUE:
        return True
    if isinstance(error, sqlite3.ProgrammingError):
        return str(error).startswith("Error binding parameter")  # the value has a type that sqlite3 does not know
    # The sqlite3 module itself refuses a lone surrogate, an integer over 64 bits, a text over 2 GB.
    return isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | UnicodeEncodeError | OverflowError)


def is_unreachable(error: BaseException) -> bool:
    return _code(error) in _UNREACHABLE or isinstance(error, OSError)


def lacks_rights(error: BaseException) -> bool:
    """Never: SQLite has no users. A file that may not be written cannot be reached for operations."""
    return False


def lacks_schema(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and _LACKS_SCHEMA.search(str(error)) is not None


def cannot_be_read(error: BaseException) -> bool:
    """True if SQLite or Python cannot make text of a value. A second read of the same row fails again."""
    return isinstance(error, sqlite3.OperationalError) and _UNREADABLE.match(str(error)) is not None


def _code(error: BaseException) -> int | None:
    """The primary result code, without the details in the upper bits. Errors of the module itself have no code."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
