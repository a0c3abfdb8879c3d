"""Classification of MySQL and MariaDB errors, by number and never by text."""

from __future__ import annotations

import asyncio

from outboxio.errors import DatabaseUnavailable

LOCKED = 1205
"""A wait for a lock timed out. MariaDB also uses it for a statement that must not wait for a lock."""
MAY_NOT_WAIT = 3572
"""The statement must not wait for a lock (MySQL)."""
DEADLOCK = 1213
TOO_LARGE = 1301
"""The result of a function, such as the JSON of a row, would exceed max_allowed_packet."""

# A row that changed since the snapshot, a lock wait timeout, a deadlock, a table that changed since the snapshot. The
# same statements may succeed when they are retried.
_TRANSIENT = {1020, LOCKED, DEADLOCK, 1412}
# The server has rolled back the whole transaction instead of only the statement.
_ROLLED_BACK = {1020, DEADLOCK}
_LACKS_SCHEMA = {1049, 1054, 1146, 1176}  # no such database, column, table, index

_LACKS_RIGHTS = {1044, 1142, 1143, 1227, 1370}

# Besides the driver's DataError and IntegrityError: an index key that is too long, a packet that is too large, JSON
# that is malformed, too large, too deeply nested, or rejected by a check, a row that is too big, an error that a
# trigger raises, a text that is not a date.
_REFUSES_VALUE = {1071, 1118, 1153, 1300, 1301, 1366, 1367, 1406, 1525, 1644, 3140, 3141, 3150, 3157, 3819, 4025, 4038}

# The server is unreachable, is starting up or shutting down, has closed the session, or is currently read-only.
_READ_ONLY = {1047, 1290, 1792, 1836, 1874, 3100}
# The numbers of _READ_ONLY that also stand for unrelated options of the server, or for a READ ONLY transaction.
AMBIGUOUS = {1290, 1792}
_UNREACHABLE = {
    *_READ_ONLY, 1040, 1041, 1042, 1043, 1045, 1053, 1077, 1079, 1080, 1081, 1129, 1130, 1152, 1158, 1159, 1160, 1161,
    1184, 1203, 1226, 1317, 1927, 2002, 2003, 2006, 2012, 2013, 2014, 2055, 3168, 3169, 4031,
}  # fmt: skip

_MODULES = ("pymysql.err", "asyncmy.errors")  # of aiomysql, and of asyncmy in a user-supplied engine


def number(error: BaseException) -> int | None:
    """Return the number of an error; ``None`` for errors without one."""
    first = error.args[0] if _is(error, "MySQLError") and error.args else None
    return first if isinstance(first, int) else None


def is_transient(error: BaseException) -> bool:
    return number(error) in _TRANSIENT


def rolled_back(error: BaseException) -> bool:
    """True if the server has rolled back the whole transaction."""
    return number(error) in _ROLLED_BACK


def refuses_value(error: BaseException) -> bool:
    if _is(error, "DataError", "IntegrityError") or number(error) in _REFUSES_VALUE:
        return True
    return isinstance(error, UnicodeEncodeError)  # a lone surrogate, rejected by the driver


def is_unreachable(error: BaseException) -> bool:
    if isinstance(error, DatabaseUnavailable):
        return True
    if _is(error, "MySQLError"):
        # Without a number: the driver lost the connection, or is out of sync with the protocol.
        return number(error) in _UNREACHABLE or _is(error, "InterfaceError") or _is_out_of_step(error)
    return isinstance(error, OSError | TimeoutError | asyncio.IncompleteReadError)


def is_read_only(error: BaseException) -> bool:
    """True if the server rejected a write: on a read-only server, or in a read-only transaction."""
    return number(error) in _READ_ONLY


def lacks_schema(error: BaseException) -> bool:
    return number(error) in _LACKS_SCHEMA


def lacks_rights(error: BaseException) -> bool:
    return number(error) in _LACKS_RIGHTS


def _is_out_of_step(error: BaseException) -> bool:
    return _is(error, "InternalError") and number(error) is None


def _is(error: BaseException, *kinds: str) -> bool:
    """True for a driver error with any of these class names. The driver does not need to be installed."""
    return any(kind.__name__ in kinds and kind.__module__ in _MODULES for kind in type(error).__mro__)
