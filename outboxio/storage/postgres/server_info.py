"""Questions to a PostgreSQL server: the identity, the state of sessions, and if the server writes.

Every name in these statements has a schema, because some statements run with the application's search_path.
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

ONLY_READS = (
    "in_hot_standby or default_transaction_read_only is on; several hosts go with target_session_attrs=read-write"
)

# The start time in microseconds identifies a server. A text would depend on settings of the session, a number does not.
_STARTED = """
(pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()) OPERATOR(pg_catalog.*) 1000000)::bigint
""".strip()

WHO = f"SELECT pg_catalog.pg_backend_pid(), {_STARTED}"

# A single statement, because a balancer may send the next statement to a different server. A session that has prepared
# a statement and waits for the client to execute it is "active" in pg_stat_activity, so the wait event counts too.
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

# Every user may read the values.
WHICH = f"""
SELECT {_STARTED}, d.oid::bigint, d.datname::pg_catalog.text, pg_catalog.host(pg_catalog.inet_server_addr()),
  pg_catalog.inet_server_port(), pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE')
FROM pg_catalog.pg_database d WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
"""
# Equal on a primary and on all standbys of the primary.
SYSTEM = "SELECT s.system_identifier FROM pg_catalog.pg_control_system() s"


LOCK_ROOM = """
SELECT current_setting('max_locks_per_transaction')::int
  * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)
"""


async def session_of(connection: Any, timeout: float) -> ServerSession | None:
    """The server session of a connection; ``None`` if a proxy shares sessions, because sessions change."""
    number, server = await connection.fetchrow(WHO, timeout=timeout)
    return ServerSession(server, number) if number == connection.get_server_pid() else None


async def sessions_of(connection: Any, numbers: Iterable[int]) -> Sessions | None:
    """The state of server sessions; ``None`` if a proxy shares sessions, because then the numbers are useless."""
    rows = await connection.fetch(SESSIONS, [str(number) for number in numbers])
    own, server = rows[0][0], rows[0][1]
    return Sessions(server, {row[2]: row[3] for row in rows}) if own == connection.get_server_pid() else None


async def identity_of(connection: Any) -> Identity:
    """The identity of the database and of the server behind a connection."""
    started, oid, name, host, port, may_ask = await connection.fetchrow(WHICH)
    place = "a local socket" if host is None else f"{host}:{port}"

    async def kin() -> Kin:
        # Without the right the question would fail, and the application's transaction with the question.
        return await connection.fetchval(SYSTEM) if may_ask else None, (oid, name)

    return Identity((started, oid), f"the database {name!r} at {place}", kin)


def encoding_of(connection: Any) -> TextEncoding:
    """The encoding of the database, as the server has reported it."""
    return encoding_called(_told(connection, "server_encoding"))


def user_of(connection: Any) -> str | None:
    """The session user, as the server has reported it. The server reports each change."""
    return _told(connection, "session_authorization")


def is_standby(connection: Any) -> bool:
    """True if the server has reported to be a standby."""
    return _told(connection, "in_hot_standby") == "on"


def only_reads(connection: Any) -> bool:
    """True if the server has reported to be a standby, or that transactions are read-only by default."""
    return is_standby(connection) or _told(connection, "default_transaction_read_only") == "on"


def writes(connection: Any) -> bool:
    """True if the server has reported to be a primary that writes. A proxy may report neither."""
    told = (_told(connection, "in_hot_standby"), _told(connection, "default_transaction_read_only"))
    return told == ("off", "off")


def _told(connection: Any, parameter: str) -> str | None:
    closed: tuple[type[Exception], ...] = (AttributeError, *named("Interface", "OperationalError"))
    try:
        told = connection.get_settings()
    except closed:  # the driver has dropped the settings
        return None
    value: str | None = getattr(told, parameter, None)
    return value


# --- codecs ----------------------------------------------------------------------------------------
#
# Codecs that the application has set on its connections (``set_type_codec`` of asyncpg).
#
# Codecs for JSON are of no consequence: every statement of outboxio sends and reads JSON as text. The other types
# travel as values of Python, so that a codec for one of these types must not change the values.

_SENT: dict[str, tuple[str, Any]] = {
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
"""A statement that reads a value back, and the value, for each type that statements of outboxio send and read."""


async def refuse_codecs(connection: Any, shard: str) -> None:
    """Raise :class:`ConfigurationError` with the types whose values do not come back as sent."""
    names = [name for name, (statement, value) in _SENT.items() if not await _comes_back(connection, statement, value)]
    if names:
        raise ConfigurationError(
            f"the connections of shard {shard!r} have codecs for {', '.join(names)} (set_type_codec), with which "
            "outboxio cannot read and write its rows: remove these codecs from the init of the pool, or give the "
            "outbox a URL instead of the pool. Codecs for json and jsonb may stay"
        )


async def _comes_back(connection: Any, statement: str, value: Any) -> bool:
    try:
        got = await connection.fetchval(statement, value)
    except Exception as error:  # a codec of the application may raise any error
        if is_unreachable(error):
            raise
        return False
    return isinstance(got, type(value)) and bool(got == value)
