"""Session variables of the server, database, user, pool or engine change nothing in internal sessions.

``LOOP_SETTINGS`` of a dialect is the only list of variables that statements depend on. Each has a hostile value here,
which an internal session resets. Then a service runs with all hostile values at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from outboxio import Batch, ConfigurationError, EventEnvelope, Outbox, Received
from outboxio.storage.mysql.connection import LOOP_SETTINGS as MYSQL_SETTINGS
from outboxio.storage.mysql.connection import fetch as fetch_rows
from outboxio.storage.mysql.flavour import FLAVOURS
from outboxio.storage.postgres.connection import _SINCE_17
from outboxio.storage.postgres.connection import LOOP_SETTINGS as POSTGRES_SETTINGS
from tests.contract.test_mysql_storage import check_flow, server_settings
from tests.kit import mysql
from tests.kit.app import Emit, Look, MoneyDeposited, WalletOpened, opened
from tests.kit.inside import database_of
from tests.kit.opened_by import engine_url

pytestmark = [pytest.mark.with_tables, pytest.mark.every_version]

POSTGRES = {
    "search_path": "public", "client_encoding": "latin1", "standard_conforming_strings": "off",
    "datestyle": "SQL, DMY", "intervalstyle": "sql_standard", "timezone": "Asia/Tokyo", "extra_float_digits": "-15",
    "default_transaction_isolation": "serializable", "default_transaction_deferrable": "on",
    "statement_timeout": "1s", "transaction_timeout": "1s", "enable_seqscan": "on", "enable_bitmapscan": "on",
    "enable_sort": "on", "enable_indexscan": "off", "enable_indexonlyscan": "off", "enable_nestloop": "off",
    "from_collapse_limit": "1", "join_collapse_limit": "1", "jit": "on", "plan_cache_mode": "force_custom_plan",
    "array_nulls": "off",
}  # fmt: skip
#: Variables that an application may set, and that no statement depends on.
OTHERS = {"bytea_output": "escape", "row_security": "off", "xmloption": "document",
          "transform_null_equals": "on", "lock_timeout": "1s", "enable_hashjoin": "off"}  # fmt: skip

OF_FAMILY = {
    "autocommit": 0, "completion_type": "CHAIN", "sql_safe_updates": 1, "sql_big_selects": 0, "sql_select_limit": 1,
    "sql_mode": "ANSI,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE", "sql_auto_is_null": 1,
    "innodb_lock_wait_timeout": 1, "group_concat_max_len": 4, "max_sort_length": 64, "div_precision_increment": 0,
    "unique_checks": 0, "foreign_key_checks": 0, "time_zone": "+05:00", "character_set_client": "latin1",
    "character_set_connection": "latin1", "character_set_results": "latin1", "sql_notes": 1,
    "collation_connection": "latin1_german1_ci",
}  # fmt: skip
HOSTILE: dict[str, dict[str, str | int]] = {
    "postgres": {**POSTGRES},
    "mysql": {**OF_FAMILY, "transaction_isolation": "SERIALIZABLE", "transaction_read_only": 1,
              "max_execution_time": 1},
    "mariadb": {**OF_FAMILY, "tx_isolation": "SERIALIZABLE", "tx_read_only": 1, "max_statement_time": 1,
                "check_constraint_checks": 1},
}  # fmt: skip
#: With these an application itself has no working session: the session is read-only, loses characters, or starts
#: transactions implicitly.
ONLY_FOR_LOOPS = ("transaction_read_only", "tx_read_only", "character_set_client", "character_set_connection",
                  "character_set_results", "collation_connection", "completion_type", "max_execution_time")  # fmt: skip


def settings_of(dialect: str) -> set[str]:
    if dialect == "postgres":
        return {name.lower() for name in (*POSTGRES_SETTINGS, *_SINCE_17)}
    flavour = FLAVOURS[dialect]
    own = (flavour.isolation, flavour.read_only, "collation_connection")
    return {*MYSQL_SETTINGS, *flavour.loop_settings, *own}


@pytest.mark.parametrize("dialect", HOSTILE)
def test_every_variable_has_a_hostile_value(dialect: str) -> None:
    assert HOSTILE[dialect].keys() == settings_of(dialect)


VARIABLES = sorted({(dialect == "postgres", name) for dialect in HOSTILE for name in HOSTILE[dialect]})


# --- one variable -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for is_postgres, name in VARIABLES if not is_postgres])
async def test_a_mysql_loop_sets_the_variable(mysql_url: str, name: str) -> None:
    look = Look(mysql_url)
    if name not in HOSTILE[look.dialect]:
        return  # a variable of the other product
    command = f"SET SESSION {name} = {HOSTILE[look.dialect][name]!r}"

    async def value(connection: Any) -> Any:
        return (await fetch_rows(connection, f"SELECT @@SESSION.{name}"))[0][0]

    autocommit = name != "autocommit"
    async with mysql.pool(mysql_url, minsize=0, maxsize=8, init_command=command, autocommit=autocommit) as pool:
        async with pool.acquire() as connection:
            theirs = await value(connection)
        async with Outbox(pool, namespace="app") as outbox:
            [ours] = {await loop.use(value) for loop in loops_of(outbox)}
            expected = MYSQL_SETTINGS.get(name, FLAVOURS[look.dialect].loop_settings.get(name, 0))
            assert ours != theirs
            if name not in (FLAVOURS[look.dialect].isolation, "collation_connection", "completion_type", "sql_mode"):
                assert ours == expected
        async with pool.acquire() as connection:
            assert await value(connection) == theirs


@pytest.mark.parametrize("name", POSTGRES)
async def test_a_postgres_loop_sets_the_variable(postgres_url: str, name: str) -> None:
    async def value(connection: Any) -> str | None:
        found: str | None = await connection.fetchval(
            "SELECT setting FROM pg_catalog.pg_settings WHERE pg_catalog.lower(name) = $1", name
        )
        return found

    if name == "transaction_timeout" and await Look(postgres_url).value("SHOW server_version_num") < "17":
        return  # a setting of later versions
    hostile = {name: POSTGRES[name]}
    async with asyncpg.create_pool(postgres_url, min_size=0, max_size=8, server_settings=hostile) as pool:
        theirs = await pool.fetchval("SELECT setting FROM pg_settings WHERE lower(name) = $1", name)
        async with Outbox(pool, namespace="app") as outbox:
            [ours] = {await loop.use(value) for loop in loops_of(outbox)}
            assert ours != theirs
        assert await pool.fetchval("SELECT setting FROM pg_settings WHERE lower(name) = $1", name) == theirs


def loops_of(outbox: Outbox) -> list[Any]:
    return list(database_of(outbox)._connections.loops)


# --- all variables at once ----------------------------------------------------------------------------


@asynccontextmanager
async def of_the_server(url: str) -> AsyncIterator[Any]:
    """The defaults of new sessions are hostile."""
    look = Look(url)
    if look.driver == "asyncpg":
        name = urlsplit(url).path[1:]
        for variable, value in settings_for_all(look).items():
            await look.fetch(f"ALTER DATABASE {name} SET {variable} = '{value}'")
        try:
            yield url
        finally:
            await look.fetch(f"ALTER DATABASE {name} RESET ALL")
    else:
        async with server_settings(look, **settings_for_all(look)):
            yield url


@asynccontextmanager
async def of_a_pool(url: str) -> AsyncIterator[Any]:
    look = Look(url)
    if look.driver == "asyncpg":
        async with asyncpg.create_pool(url, min_size=0, max_size=16, server_settings=settings_for_all(look)) as pool:
            yield pool
    else:
        async with mysql.pool(url, minsize=0, maxsize=16, init_command=hostile_command(look), autocommit=True) as pool:
            yield pool


@asynccontextmanager
async def of_an_engine(url: str) -> AsyncIterator[Any]:
    look = Look(url)
    options: dict[str, Any] = {"init_command": hostile_command(look)}
    if look.driver == "asyncpg":
        options = {"server_settings": settings_for_all(look)}
    engine = create_async_engine(engine_url(url), connect_args=options, pool_size=16)
    try:
        yield engine
    finally:
        await engine.dispose()


def settings_for_all(look: Look) -> dict[str, Any]:
    if look.driver == "asyncpg":
        # The application's own values are texts that LATIN1 does not have.
        return {name: value for name, value in {**POSTGRES, **OTHERS}.items() if name not in NOT_FOR_APPLICATIONS}
    return {name: value for name, value in HOSTILE[look.dialect].items() if name not in ONLY_FOR_LOOPS}


NOT_FOR_APPLICATIONS = ("client_encoding", "transaction_timeout", "search_path", "standard_conforming_strings")


def hostile_command(look: Look) -> str:
    settings = {**settings_for_all(look), "max_join_size": 1}
    return "SET SESSION " + ", ".join(f"{name} = {value!r}" for name, value in settings.items())


ORIGINS: list[Callable[[str], AbstractAsyncContextManager[Any]]] = [of_the_server, of_a_pool, of_an_engine]


@pytest.mark.with_tables(False)
@pytest.mark.parametrize("hostile", ORIGINS, ids=lambda origin: origin.__name__.removeprefix("of_"))
async def test_a_service_runs_with_hostile_session_variables(
    server_url: str, hostile: Callable[[str], AbstractAsyncContextManager[Any]]
) -> None:
    batches: list[int] = []
    async with hostile(server_url) as source, Outbox(source, namespace="app") as outbox:
        await outbox.migrate()
        await outbox.check()

        @outbox.handler(MoneyDeposited, name="batch", delivery="transactional", batch=Batch(size=10))
        async def handle(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
            batches.append(len(envelopes))

        await outbox.executor.execute(Emit(tuple(range(1, 8))))
        assert (await outbox.drain()).succeeded == 7
        assert sum(batches) == 7, "the events of a batch were not all claimed"
        await outbox.admin.unsubscribe("batch")
        await outbox.admin.purge()
        assert (await outbox.admin.overview()).handlers is not None


@pytest.mark.parametrize("hostile", ORIGINS, ids=lambda origin: origin.__name__.removeprefix("of_"))
async def test_unusual_texts_survive_sessions_with_hostile_variables(
    mysql_url: str, hostile: Callable[[str], AbstractAsyncContextManager[Any]]
) -> None:
    async with hostile(mysql_url) as source, Outbox(source, namespace="app") as outbox:
        await check_flow(outbox, Look(mysql_url))


# --- statements on sessions of the application --------------------------------------------------------


async def test_many_messages_are_received_on_a_session_with_a_row_limit(mysql_url: str) -> None:
    limited = {"init_command": "SET SESSION sql_select_limit = 1, sql_safe_updates = 1", "autocommit": True}
    async with (
        mysql.pool(mysql_url, minsize=0, maxsize=8, **limited) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
    ):
        messages = [
            {"source": "bus", "external_id": f"m{number}", "type": "Noted", "payload": {"text": "x"}}
            for number in range(5)
        ]
        for status in (Received.RECEIVED, Received.DUPLICATE):
            results = await outbox.inbox.receive_many(messages)
            assert results == [status] * 5


async def test_record_identifies_its_server_despite_a_row_limit(mysql_url: str) -> None:
    look = Look(mysql_url)
    async with opened(Outbox(mysql_url, namespace="app")) as outbox, mysql.connected(mysql_url) as connection:
        await mysql.fetch(connection, "SET SESSION sql_select_limit = 1")
        await connection.begin()
        await outbox.record(connection, WalletOpened(uuid4()), action="OpenWallet")
        await connection.commit()
    assert await look.value("SELECT count(*) FROM {events}") == 1


async def test_an_engine_with_a_lossy_character_set_is_refused(mysql_url: str) -> None:
    engine = create_async_engine(engine_url(mysql_url), connect_args={"charset": "latin1"})
    async with Outbox(engine, namespace="app") as outbox:
        with pytest.raises(ConfigurationError, match=r"character set latin1, .*charset='utf8mb4'"):
            await outbox.executor.execute(Emit((1,)))
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of the queue pool
    await engine.dispose()
    assert await Look(mysql_url).value("SELECT count(*) FROM {events}") == 0
