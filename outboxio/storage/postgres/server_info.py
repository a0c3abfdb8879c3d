"""Facts about a PostgreSQL server: its identity, the state of sessions, and whether it accepts writes.

All names in these statements are schema-qualified, because some run with the search_path of your application.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.errors import ConfigurationError
from outboxio.storage.connections.identity import Identity, Kin
from outboxio.storage.connections.watch import ServerSession, Sessions
from outboxio.storage.postgres.columns import encoding_called
from outboxio.storage.postgres.errors import is_unreachable, named
from outboxio.support.text import TextEncoding

READ_ONLY_REASON = (
    "in_hot_standby or default_transaction_read_only is on; for several hosts, use target_session_attrs=read-write"
)

# The start time in microseconds identifies a server. Unlike a text, a number does not depend on session settings.
_STARTED = """
(pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()) OPERATOR(pg_catalog.*) 1000000)::bigint
""".strip()

SESSION = f"SELECT pg_catalog.pg_backend_pid(), {_STARTED}"

# A single statement, because a load balancer may send the next one to a different server. A session that has prepared a
# statement and waits for the client to execute it is "active" in pg_stat_activity, so the wait event is checked too.
SESSIONS = f"""
SELECT pg_catalog.pg_backend_pid(), {_STARTED}, a.pid, CASE
  WHEN a.wait_event OPERATOR(pg_catalog.=) 'ClientRead'
    OR a.state OPERATOR(pg_catalog.=) ANY (
      '{{idle,idle in transaction,idle in transaction (aborted)}}'::pg_catalog.text[])
  THEN pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) a.state_change) END
FROM pg_catalog.pg_stat_activity a
WHERE a.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()
  OR a.pid OPERATOR(pg_catalog.=) ANY ($1::pg_catalog.text[]::int[])
"""

# Every user may read these values.
IDENTITY = f"""
SELECT {_STARTED}, d.oid::bigint, d.datname::pg_catalog.text, pg_catalog.host(pg_catalog.inet_server_addr()),
  pg_catalog.inet_server_port(), pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE')
FROM pg_catalog.pg_database d WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
"""
# Equal on a primary and its standbys.
SYSTEM = "SELECT s.system_identifier FROM pg_catalog.pg_control_system() s"


LOCK_CAPACITY = """
SELECT current_setting('max_locks_per_transaction')::int
  * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)
"""


async def session_of(connection: Any, timeout: float) -> ServerSession | None:
    """Return the server session of a connection; ``None`` behind a proxy that shares sessions."""
    number, server = await connection.fetchrow(SESSION, timeout=timeout)
    return ServerSession(server, number) if number == connection.get_server_pid() else None


async def sessions_of(connection: Any, numbers: Iterable[int]) -> Sessions | None:
    """Return the state of server sessions; ``None`` behind a proxy that shares sessions, where ids are meaningless."""
    rows = await connection.fetch(SESSIONS, [str(number) for number in numbers])
    own, server = rows[0][0], rows[0][1]
    return Sessions(server, {row[2]: row[3] for row in rows}) if own == connection.get_server_pid() else None


async def identity_of(connection: Any) -> Identity:
    """Return the identity of the database and the server behind a connection."""
    started, oid, name, host, port, may_read = await connection.fetchrow(IDENTITY)
    address = "a local socket" if host is None else f"{host}:{port}"

    async def kin() -> Kin:
        # Without the privilege, the query would fail and abort the caller's transaction.
        return await connection.fetchval(SYSTEM) if may_read else None, (oid, name)

    return Identity((started, oid), f"the database {name!r} at {address}", kin)


def encoding_of(connection: Any) -> TextEncoding:
    """Return the encoding of the database, as reported by the server."""
    return encoding_called(_reported(connection, "server_encoding"))


def user_of(connection: Any) -> str | None:
    """Return the session user, as reported by the server. The server reports each change."""
    return _reported(connection, "session_authorization")


def is_standby(connection: Any) -> bool:
    """True if the server has reported that it is a standby."""
    return _reported(connection, "in_hot_standby") == "on"


def is_read_only_server(connection: Any) -> bool:
    """True if the server has reported that it is a standby, or that transactions are read-only by default."""
    return is_standby(connection) or _reported(connection, "default_transaction_read_only") == "on"


def accepts_writes(connection: Any) -> bool:
    """True if the server has reported that it is a primary that accepts writes. A proxy may report nothing."""
    reported = (_reported(connection, "in_hot_standby"), _reported(connection, "default_transaction_read_only"))
    return reported == ("off", "off")


def _reported(connection: Any, parameter: str) -> str | None:
    closed: tuple[type[Exception], ...] = (AttributeError, *named("Interface", "OperationalError"))
    try:
        settings = connection.get_settings()
    except closed:  # the driver has discarded the settings
        return None
    value: str | None = getattr(settings, parameter, None)
    return value


# --- codecs ----------------------------------------------------------------------------------------
#
# Your application may set codecs on its connections (``set_type_codec`` of asyncpg).
#
# JSON codecs have no effect, because all statements of outboxio send and read JSON as text. The other types are sent as
# Python values, so their codecs must not change these values.

_ROUND_TRIPS: dict[str, tuple[str, Any]] = {
    "bool": ("SELECT $1::pg_catalog.bool", True),
    "int2": ("SELECT $1::pg_catalog.int2", 1),
    "int4": ("SELECT $1::pg_catalog.int4", 1),
    "int8": ("SELECT $1::pg_catalog.int8", 1),
    "float8": ("SELECT $1::pg_catalog.float8", 0.5),
    "text": ("SELECT $1::pg_catalog.text", "text"),
    "varchar": ("SELECT $1::pg_catalog.varchar", "text"),
    "uuid": ("SELECT $1::pg_catalog.uuid", UUID(int=1)),
    "timestamp": ("SELECT $1::pg_catalog.timestamp", datetime(2000, 1, 2, 3, 4, 5, 6)),
}
"""For each type that outboxio sends and reads: a statement that returns its argument, and an argument."""


async def refuse_codecs(connection: Any, shard: str) -> None:
    """Raise :class:`ConfigurationError` if a codec changes the values of a type."""
    names = [name for name, (query, value) in _ROUND_TRIPS.items() if not await _is_kept(connection, query, value)]
    if names:
        raise ConfigurationError(
            f"the connections of shard {shard!r} have codecs for {', '.join(names)} (set_type_codec), which prevent "
            "outboxio from reading and writing its rows: remove them from the pool's init, or pass a URL instead of "
            "the pool. Codecs for json and jsonb are allowed"
        )


async def _is_kept(connection: Any, query: str, value: Any) -> bool:
    try:
        got = await connection.fetchval(query, value)
    except Exception as error:  # a user-supplied codec may raise any error
        if is_unreachable(error):
            raise
        return False
    return isinstance(got, type(value)) and bool(got == value)
