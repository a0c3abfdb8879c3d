"""PostgreSQL queries of the tests themselves, and databases with outboxio's tables that tests reuse.

A connection costs client and server 10 ms of computing time, and a database with tables 60 ms: together as much as the
usual test. So each test database has a connection that stays open, and a database whose tables are still as they were
is emptied and given to the next test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg

from tests.kit.background_loop import migrate, run_in_background

T = TypeVar("T")

APPLICATION = "outboxio tests"
"""The application name of the kept connections, which are excluded when sessions are counted."""

ERRORS = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)

Work = Callable[["asyncpg.Connection[Any]"], Awaitable[T]]


async def use(url: str, work: Work[T]) -> T:
    """Use the kept connection of a database, or a new one if there is none if it is in use. Runs in the background."""
    session = _sessions.get(url)
    if session is None or session.is_used:
        connection = await _connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()
    return await session.use(work)


async def execute(url: str, statement: str) -> None:
    await use(url, lambda connection: connection.execute(statement))


async def fetch(url: str, statement: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    return [dict(row) for row in await use(url, lambda connection: connection.fetch(statement, *args))]


async def version(url: str) -> int:
    connection = await _connect(url)
    try:
        return connection.get_server_version().major
    finally:
        await connection.close()


async def _connect(url: str) -> asyncpg.Connection[Any]:
    # Tests change tables while connections are kept, which would make cached plans invalid.
    return await asyncpg.connect(
        url, timeout=5, statement_cache_size=0, server_settings={"application_name": APPLICATION}
    )


class _Session:
    """A connection that is opened on first use, and reopened if the server closed it."""

    def __init__(self, url: str) -> None:
        self.is_used = False
        self._url = url
        self._connection: asyncpg.Connection[Any] | None = None

    async def use(self, work: Work[T]) -> T:
        self.is_used = True
        try:
            if self._connection is not None:
                try:
                    return await work(self._connection)
                except ERRORS:
                    if not self._connection.is_closed():
                        raise
            self._connection = await _connect(self._url)
            return await work(self._connection)
        finally:
            self.is_used = False

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close(timeout=5)


_sessions: dict[str, _Session] = {}


async def keep(url: str) -> None:
    """Keep a connection to a database from now on."""
    _sessions.setdefault(url, _Session(url))


async def close(url: str) -> None:
    """Close the kept connection of a database."""
    if session := _sessions.pop(url, None):
        await session.close()


# --- databases -----------------------------------------------------------------------------------


class Databases:
    """The test databases of a server."""

    def __init__(self, url: str, server_version: int, name: Callable[[], str]) -> None:
        self._url = url
        self._name = name
        # Copying files costs a tenth of writing them into the WAL page by page, which is the default since 15.
        self._how = "STRATEGY FILE_COPY" if server_version >= 15 else ""
        self._templates: dict[str, _Template] = {}

    @contextmanager
    def empty(self) -> Iterator[str]:
        """The URL of a new database without tables."""
        name = self._name()
        run_in_background(self._create(name))
        yield self._url_of(name)
        run_in_background(self._drop(name))

    @contextmanager
    def migrated(self, tables: str) -> Iterator[str]:
        """The URL of a database with outboxio's tables and further ``tables``, all without rows."""
        if tables not in self._templates:
            self._templates[tables] = run_in_background(self._template(tables))
        template = self._templates[tables]
        name, uses = template.free.pop() if template.free else (self._name(), 0)
        if not uses:
            run_in_background(self._create(name, template.name))
        yield self._url_of(name)
        if run_in_background(self._restore(name, template)) and uses < USES:
            template.free.append((name, uses + 1))
        else:
            run_in_background(self._drop(name))

    def close(self) -> None:
        with suppress(*ERRORS):  # the server may have ended
            for template in self._templates.values():
                for name in (template.name, *(name for name, _ in template.free)):
                    run_in_background(self._drop(name))
        run_in_background(close(self._url))
        self._templates.clear()

    def _url_of(self, name: str) -> str:
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    async def _create(self, name: str, template: str = "template1") -> None:
        await keep(self._url)
        await execute(self._url, f"CREATE DATABASE {name} TEMPLATE {template} {self._how}")
        await keep(self._url_of(name))

    async def _drop(self, name: str) -> None:
        await close(self._url_of(name))
        await execute(self._url, f"DROP DATABASE {name} WITH (FORCE)")

    async def _template(self, tables: str) -> _Template:
        name = self._name()
        await self._create(name)
        await migrate(self._url_of(name))
        if tables:
            await execute(self._url_of(name), tables)
        template = await use(self._url_of(name), partial(_Template.read, name))
        await close(self._url_of(name))
        return template

    async def _restore(self, name: str, template: _Template) -> bool:
        """Empty the tables. False if the test has left more than rows and further tables."""
        try:
            return await use(self._url_of(name), template.restore)
        except ERRORS:
            return False


