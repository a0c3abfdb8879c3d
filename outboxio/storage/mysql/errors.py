"""What MySQL's and MariaDB's errors mean to us, by number and never by text."""

from __future__ import annotations

import asyncio

LOCKED = 1205
"""A lock was waited for too long, or on MariaDB may not be waited for."""
MAY_NOT_WAIT = 3572
"""A lock may not be waited for, on MySQL."""
DEADLOCK = 1213

# A changed row under a snapshot, a lock waited for too long, a deadlock. After each the same again may succeed.
_TRANSIENT = {1020, LOCKED, DEADLOCK}
# The server has rolled back the whole transaction, not only the statement.
_ROLLED_BACK = {1020, DEADLOCK}
_LACKS_SCHEMA = {1049, 1054, 1146, 1176}  # no such database, column, table, index

_LACKS_RIGHTS = {1044, 1142, 1143, 1227, 1370}

# Beside those that the driver calls errors of data or integrity: an index that is too long, a packet that is too large,
# JSON that is malformed, too large, too deep, or refused by a check; a row that is too big; what a trigger raises.
_REFUSES_VALUE = {1071, 1118, 1153, 1300, 1301, 1366, 1367, 1406, 1644, 3140, 3141, 3150, 3157, 3819, 4025, 4038}

# The server cannot be reached, is going down or starting up, ended the session, or does not write for the time being.
_UNREACHABLE = {
    1040, 1041, 1042, 1043, 1045, 1047, 1053, 1077, 1079, 1080, 1081, 1129, 1130, 1152, 1158, 1159, 1160, 1161,
    1184, 1203, 1226, 1290, 1317, 1836, 1927, 2002, 2003, 2006, 2012, 2013, 2014, 2055, 3168, 3169, 4031,
}  # fmt: skip


_OF_DRIVERS = ("pymysql.err", "asyncmy.errors")


def number(error: BaseException) -> int | None:
    """The error's number; ``None`` for errors that neither server nor driver has numbered."""
    first = error.args[0] if _is(error, "MySQLError") and error.args else None
    return first if isinstance(first, int) else None


def is_transient(error: BaseException) -> bool:
    return number(error) in _TRANSIENT


def rolled_back(error: BaseException) -> bool:
    """Whether the server has rolled back the whole transaction."""
    return number(error) in _ROLLED_BACK


def refuses_value(error: BaseException) -> bool:
    if _is(error, "DataError", "IntegrityError") or number(error) in _REFUSES_VALUE:
        return True
    return isinstance(error, UnicodeEncodeError)  # a lone surrogate, refused by the driver


def is_unreachable(error: BaseException) -> bool:
    if _is(error, "MySQLError"):
        # Without a number: the driver has no connection any more, or lost track of what it reads.
        return number(error) in _UNREACHABLE or _is(error, "InterfaceError") or _is_out_of_step(error)
    return isinstance(error, OSError | TimeoutError | asyncio.IncompleteReadError)


def lacks_schema(error: BaseException) -> bool:
    return number(error) in _LACKS_SCHEMA


def lacks_rights(error: BaseException) -> bool:
    return number(error) in _LACKS_RIGHTS


def _is_out_of_step(error: BaseException) -> bool:
    return _is(error, "InternalError") and number(error) is None


def _is(error: BaseException, *kinds: str) -> bool:
    """Whether it is an error of one of these kinds; the drivers, of which one may not be here, name them alike."""
    return any(kind.__name__ in kinds and kind.__module__ in _OF_DRIVERS for kind in type(error).__mro__)
