"""Facts about a MySQL or MariaDB server: the identity, the state of the sessions, read only or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outboxio.storage.connections.identity import Identity
from outboxio.storage.connections.watch import ServerSession, Sessions
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import fetch, fetch_each
from outboxio.storage.mysql.driver import is_closed

WHO = "SELECT CONNECTION_ID(), @@hostname, @@port, @@server_id, @@datadir"
SESSIONS = "SHOW PROCESSLIST"  # the sessions of our own user
# A statement for each variable: on a session of the application, sql_select_limit leaves out rows of SHOW VARIABLES.
WHICH = "; ".join(
    f"SHOW GLOBAL VARIABLES WHERE Variable_name = '{name}'"
    for name in (
        "hostname", "port", "datadir", "server_uuid", "group_replication_group_name", "wsrep_on", "wsrep_cluster_name",
    )
)  # fmt: skip
SWITCHES = """
SHOW GLOBAL VARIABLES WHERE Value NOT IN ('OFF', '0') AND Variable_name IN
  ('read_only', 'super_read_only', 'innodb_read_only', 'transaction_read_only', 'tx_read_only')
"""


async def session_of(connection: Any) -> ServerSession | None:
    """The session of a connection; ``None`` behind a proxy that shares sessions, where the session may change."""
    ((number, *server),) = await fetch(connection, WHO)
    return ServerSession(tuple(server), number) if number == connection.thread_id() else None


async def sessions_of(connection: Any, numbers: Iterable[int]) -> Sessions | None:
    """The state of sessions; ``None`` behind a proxy that shares sessions, where the numbers mean no connection."""
    own = await session_of(connection)
    # Columns: number, user, host, database, command, seconds since the command began.
    rows = await fetch(connection, SESSIONS)
    told = {row[0]: float(row[5] or 0) if row[4] == "Sleep" else None for row in rows}
    if own is None or own.number not in told:
        return None
    return Sessions(own.server, {number: told[number] for number in numbers if number in told})


async def identity_of(connection: Any) -> Identity:
    """The identity of the server, which has a single eventlog, or of the cluster, whose servers share an eventlog."""
    found = {name: value for rows in await fetch_each(connection, WHICH) for name, value in rows}
    cluster = found.get("group_replication_group_name")
    if not cluster and found.get("wsrep_on") == "ON":
        cluster = found.get("wsrep_cluster_name")
    place = f"the server {found['hostname']}:{found['port']}"
    if cluster:
        return Identity(cluster, f"the cluster {cluster!r}, {place}")
    return Identity(found.get("server_uuid") or tuple(sorted(found.items())), place)


async def does_not_write(connection: Any, error: Exception) -> bool:
    """True if the server refused a statement because the server is read only.

    The same numbers stand for unrelated options of the server, and for a READ ONLY transaction of the application.
    """
    if not errors.is_read_only(error) or is_closed(connection):
        return False
    return errors.number(error) not in errors.AMBIGUOUS or bool(await fetch(connection, SWITCHES))