USES = 100
"""How often a database is used: each use leaves dead rows in the catalog."""

_END_SESSIONS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
_PUBLIC = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
_USED = """
SELECT oid::regclass::text FROM pg_class
WHERE relnamespace IN ('eventlog'::regnamespace, 'public'::regnamespace)
  AND relkind = 'r' AND relname <> 'schema_versions' AND (pg_relation_size(oid) > 0
    OR relname = 'events' AND (SELECT is_called FROM eventlog.events_sequence_seq))
"""

#: All that a test may have changed in a database: objects, their definitions, rights, settings and statistics.
_DEFINITIONS = """
SELECT md5(string_agg(line, ' ' ORDER BY line)) FROM (
  SELECT concat_ws(' ', oid, relname, relnamespace, relkind, relpersistence, relowner, relrowsecurity, relispartition,
    relhastriggers, relhasrules, relacl, reloptions) FROM pg_class WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', attrelid, attnum, attname, atttypid, atttypmod, attcollation, attnotnull, attidentity,
    attstattarget, attacl, attoptions) FROM pg_attribute WHERE attrelid >= 16384
  UNION ALL SELECT concat_ws(' ', adrelid, adnum, pg_get_expr(adbin, adrelid)) FROM pg_attrdef
  UNION ALL SELECT concat_ws(' ', indexrelid, indrelid, indisvalid, indisready, indisclustered, indisreplident)
    FROM pg_index WHERE indexrelid >= 16384
  UNION ALL SELECT concat_ws(' ', 'k', oid, conname, convalidated) FROM pg_constraint WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', 't', oid, tgname, tgenabled) FROM pg_trigger
  UNION ALL SELECT concat_ws(' ', 'n', oid, nspname, nspowner, nspacl) FROM pg_namespace
    WHERE nspname NOT LIKE 'pg\\_t%'
  UNION ALL SELECT concat_ws(' ', 'p', oid, proname) FROM pg_proc WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', 'y', oid, typname) FROM pg_type WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', 'o', oid, oprname) FROM pg_operator WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', 'c', oid) FROM pg_cast WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', 'r', oid) FROM pg_rewrite WHERE oid >= 16384
  UNION ALL SELECT concat_ws(' ', 'e', oid) FROM pg_event_trigger
  UNION ALL SELECT concat_ws(' ', 'x', oid) FROM pg_extension
  UNION ALL SELECT concat_ws(' ', 'b', oid) FROM pg_publication
  UNION ALL SELECT concat_ws(' ', 'l', oid) FROM pg_policy
  UNION ALL SELECT concat_ws(' ', 'd', oid, defaclacl) FROM pg_default_acl
  UNION ALL SELECT concat_ws(' ', 's', starelid, staattnum) FROM pg_statistic WHERE starelid >= 16384
  UNION ALL SELECT concat_ws(' ', 'g', setrole, setconfig) FROM pg_db_role_setting
    WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
  UNION ALL SELECT concat_ws(' ', 'a', datdba, datacl, datconnlimit) FROM pg_database
    WHERE datname = current_database()
  UNION ALL SELECT concat_ws(' ', 'v', version, file) FROM eventlog.schema_versions
) AS definitions(line)
"""


class _Template:
    """A database to copy, and the databases that were used and are like the template again."""

    def __init__(self, name: str, definitions: str, public: Collection[str]) -> None:
        self.name = name
        self.free: list[tuple[str, int]] = []
        self._definitions = definitions
        self._public = public

    @classmethod
    async def read(cls, name: str, connection: asyncpg.Connection[Any]) -> _Template:
        return cls(name, await connection.fetchval(_DEFINITIONS), await _column(connection, _PUBLIC))

    async def restore(self, connection: asyncpg.Connection[Any]) -> bool:
        await connection.execute(_END_SESSIONS)
        await connection.execute("DISCARD ALL")
        if leftover := [name for name in await _column(connection, _PUBLIC) if name not in self._public]:
            await connection.execute(f"DROP TABLE {', '.join(leftover)} CASCADE")
        if await connection.fetchval(_DEFINITIONS) != self._definitions:
            return False
        if used := await _column(connection, _USED):
            await connection.execute(f"TRUNCATE {', '.join(used)} RESTART IDENTITY")
        return True


async def _column(connection: asyncpg.Connection[Any], question: str) -> list[str]:
    return [value for (value,) in await connection.fetch(question)]
