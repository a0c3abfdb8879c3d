"""Classification of PostgreSQL errors, by SQLSTATE and never by text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from outboxio.errors import DatabaseUnavailable

# --- classes ---------------------------------------------------------------------------------------


def named(*names: str) -> tuple[type[Exception], ...]:
    """Return the exception classes with these names, for ``except``. psycopg's names have no suffix ``Error``.

    Only loaded drivers are searched; no driver is imported.
    """
    modules: list[Any] = [sys.modules.get("asyncpg.exceptions"), sys.modules.get("psycopg.errors")]
    variants = {each for name in names for each in (name, f"{name}Error")}
    return tuple(cls for module in modules for name in variants if (cls := getattr(module, name, None)) is not None)


def untranslatable() -> tuple[type[Exception], ...]:
    """Return the exceptions for a character that the database cannot store. psycopg encodes texts itself."""
    return (*named("UntranslatableCharacter"), UnicodeEncodeError)


def connecting() -> tuple[type[Exception], ...]:
    """Return the exceptions of a driver that cannot connect."""
    return (OSError, OverflowError, *named("Postgres", "Interface", "InternalClient", "Error"))


def _state(error: BaseException) -> str | None:
    """Return the SQLSTATE; ``None`` for errors of the driver itself."""
    return getattr(error, "sqlstate", None)


def _is_of_psycopg(error: BaseException) -> bool:
    return type(error).__module__.startswith("psycopg")


# --- outdated statements ---------------------------------------------------------------------------
#
# Prepared statements become invalid when a table changes.
#
# asyncpg prepares a statement once per connection. After ``ALTER TABLE``, the server rejects the prepared statement if
# its columns changed: once per statement and connection. So after the first rejection, every connection of the shard
# drops all of its prepared statements at its next checkout.

# InvalidSqlStatementName follows a DISCARD or DEALLOCATE of your application.
_NO_SUCH_STATEMENT = "26000"
_CHANGED_RESULT = "RevalidateCachedQuery"  # the function in the server that rejects a statement for its columns


def is_outdated(error: BaseException) -> bool:
    """True if a statement failed only because it was prepared before a table changed."""
    if _is_of_psycopg(error):
        diag: Any = getattr(error, "diag", None)
        return _state(error) == _NO_SUCH_STATEMENT or getattr(diag, "source_function", None) == _CHANGED_RESULT
    return _state(error) == _NO_SUCH_STATEMENT or isinstance(
        error, named("InvalidCachedStatement", "OutdatedSchemaCache")
    )


class Plans:
    """Counts the rejected prepared statements of one shard."""

    def __init__(self) -> None:
        self.refusals = 0
        """How often a server rejected an outdated prepared statement."""

    def record(self, errors: Iterable[BaseException]) -> None:
        """Count a failure if an outdated prepared statement caused it."""
        self.refusals += any(map(is_outdated, errors))

    async def renew(self, connection: Any) -> None:
        """Drop the prepared statements of a connection that predates the latest rejection."""
        connection.refusals = self.refusals
        await connection.reload_schema_state()


# --- errors ----------------------------------------------------------------------------------------


_TRANSIENT = {"40001", "40P01"}  # serialization failure, deadlock
_LACKS_SCHEMA = {"42P01", "42703", "3F000"}  # undefined table, column, schema
_LACKS_RIGHTS = "42501"
_READ_ONLY = "25006"  # a standby, or default_transaction_read_only
_SHUTTING_DOWN = {"57P01", "57P02", "57P03", "57P05"}  # admin shutdown, crash, not accepting, idle session


def is_transient(error: BaseException) -> bool:
    return _state(error) in _TRANSIENT or is_outdated(error)


def refuses_value(error: BaseException) -> bool:
    """True if the same value would be rejected again.

    - Class 22, data exception: NUL, a lone surrogate, a text that is too long.
    - Class 54, program limit exceeded: a row that is too big.
    - Class 23, a constraint, and P0001, an error from a trigger, which someone has added to a table of outboxio.
    """
    if (state := _state(error)) is not None:
        return state[:2] in ("22", "23", "54") or state == "P0001"
    return _refused_by_driver(error)


def is_unreachable(error: BaseException) -> bool:
    if (state := _state(error)) is not None:
        return state[:2] == "08" or state in _SHUTTING_DOWN or is_read_only(error)
    if isinstance(error, DatabaseUnavailable):
        return True
    # InternalClientError: the driver is out of sync with the protocol, and closes the connection. It is raised by the
    # first statement after the server ended the session, while the socket is still open.
    lost: tuple[type[Exception], ...] = (OSError, *named("Interface", "InternalClient", "OperationalError"))
    return isinstance(error, lost) and not (_refused_by_driver(error) or is_outdated(error))


def is_read_only(error: BaseException) -> bool:
    """True if the server rejected a write: on a standby, or in a read-only transaction."""
    return _state(error) == _READ_ONLY


def lacks_schema(error: BaseException) -> bool:
    return _state(error) in _LACKS_SCHEMA


def lacks_rights(error: BaseException) -> bool:
    return _state(error) == _LACKS_RIGHTS


def _refused_by_driver(error: BaseException) -> bool:
    """True if the driver could not encode an argument."""
    if isinstance(error, named("Interface")):
        return isinstance(error, ValueError)  # of asyncpg
    return isinstance(error, UnicodeEncodeError) or (_is_of_psycopg(error) and isinstance(error, named("DataError")))
