"""Resetting the session of a connection between two actions (decision 9).

An action can leave variables, temporary tables, named locks, a role or a selected database behind. The pool of aiomysql
resets none of these. A reset of the connection by the server is a further round trip, so that outboxio asks for a reset
only after statements that may change the session. Plain reads and writes of rows do not.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from outboxio.storage.mysql import driver
from outboxio.storage.mysql.connection import drop, fetch, is_usable
from outboxio.storage.mysql.flavour import Server, Statement
from outboxio.support.log import log_of

logger = log_of(__name__)

RESTORING_TIMEOUT = 10.0  # seconds before the connection is dropped instead

# An expression may set a variable with := or INTO; the name begins with an @. Changes by stored functions and triggers
# are not recognized. Named locks are, because a statement of the action calls GET_LOCK.
_LEAVES_NOTHING = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|SHOW|EXPLAIN|SAVEPOINT|RELEASE|ROLLBACK)\b[^;@]*\Z",
    re.IGNORECASE,
)
_NAMED_LOCK = "GET_LOCK"

# A reset keeps the role and the selected database, and sets the character set and autocommit to the server's defaults.
HOW_TO_RESTORE: Statement = {
    "mysql": """
SELECT CONCAT('USE `', REPLACE(DATABASE(), '`', '``'), '`; SET NAMES ', @@character_set_client, ' COLLATE ',
  @@collation_connection, '; SET autocommit = ', @@autocommit, '; SET ROLE ', CURRENT_ROLE())
""",
    "mariadb": """
SELECT CONCAT('USE `', REPLACE(DATABASE(), '`', '``'), '`; SET NAMES ', @@character_set_client, ' COLLATE ',
  @@collation_connection, '; SET autocommit = ', @@autocommit, '; SET ROLE ',
  IF(CURRENT_ROLE() IS NULL, 'NONE', QUOTE(CURRENT_ROLE())))
""",
}


def may_leave_something(sql: str) -> bool:
    """True if a statement may change the session of the connection."""
    return _LEAVES_NOTHING.match(sql) is None or _NAMED_LOCK in sql.upper()


async def learn_to_restore(connection: Any, server: Server) -> None:
    """Remember the statements that restore a new connection.

    ``None`` if no database is selected: no statement returns to that state.
    """
    (row,) = await fetch(connection, server.spell(HOW_TO_RESTORE))
    connection.how_to_restore = row[0]


async def restore(connection: Any) -> None:
    """Restore the session to the state after the opening, or drop the connection."""
    if not is_usable(connection):
        return
    if connection.how_to_restore is None:
        drop(connection)
        return
    try:
        async with asyncio.timeout(RESTORING_TIMEOUT):
            await driver.reset(connection, connection.how_to_restore.encode())
    except Exception as error:
        # The action has ended already, so that the error does not matter to the action.
        logger.warning("a connection could not be reset, the pool opens another in its place: %r", error)
        drop(connection)
