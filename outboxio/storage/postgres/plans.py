"""Prepared statements that a change of a table has made invalid.

asyncpg prepares a statement once per connection. After ``ALTER TABLE`` the server refuses the prepared statement if the
columns changed: once per statement and connection. So the first refusal makes all connections of a shard drop all
prepared statements: each connection does so at the next checkout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import asyncpg

# The last error follows a DISCARD or DEALLOCATE that the application has sent.
_OUTDATED = (
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
    asyncpg.InvalidSQLStatementNameError,
)


def is_outdated(error: BaseException) -> bool:
    """True if a statement failed only because it was prepared before a table changed."""
    return isinstance(error, _OUTDATED)


class Plans:
    """The refused prepared statements of one shard."""

    def __init__(self) -> None:
        self.refusals = 0
        """How often a server refused an outdated prepared statement."""

    def heed(self, errors: Iterable[BaseException]) -> None:
        """Count the errors that an outdated prepared statement has caused."""
        self.refusals += any(map(is_outdated, errors))

    async def renew(self, connection: Any) -> None:
        """Drop the prepared statements of a connection that has not taken all refusals into account."""
        connection.refusals = self.refusals
        await connection.reload_schema_state()
