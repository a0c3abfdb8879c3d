"""What PostgreSQL's errors mean to us, by SQLSTATE and never by text."""

from __future__ import annotations

import asyncpg

_TRANSIENT = {"40001", "40P01"}  # serialization failure, deadlock
_LACKS_SCHEMA = {"42P01", "42703", "3F000"}  # undefined table, column, schema
_SHUTTING_DOWN = {"57P01", "57P02", "57P03", "57P05"}  # admin shutdown, crash, not accepting, idle session


def is_transient(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) in _TRANSIENT


def refuses_value(error: BaseException) -> bool:
    """Whether the same value would be refused again.

    Class 22 is "data exception": NUL, a lone surrogate, a text too long; 54 is a program limit, a row too big; 23 is
    a constraint, and P0001 what a trigger raises: a user's own, on our tables.
    """
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate)[:2] in ("22", "23", "54") or error.sqlstate == "P0001"
    return _refused_by_driver(error)


def is_unreachable(error: BaseException) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate)[:2] == "08" or error.sqlstate in _SHUTTING_DOWN
    return isinstance(error, OSError | TimeoutError | asyncpg.InterfaceError) and not _refused_by_driver(error)


def lacks_schema(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) in _LACKS_SCHEMA


def _refused_by_driver(error: BaseException) -> bool:
    """asyncpg could not even encode an argument."""
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)
