"""Converts temporary errors of all drivers to :class:`DatabaseUnavailable`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from outboxio.errors import DatabaseUnavailable
from outboxio.storage.protocols import Database


@contextmanager
def as_unavailable(database: Database) -> Generator[None]:
    """Raise :class:`DatabaseUnavailable` for a temporary error of the driver, such as a lost connection or a lock."""
    try:
        yield
    except DatabaseUnavailable:
        raise
    except Exception as error:
        if database.is_transient(error) or database.is_unreachable(error):
            raise DatabaseUnavailable(database.name, "its database", str(error) or type(error).__name__) from error
        raise
