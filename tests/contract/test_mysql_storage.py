"""Features of MySQL and MariaDB only: server settings, sizes, flavours, pools, sockets, rights, migrations."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import aiomysql
import pytest
from pymysql.constants import CLIENT

from outboxio import (
    Action,
    ConcurrentUse,
    DatabaseUnavailable,
    Event,
    EventEnvelope,
    InvalidEvent,
    Outbox,
    RetryAfter,
    SchemaMissing,
    SchemaOccupied,
    Settings,
    Transaction,
    TransactionEnded,
)
from outboxio.storage.ddl import statements_in
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.connection import drop
from outboxio.storage.schema import sql_files
from outboxio.support.clock import utc_now
from tests.kit import mysql
from tests.kit.app import WALLETS, Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, opened
from tests.kit.opened_by import OF_MYSQL
from tests.kit.probes import add_wallet, balances, doing, written
from tests.kit.server_actions import actions_on
from tests.kit.spies import deposits

pytestmark = pytest.mark.with_tables

TRICKY = "back\\slash \\' \\\" 'single' \"double\" `tick` 100% %s \0 \N{GRINNING FACE} \r\n\x1a"


class Noted(Event):
    text: str


class Numbered(Event):
    numbers: list[int]


class Note(Action):
    """An action with unusual characters in its parameters."""

    text: str

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Noted(self.text), model_id="second", topic=TRICKY.replace("\0", ""))


@pytest.fixture
def look(mysql_url: str) -> Look:
    return Look(mysql_url)


@pytest.fixture
async def outbox(mysql_url: str, look: Look) -> AsyncIterator[Outbox]:
    async with opened(Outbox(mysql_url, namespace="app")) as outbox:
        await look.fetch(WALLETS)
        yield outbox


@asynccontextmanager
async def server_settings(look: Look, **settings: str | int) -> AsyncIterator[None]:
    """Settings of the whole server, for connections opened within the block."""
    before = {name: await look.value(f"SELECT @@GLOBAL.{name}") for name in settings}
    try:
        await set_globally(look, settings)
        yield
    finally:
        await set_globally(look, before)


async def set_globally(look: Look, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        await look.fetch(f"SET GLOBAL {name} = {value if isinstance(value, int) else repr(value)}")


async def check_flow(outbox: Outbox, look: Look) -> None:
    """The whole path of an event through an outbox, with unusual characters in texts."""
    first, second = Journal(), Journal()

    @outbox.handler(MoneyDeposited, name="first")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        if envelope.attempt == 1:
            raise RetryAfter("1ms")
        envelope.emit(WalletOpened(envelope.event.wallet_id), model_id="first")
        await envelope.execute(Note(TRICKY))
        await first(envelope)

    outbox.handler(WalletOpened, Noted, name="second")(second)
    outbox.handler(name="of topic", topic=TRICKY.replace("\0", ""))(second)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)), headers={"text": TRICKY}, correlation_id=TRICKY.replace("\0", ""))
        await first.calls(2)
        await second.calls(6)
        await eventually(lambda: all_settled(look, 8))
    assert {e.event.text for e in second.envelopes if isinstance(e.event, Noted)} == {TRICKY}
    assert first.envelopes[0].headers == {"text": TRICKY}
    [*records] = await outbox.admin.list(handler="first")
    assert [record.errors[0]["type"] for record in records] == ["RetryAfter"] * 2
    assert (await outbox.admin.retry([record.id for record in records])).done == 2
    assert (await outbox.admin.skip([record.id for record in records])).done == 2
    counts = await outbox.admin.counts()
    assert (counts["SUCCEEDED"], counts["SKIPPED"], counts["undelivered"]) == (6, 2, 0)


async def all_settled(look: Look, number: int) -> bool:
    return await look.states() == {"SUCCEEDED": number}


# --- settings of the server ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "ANSI_QUOTES", "NO_BACKSLASH_ESCAPES", "ANSI,NO_BACKSLASH_ESCAPES"])
async def test_the_servers_sql_mode_changes_nothing(mysql_url: str, look: Look, mode: str) -> None:
    async with server_settings(look, sql_mode=mode), opened(Outbox(mysql_url, namespace="app")) as outbox:
        await check_flow(outbox, look)


@pytest.mark.parametrize("isolation", ["SERIALIZABLE", "REPEATABLE-READ", "READ-UNCOMMITTED"])
async def test_the_servers_isolation_changes_nothing(mysql_url: str, look: Look, isolation: str) -> None:
    name = "tx_isolation" if look.dialect == "mariadb" else "transaction_isolation"
    async with server_settings(look, **{name: isolation}), opened(Outbox(mysql_url, namespace="app")) as outbox:
        await check_flow(outbox, look)


async def test_the_servers_time_zone_changes_nothing(mysql_url: str, look: Look) -> None:
    async with server_settings(look, time_zone="+05:00"), opened(Outbox(mysql_url, namespace="app")) as outbox:
        await check_flow(outbox, look)
        hours_apart = [
            abs(row[column] - utc_now()) > timedelta(hours=1)
            for row in await written(look)
            for column in ("event_date", "started_date", "completion_date")
        ]
        assert not any(hours_apart)
        for table, column in (("leases", "acquired_date"), ("schema_versions", "applied_date")):
            for row in await look.fetch(f"SELECT {column} AS moment FROM {{{table}}}"):
                assert abs(row["moment"] - utc_now()) < timedelta(hours=1), table


@pytest.mark.parametrize("autocommit", [0, 1])
async def test_the_servers_autocommit_changes_nothing(mysql_url: str, look: Look, autocommit: int) -> None:
    async with server_settings(look, autocommit=autocommit), opened(Outbox(mysql_url, namespace="app")) as outbox:
        await check_flow(outbox, look)


async def test_the_servers_character_set_changes_nothing(mysql_url: str, look: Look) -> None:
    settings = {"character_set_server": "latin1", "collation_server": "latin1_swedish_ci"}
    async with server_settings(look, **settings), opened(Outbox(mysql_url, namespace="app")) as outbox:
        await check_flow(outbox, look)


# --- sizes ---------------------------------------------------------------------------------------

PACKET = 2 * 2**20


@asynccontextmanager
async def small_packets(mysql_url: str, look: Look) -> AsyncIterator[Outbox]:
    """An outbox on a server that accepts and sends at most 2 MiB at once."""
    async with server_settings(look, max_allowed_packet=PACKET), opened(Outbox(mysql_url, namespace="app")) as outbox:
        yield outbox


async def test_a_batch_is_limited_to_the_servers_packet_size(mysql_url: str, look: Look) -> None:
    settings = Settings(fanout_batch_size=1_000_000)
    async with (
        server_settings(look, max_allowed_packet=2**18),
        opened(Outbox(mysql_url, namespace="app", settings=settings)) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="h")(Journal())
        await deposits(outbox, 4000)
        assert (await outbox.drain()).succeeded == 4000


async def check_that_it_is_handled(outbox: Outbox, event: Event, params: Any = None) -> None:
    """Check that the event is delivered, retried automatically, listed, and retried by hand."""
    journal = Journal(lambda envelope: RetryAfter("1ms") if len(journal) == 1 else None)
    outbox.handler(type(event), name="handles")(journal)
    async with outbox.transaction("Large", params) as tx:
        tx.emit(event)
    async with outbox.running():
        await journal.calls(2)
    assert [envelope.event for envelope in journal.envelopes] == [event] * 2
    assert [envelope.action_params for envelope in journal.envelopes] == [params or {}] * 2
    [record] = await outbox.admin.list()
    assert (record.state, record.action_params) == ("SUCCEEDED", params or {})
    assert (await outbox.admin.retry([record.id])).done == 1
    assert (await outbox.drain()).succeeded == 1
    assert len(journal) == 3


@pytest.mark.parametrize(
    ("event", "params"),
    [
        (Noted("x" * (PACKET - 2000)), None),
        (Noted("\N{GRINNING FACE}" * ((PACKET - 2000) // 4)), None),
        # MySQL stores five bytes for each number and writes a space after each comma: more bytes than were sent.
        (Numbered([1] * 400_000), None),
        (Numbered([1] * 400_000), {"numbers": [1] * 400_000}),
        (Noted("x" * 1_000_000), {"text": "x" * 1_000_000}),
    ],
    ids=["text", "four-bytes", "numbers", "numbers-twice", "text-twice"],
)
async def test_an_event_nearly_as_long_as_a_packet_is_handled(
    mysql_url: str, look: Look, event: Event, params: Any
) -> None:
    async with small_packets(mysql_url, look) as outbox:
        await check_that_it_is_handled(outbox, event, params)


@pytest.mark.parametrize("text", ["x" * PACKET, "'" * (PACKET // 2 + 1)], ids=["itself", "once-escaped"])
async def test_an_event_longer_than_a_packet_is_refused_with_the_limit(mysql_url: str, look: Look, text: str) -> None:
    async with small_packets(mysql_url, look) as outbox:
        await look.fetch(WALLETS)

        async def emit(tx: Transaction) -> None:
            await add_wallet(tx)
            tx.emit(Noted("small"))
            tx.emit(Noted(text))

        with pytest.raises(InvalidEvent, match=rf"event Noted.* has \d+ bytes .*max_allowed_packet is {PACKET}"):
            await outbox.executor.execute(doing(emit))
        assert await written(look) == []
        assert await balances(look) == []


async def test_an_event_whose_json_the_server_rewrites_is_refused_or_handled(mysql_url: str, look: Look) -> None:
    """MySQL rewrites JSON; MariaDB stores it unchanged."""
    event = Numbered([1] * 900_000)
    async with small_packets(mysql_url, look) as outbox:
        if look.dialect == "mariadb":
            await check_that_it_is_handled(outbox, event)
            return
        with pytest.raises(InvalidEvent, match=rf"max_allowed_packet of {PACKET} bytes"):
            async with outbox.transaction("Large") as tx:
                tx.emit(event)
        assert await written(look) == []


async def test_events_that_exceed_a_packet_together_are_all_written(mysql_url: str, look: Look) -> None:
    texts = [character * 900_000 for character in "abcdefg"]
    journal = Journal()
    async with small_packets(mysql_url, look) as outbox:
        outbox.handler(Noted, name="handles")(journal)
        async with outbox.transaction("Large") as tx:
            for text in texts:
                tx.emit(Noted(text))
        assert (await outbox.drain()).succeeded == len(texts)
        assert sorted(envelope.event.text for envelope in journal.envelopes) == texts
        assert len(await outbox.admin.payloads(["Noted"])) == len(texts)
        assert sorted(record.payload["text"] for record in await outbox.admin.list() if record.payload) == texts


async def test_due_rows_too_large_for_one_text_are_found(mysql_url: str, look: Look) -> None:
    journal = Journal()
    async with small_packets(mysql_url, look) as outbox:
        outbox.handler(Noted, name="handles")(journal)
        texts = [f"{number:4}" + "x" * 60_000 for number in range(80)]
        async with outbox.transaction("Large") as tx:
            for text in texts:
                tx.emit(Noted(text))
        assert (await outbox.drain()).succeeded == len(texts)
        assert sorted(envelope.event.text for envelope in journal.envelopes) == texts


async def test_many_events_with_a_refused_last_one_leave_nothing(mysql_url: str, look: Look) -> None:
    async with small_packets(mysql_url, look) as outbox:

        async def emit(tx: Transaction) -> None:
            for length in (1_000_000, 1_000_000, 1_000_000, PACKET):
                tx.emit(Noted("x" * length))

        with pytest.raises(InvalidEvent):
            await outbox.executor.execute(doing(emit))
        assert await written(look) == []


# --- two flavours ----------------------------------------------------------------------------------

OTHER = {"mysql": "mariadb", "mariadb": "mysql"}


async def test_a_url_of_the_other_flavour_reaches_the_server(mysql_url: str, look: Look) -> None:
    wrong = urlsplit(mysql_url)._replace(scheme=OTHER[look.dialect]).geturl()
    async with opened(Outbox(wrong, namespace="app")) as outbox:
        assert outbox.executor.shard(None).database.dialect == look.dialect
        await check_flow(outbox, look)


async def test_a_single_action_detects_the_flavour(outbox: Outbox, mysql_url: str, look: Look) -> None:
    wrong = urlsplit(mysql_url)._replace(scheme=OTHER[look.dialect]).geturl()
    async with Outbox(wrong, namespace="app") as other:
        database = other.executor.shard(None).database
        assert database.dialect == OTHER[look.dialect]
        await other.executor.execute(Emit((1,)))
        assert database.dialect == look.dialect
    assert len(await written(look)) == 1


# --- pools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"autocommit": True},
        {"autocommit": False},
        {"cursorclass": aiomysql.DictCursor},
        {"cursorclass": aiomysql.SSCursor},
        {"client_flag": CLIENT.FOUND_ROWS},
        {"autocommit": True, "cursorclass": aiomysql.DictCursor, "client_flag": CLIENT.FOUND_ROWS},
        {"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'"},
    ],
    ids=["autocommit", "no-autocommit", "dicts", "unbuffered", "found-rows", "all", "other-sql-mode"],
)
async def test_any_kind_of_user_pool_supports_everything(mysql_url: str, look: Look, options: dict[str, Any]) -> None:
    async with (
        mysql.pool(mysql_url, minsize=0, maxsize=8, **options) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
    ):
        await check_flow(outbox, look)
        await actions_on(mysql_url).becomes_idle(pool)


#: Settings that an application may have, all different from the defaults and from the settings of the loops.
THEIRS = """SET SESSION sql_mode = 'ANSI_QUOTES', innodb_lock_wait_timeout = 33, group_concat_max_len = 2048,
    sql_notes = 1, max_error_count = 13, wait_timeout = 1234, net_write_timeout = 77, collation_connection =
    'utf8mb4_unicode_ci', time_zone = '+03:00'; SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"""

#: Variables that change over time or between connections.
OF_THE_MOMENT = {
    "timestamp", "pseudo_thread_id", "pseudo_slave_mode", "rand_seed1", "rand_seed2", "last_insert_id", "identity",
    "insert_id", "error_count", "warning_count", "in_transaction", "last_gtid", "gtid_binlog_state", "gtid_next",
    "statement_id", "innodb_tmpdir",
}  # fmt: skip


async def session_variables(connection: Any) -> dict[str, str]:
    async with connection.cursor(aiomysql.Cursor) as cursor:
        await cursor.execute("SHOW SESSION VARIABLES")
        return {name: value for name, value in await cursor.fetchall() if name not in OF_THE_MOMENT}


@pytest.mark.parametrize("autocommit", [True, False])
async def test_connections_return_to_a_user_pool_unchanged(mysql_url: str, look: Look, autocommit: bool) -> None:
    theirs = {"init_command": THEIRS, "client_flag": CLIENT.MULTI_STATEMENTS, "autocommit": autocommit}
    async with mysql.pool(mysql_url, minsize=0, maxsize=8, **theirs) as pool:
        async with pool.acquire() as connection:
            before = await session_variables(connection)
        async with opened(Outbox(pool, namespace="app")) as outbox:
            await check_flow(outbox, look)
        assert pool.size >= 4, "the loops had none of the pool's connections"
        async with AsyncExitStack() as stack:
            for _ in range(pool.size):
                connection = await stack.enter_async_context(pool.acquire())
                after = await session_variables(connection)
                assert {name: (before[name], value) for name, value in after.items() if value != before[name]} == {}
                assert connection.get_autocommit() is autocommit
                assert not connection.get_transaction_status()


# --- the driver ------------------------------------------------------------------------------------


async def test_a_connection_is_one_of_the_driver(mysql_url: str) -> None:
    async with opened(Outbox(mysql_url, namespace="app")) as outbox, outbox.transaction("Ask") as tx:
        assert type(tx.connection).__module__.partition(".")[0] == OF_MYSQL


async def test_the_private_attributes_of_aiomysql_still_exist(mysql_url: str) -> None:
    """A new version of aiomysql may rename private attributes: ``outboxio/storage/mysql/driver.py`` must follow."""
    async with Outbox(mysql_url, namespace="app") as outbox:
        database: Any = outbox.executor.shard(None).database
        connection = await database._connect()
        cursor = driver.cursor(connection, driver.Cursor)
        await cursor.execute("SELECT 1")
        used = {
            connection: ("_reader", "_writer", "_result", "_loop", "_echo", "_last_usage", "_next_seq_id", "_connect",
                         "_ssl_context", "_write_bytes", "_execute_command", "_read_ok_packet",
                         "_request_authentication"),
            connection._reader: ("_waiter",),
            connection._result: ("has_next", "unbuffered_active"),
            cursor: ("_rows", "_show_warnings"),
        }  # fmt: skip
        missing = [name for owner, names in used.items() for name in names if not hasattr(owner, name)]
        drop(connection)
    assert not missing


@pytest.mark.xfail(OF_MYSQL == "asyncmy", reason="asyncmy reads such a row as the end of the result", strict=True)
async def test_a_row_of_any_length_is_read(mysql_url: str, look: Look) -> None:
    """From 16 MiB on a row consists of several packets, and starts like the end of a result."""
    async with (
        server_settings(look, max_allowed_packet=2**26),
        opened(Outbox(mysql_url, namespace="app")) as outbox,
        outbox.transaction("Ask") as tx,
    ):
        for length in (2**24 - 5, 2**24 - 1, 2**24, 2**25):
            [[text]] = await tx.fetch(f"SELECT REPEAT('a', {length})")
            assert len(text) == length
            assert await tx.fetchval("SELECT 7") == 7


async def test_two_tasks_that_wait_for_one_connection_never_hang(mysql_url: str) -> None:
    """On the raw connection; ``tx`` would refuse."""

    async def select(connection: Any) -> Any:
        async with connection.cursor(aiomysql.Cursor) as cursor:
            await cursor.execute("SELECT SLEEP(0.1)")
            return await cursor.fetchall()

    async with Outbox(mysql_url, namespace="app") as outbox:
        database: Any = outbox.executor.shard(None).database
        connection = await database._connect()
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(select(connection) for _ in range(2)), return_exceptions=True)
        assert any(isinstance(answer, Exception) for answer in answers)
        drop(connection)


# --- sockets and TLS -------------------------------------------------------------------------------


def is_here(socket: str) -> bool:
    return Path(socket).is_socket()


async def test_a_unix_socket_connects_to_the_server(mysql_url: str, look: Look) -> None:
    socket = str(await look.value("SELECT @@socket"))
    if not is_here(socket):
        pytest.skip("the server's socket is on another machine")
    parts = urlsplit(mysql_url)
    url = f"{parts.scheme}://root@{parts.path}?unix_socket={quote(socket, safe='')}"
    async with opened(Outbox(url, namespace="app")) as outbox:
        async with outbox.transaction("Ask") as tx:
            assert re.search(f"{re.escape(socket)}|UNIX socket", tx.connection.host_info)
        await look.fetch("DELETE FROM {events}")
        await check_flow(outbox, look)


async def test_a_missing_socket_is_named(mysql_url: str, tmp_path: Path) -> None:
    path = tmp_path / "nobody.sock"
    async with Outbox(f"mysql://root:secret@/app?unix_socket={path}", namespace="app") as outbox:
        with pytest.raises(DatabaseUnavailable, match=str(path)) as caught:
            await outbox.check()
    assert "secret" not in str(caught.value)


async def has_tls(look: Look) -> bool:
    rows = await look.fetch("SHOW VARIABLES LIKE 'have_ssl'")
    return not rows or rows[0]["Value"] == "YES"


def with_tls(url: str, mode: str) -> str:
    return urlsplit(url)._replace(query=f"ssl_mode={mode}").geturl()


async def test_required_tls_is_used_on_every_connection(mysql_url: str, look: Look) -> None:
    if not await has_tls(look):
        pytest.skip("this server has no TLS")
    async with opened(Outbox(with_tls(mysql_url, "REQUIRED"), namespace="app")) as outbox:
        async with outbox.transaction("Ask") as tx:
            assert (await tx.fetchrow("SHOW SESSION STATUS LIKE 'Ssl_cipher'"))[1]
        database: Any = outbox.executor.shard(None).database
        for dedicated in (database._admin, database._find, database._settle, database._fanout):
            [(_, cipher)] = await dedicated.use(ask_for_cipher)
            assert cipher
        await look.fetch("DELETE FROM {events}")
        await check_flow(outbox, look)


async def test_no_socket_outlives_an_outbox_with_tls(mysql_url: str, look: Look) -> None:
    """TLS has its own closing message, after that of MySQL."""
    if not await has_tls(look):
        pytest.skip("this server has no TLS")
    before = open_sockets()
    async with opened(Outbox(with_tls(mysql_url, "REQUIRED"), namespace="app")) as outbox:
        await look.fetch(WALLETS)
        await check_flow(outbox, look)
        assert open_sockets() > before
    assert open_sockets() == before


def open_sockets() -> int:
    number = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing
            number += os.readlink(descriptor).startswith("socket:")
    return number


async def ask_for_cipher(connection: Any) -> Any:
    async with connection.cursor(aiomysql.Cursor) as cursor:
        await cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
        return await cursor.fetchall()


@pytest.mark.parametrize("mode", ["VERIFY_CA", "VERIFY_IDENTITY"])
async def test_a_certificate_of_an_unknown_authority_is_refused(mysql_url: str, look: Look, mode: str) -> None:
    if not await has_tls(look):
        pytest.skip("this server has no TLS")
    async with Outbox(with_tls(mysql_url, mode), namespace="app") as outbox:
        with pytest.raises(DatabaseUnavailable, match="certificate"):
            await outbox.check()
        with pytest.raises(DatabaseUnavailable, match="certificate"):
            await outbox.executor.execute(Emit((1,)))


async def test_a_server_without_tls_is_refused_if_tls_is_required(mysql_url: str, look: Look) -> None:
    """A client that requires TLS must not send passwords and events unencrypted."""
    if await has_tls(look):
        pytest.skip("this server has TLS")
    async with Outbox(with_tls(mysql_url, "REQUIRED"), namespace="app") as outbox:
        with pytest.raises(DatabaseUnavailable, match=r"(?i)tls|ssl"):
            await outbox.migrate()
        with pytest.raises(DatabaseUnavailable, match=r"(?i)tls|ssl"):
            await outbox.executor.execute(Emit((1,)))


# --- rights ----------------------------------------------------------------------------------------


@pytest.mark.with_tables(False)
async def test_four_rights_are_enough_after_an_administrators_migration(
    outbox: Outbox, mysql_url: str, look: Look
) -> None:
    parts = urlsplit(mysql_url)
    await look.fetch("CREATE USER app_user IDENTIFIED BY 'p@ss:w/rd'")
    try:
        await look.fetch("GRANT SELECT, INSERT, UPDATE, DELETE ON eventlog.* TO app_user")
        await look.fetch(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {parts.path[1:]}.* TO app_user")
        address = f"app_user:{quote('p@ss:w/rd', safe='')}@{parts.hostname}:{parts.port}"
        async with Outbox(parts._replace(netloc=address).geturl(), namespace="app") as modest:
            assert await modest.migrate() == {"default": []}
            await modest.check()
            await check_flow(modest, look)
            assert await modest.admin.unsubscribe("second") == 2
    finally:
        await look.fetch("DROP USER app_user")


@pytest.mark.with_tables(False)
async def test_the_application_needs_no_database_of_its_own(mysql_url: str, look: Look) -> None:
    async with opened(Outbox(urlsplit(mysql_url)._replace(path="").geturl(), namespace="app")) as outbox:
        await check_flow(outbox, look)


# --- migrating -------------------------------------------------------------------------------------

FILES = ["0001_events.sql", "0002_event_notifications.sql", "0003_coordination.sql", "0004_consumed_events.sql",
         "0005_partitions.sql", "0006_partitions_contract.sql", "0007_operating.sql", "0008_jobs.sql",
         "0009_neighbours.sql", "0010_primary_keys.sql", "0011_automatic_partitions.sql",
         "0012_rates.sql"]  # fmt: skip


def all_statements(dialect: str) -> Iterator[str]:
    for file in sql_files(dialect):
        yield from statements_in(file.text)


@pytest.mark.with_tables(False)
async def test_migrating_twice_changes_nothing(mysql_url: str) -> None:
    async with Outbox(mysql_url, namespace="app") as first, Outbox(mysql_url, namespace="app") as second:
        assert await first.migrate() == {"default": FILES}
        assert await first.migrate() == {"default": []}
        assert await second.migrate() == {"default": []}


@pytest.mark.with_tables(False)
async def test_new_tables_have_no_indexes_of_older_versions(mysql_url: str, look: Look) -> None:
    async with Outbox(mysql_url, namespace="app") as outbox:
        await outbox.migrate()

    rows = await look.fetch("SHOW INDEX FROM {event_notifications}")
    assert {row["Key_name"] for row in rows} == {
        "PRIMARY", "event_notifications_event", "event_notifications_line", "event_notifications_partition",
        "event_notifications_dead",
    }  # fmt: skip


@pytest.mark.with_tables(False)
async def test_processes_that_start_together_migrate_only_once(mysql_url: str) -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from outboxio import Outbox
        async def main():
            async with Outbox(sys.argv[1], namespace="app") as outbox:
                print(len((await outbox.migrate())["default"]))
                await outbox.check()
        asyncio.run(main())
    """)
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, mysql_url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    outputs = [await process.communicate() for process in started]
    assert sorted(output for output, _ in outputs) == [b"0\n"] * 3 + [b"%d\n" % len(FILES)], outputs


@pytest.mark.with_tables(False)
async def test_an_interrupted_migration_resumes_from_any_point(mysql_url: str, look: Look) -> None:
    statements = list(all_statements(look.dialect))
    for done in range(len(statements) + 1):
        async with mysql.connected(mysql_url) as connection:
            if done:
                await mysql.fetch(connection, "DROP DATABASE eventlog")
            for statement in statements[:done]:
                await mysql.fetch(connection, statement)
        async with Outbox(mysql_url, namespace="app") as outbox:
            await outbox.migrate()
            await outbox.check()
            await outbox.migrate(contract=True)
            assert await outbox.migrate() == {"default": []}
            await outbox.migrate(contract=True)
        versions = await look.fetch("SELECT file FROM {schema_versions} ORDER BY version")
        assert [row["file"] for row in versions] == FILES, f"interrupted after {done} statements"


@pytest.mark.with_tables(False)
@pytest.mark.parametrize("lost", ["events", "event_notifications", "subscriptions", "leases", "consumed_events"])
async def test_a_missing_table_is_recreated_once_its_version_is_removed(outbox: Outbox, look: Look, lost: str) -> None:
    await look.fetch(f"DROP TABLE {look.table(lost)}")
    with pytest.raises(SchemaMissing, match=f"lacks table {lost}"):
        await outbox.check()
    await look.fetch("DELETE FROM {schema_versions}")
    await outbox.migrate()
    await outbox.check()


@pytest.mark.with_tables(False)
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("ALTER TABLE eventlog.events DROP COLUMN hops", "column events.hops"),
        ("ALTER TABLE eventlog.leases DROP COLUMN term", "column leases.term"),
        ("DROP INDEX events_undelivered ON eventlog.events", "index events_undelivered"),
        ("DROP INDEX event_notifications_line ON eventlog.event_notifications", "index event_notifications_line"),
    ],
)
async def test_incomplete_tables_are_refused_with_what_is_missing(
    outbox: Outbox, look: Look, change: str, missing: str
) -> None:
    await look.fetch(change)
    with pytest.raises(SchemaMissing, match=missing):
        await outbox.check()
    await look.fetch("DELETE FROM {schema_versions}")
    with pytest.raises(SchemaOccupied, match=missing):
        await outbox.migrate()


# --- transactions ended by the server ------------------------------------------------------------------


async def deadlock_here(tx: Transaction, url: str) -> None:
    """Become the victim of a deadlock: the other transaction has changed more rows."""
    async with mysql.connected(url, autocommit=False) as other:
        await mysql.fetch(other, "UPDATE wallets SET balance = balance + 1 WHERE id LIKE 'other%%'")
        await tx.execute("UPDATE wallets SET balance = balance + 100 WHERE id = 'mine'")
        theirs = asyncio.create_task(mysql.fetch(other, "UPDATE wallets SET balance = balance + 1 WHERE id = 'mine'"))
        try:
            await eventually(lambda: waits_for_a_lock(url))
            with pytest.raises(mysql.DRIVER_ERRORS) as caught:
                await tx.execute("UPDATE wallets SET balance = balance + 100 WHERE id = 'other1'")
            assert caught.value.args[0] == 1213
        finally:
            await theirs
            await other.rollback()


async def waits_for_a_lock(url: str) -> bool:
    async with mysql.connected(url) as connection:
        [status] = await mysql.fetch(connection, "SHOW ENGINE INNODB STATUS")
    return "LOCK WAIT" in status["Status"]


async def wallets(look: Look) -> dict[str, int]:
    return {row["id"]: row["balance"] for row in await look.fetch("SELECT id, balance FROM wallets ORDER BY id")}


@pytest.fixture
async def own_wallets(outbox: Outbox, look: Look) -> dict[str, int]:
    async with outbox.transaction("Setup") as tx:
        for name in ("mine", *(f"other{number}" for number in range(20))):
            await add_wallet(tx, name)
    await look.fetch("DELETE FROM {events}")
    return await wallets(look)


@pytest.mark.parametrize("record_empty_actions", [True, False])
@pytest.mark.parametrize("continues", [True, False], ids=["continues", "returns"])
async def test_a_swallowed_deadlock_ends_the_action_and_leaves_nothing(
    outbox: Outbox, mysql_url: str, look: Look, own_wallets: dict[str, int], continues: bool, record_empty_actions: bool
) -> None:
    async def swallow(tx: Transaction) -> None:
        if record_empty_actions:
            tx.emit(Noted(""))
        await deadlock_here(tx, mysql_url)
        if continues:
            await tx.execute("UPDATE wallets SET balance = balance + 100 WHERE id = 'mine'")

    with pytest.raises(TransactionEnded):
        await outbox.executor.execute(doing(swallow))
    assert await wallets(look) == own_wallets
    assert await written(look) == []
    await outbox.executor.execute(Emit((1,)))
    assert len(await written(look)) == 1


async def test_a_deadlock_on_the_raw_connection_ends_the_action_too(
    outbox: Outbox, mysql_url: str, look: Look, own_wallets: dict[str, int]
) -> None:
    async def swallow(tx: Transaction) -> None:
        tx.emit(Noted(""))
        await deadlock_here(_Behind(tx), mysql_url)  # type: ignore[arg-type]

    with pytest.raises(TransactionEnded):
        await outbox.executor.execute(doing(swallow))
    assert await wallets(look) == own_wallets
    assert await written(look) == []


class _Behind:
    """Runs statements on the driver's own connection."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def execute(self, statement: str) -> None:
        await mysql.fetch(self._tx.connection, statement)


async def test_a_swallowed_error_makes_the_action_check_its_transaction(
    outbox: Outbox, mysql_url: str, look: Look, own_wallets: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server settings such as innodb_rollback_on_timeout decide how much an error rolls back."""
    monkeypatch.setattr(errors, "_ROLLED_BACK", frozenset[int]())

    async def swallow(tx: Transaction) -> None:
        tx.emit(Noted(""))
        await deadlock_here(tx, mysql_url)
        await tx.execute("UPDATE wallets SET balance = balance + 100 WHERE id = 'mine'")

    with pytest.raises(TransactionEnded):
        await outbox.executor.execute(doing(swallow))
    assert await wallets(look) == own_wallets
    assert await written(look) == []


@pytest.mark.parametrize("uses_it", [True, False], ids=["used", "only requested"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
async def test_the_first_requested_connection_has_its_transaction_open(
    outbox: Outbox, look: Look, own_wallets: dict[str, int], uses_it: bool, fails: bool
) -> None:
    async def act(tx: Transaction) -> None:
        behind = _Behind(tx)
        if uses_it:
            await behind.execute("UPDATE wallets SET balance = balance + 1")
        tx.emit(Noted(""))
        assert tx.connection is not None
        if fails:
            raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            await outbox.executor.execute(doing(act))
    else:
        await outbox.executor.execute(doing(act))

    changed = uses_it and not fails
    assert await wallets(look) == {name: balance + changed for name, balance in own_wallets.items()}
    assert len(await written(look)) == (not fails)


async def test_a_first_statement_that_fills_its_message_is_sent_alone(
    outbox: Outbox, look: Look, own_wallets: dict[str, int]
) -> None:
    largest = await look.value("SELECT @@max_allowed_packet")
    statement = "UPDATE wallets SET balance = balance + 1 -- "

    async def act(tx: Transaction) -> None:
        await tx.execute(statement + "x" * (largest - len(statement) - 16))
        tx.emit(Noted(""))

    await outbox.executor.execute(doing(act))

    assert await wallets(look) == {name: balance + 1 for name, balance in own_wallets.items()}
    assert len(await written(look)) == 1


async def test_a_refused_first_statement_leaves_nothing_open(
    outbox: Outbox, look: Look, own_wallets: dict[str, int]
) -> None:
    async def act(tx: Transaction) -> None:
        with pytest.raises(Exception, match="no_such_column"):
            await tx.execute("UPDATE wallets SET no_such_column = 1")
        await tx.execute("UPDATE wallets SET balance = balance + 1")
        tx.emit(Noted(""))

    await outbox.executor.execute(doing(act))

    assert await wallets(look) == {name: balance + 1 for name, balance in own_wallets.items()}
    assert len(await written(look)) == 1


async def test_an_abandoned_task_cannot_read_the_transaction_check(
    outbox: Outbox, look: Look, own_wallets: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    left: list[asyncio.Task[int]] = []

    async def abandon_task(tx: Transaction) -> None:
        with pytest.raises(Exception, match="no_such_column"):
            await tx.execute("UPDATE wallets SET no_such_column = 1")
        left.append(asyncio.create_task(tx.execute("UPDATE wallets SET balance = balance + 1")))
        await asyncio.sleep(0)  # the task checks whether the transaction is still open

    with pytest.raises(ConcurrentUse):
        await outbox.executor.execute(doing(abandon_task))
    await asyncio.gather(*left, return_exceptions=True)

    assert "ROLLBACK failed" not in caplog.text
    assert await wallets(look) == own_wallets
    await outbox.executor.execute(Emit((1,)))
    assert len(await written(look)) == 1


async def test_an_unhandled_deadlock_is_retried(
    outbox: Outbox, mysql_url: str, look: Look, own_wallets: dict[str, int]
) -> None:
    tries = []

    async def once(tx: Transaction) -> None:
        tries.append(1)
        tx.emit(Noted(""))
        if len(tries) == 1:
            await deadlock_here(tx, mysql_url)
            raise aiomysql.OperationalError(1213, "as the server said")

    await outbox.executor.execute(doing(once))
    assert len(tries) == 2
    assert len(await written(look)) == 1
    assert await wallets(look) == own_wallets


async def test_a_swallowed_lock_wait_timeout_keeps_the_transaction_open(
    outbox: Outbox, mysql_url: str, look: Look, own_wallets: dict[str, int]
) -> None:
    async def swallow(tx: Transaction) -> None:
        await tx.execute("UPDATE wallets SET balance = 7 WHERE id = 'mine'")
        await tx.execute("SET SESSION innodb_lock_wait_timeout = 1")
        async with mysql.connected(mysql_url, autocommit=False) as other:
            await mysql.fetch(other, "UPDATE wallets SET balance = 1 WHERE id = 'other1'")
            with pytest.raises(mysql.DRIVER_ERRORS, match="1205"):
                await tx.execute("UPDATE wallets SET balance = 9 WHERE id = 'other1'")
            await other.rollback()
        tx.emit(Noted(""))

    await outbox.executor.execute(doing(swallow))
    assert await wallets(look) == {**own_wallets, "mine": 7}
    assert len(await written(look)) == 1


@pytest.mark.parametrize(
    "body", ["COMMIT", "ROLLBACK", "COMMIT; START TRANSACTION", "COMMIT; START TRANSACTION; SAVEPOINT other"]
)
@pytest.mark.parametrize("way", ["on tx", "behind its back", "behind a semicolon"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
async def test_a_procedure_that_ends_the_transaction_ends_the_action(
    outbox: Outbox, look: Look, body: str, way: str, is_first: bool
) -> None:
    await look.fetch(f"CREATE PROCEDURE ends() BEGIN {body}; END")

    async def call(tx: Transaction) -> None:
        tx.emit(Noted(""))
        if not is_first:
            await tx.fetch("SELECT id FROM wallets")
        await {
            "on tx": lambda: tx.execute("CALL ends()"),
            "behind its back": lambda: _Behind(tx).execute("CALL ends()"),
            "behind a semicolon": lambda: tx.execute("SELECT 1; CALL ends()"),
        }[way]()
        await tx.execute("INSERT INTO wallets (id, balance) VALUES ('after', 0)")

    with pytest.raises(TransactionEnded):
        await outbox.executor.execute(doing(call))
    assert await written(look) == []
    assert await balances(look) == []


@pytest.mark.parametrize("kind", ["FUNCTION", "TRIGGER"])
async def test_code_called_by_a_statement_cannot_end_the_transaction(outbox: Outbox, look: Look, kind: str) -> None:
    """This is why single statements that read or change rows need no savepoint."""
    ends = {
        "FUNCTION": "CREATE FUNCTION ends() RETURNS INT DETERMINISTIC BEGIN COMMIT; RETURN 1; END",
        "TRIGGER": "CREATE TRIGGER ends BEFORE INSERT ON wallets FOR EACH ROW BEGIN COMMIT; END",
    }
    with pytest.raises(Exception, match="1422"):
        await look.fetch(ends[kind])


async def test_a_procedure_that_ends_no_transaction_is_allowed(outbox: Outbox, look: Look) -> None:
    await look.fetch(
        "CREATE PROCEDURE opens(IN wallet VARCHAR(36)) BEGIN INSERT INTO wallets (id, balance) VALUES (wallet, 5);"
        " SELECT id, balance FROM wallets; END"
    )
    async with outbox.transaction("Call") as tx:
        rows = await tx.fetch("CALL opens(%s)", "w1")
        assert [(row["id"], row["balance"]) for row in rows] == [("w1", 5)]
        tx.emit(Noted(""))
    assert await balances(look) == [5]
    assert len(await written(look)) == 1


# --- rows ------------------------------------------------------------------------------------------


async def test_rows_are_read_by_index_and_by_name(outbox: Outbox) -> None:
    async with outbox.transaction("Fetch") as tx:
        [row] = await tx.fetch("SELECT 1 AS a, 2 AS b, 3 AS a, NULL AS `a b`")
        assert (row[0], row[1], row[2], row[3], row[-1]) == (1, 2, 3, None, None)
        assert (row["a"], row["b"], row["a b"]) == (1, 2, None)
        assert tuple(row) == (1, 2, 3, None)
        assert row[1:3] == (2, 3)
        assert len(row) == 4
        assert row.keys() == ["a", "b", "a b"]
        with pytest.raises(KeyError):
            row["c"]
        with pytest.raises(IndexError):
            row[4]
        assert await tx.fetch("SELECT 1 FROM wallets") == []
        assert await tx.fetchrow("SELECT 1 FROM wallets") is None


async def test_execute_counts_the_rows_it_found(outbox: Outbox) -> None:
    async with outbox.transaction("Count") as tx:
        assert await tx.execute("INSERT INTO wallets (id, balance) VALUES ('a', 1), ('b', 1), ('c', 2)") == 3
        assert await tx.execute("UPDATE wallets SET balance = 1 WHERE balance = 1") == 2  # and changed none
        assert await tx.execute("UPDATE wallets SET balance = %s WHERE id = %s", 5, "a") == 1
        assert await tx.execute("UPDATE wallets SET balance = 5 WHERE id = 'nobody'") == 0
        await tx.expect_one("UPDATE wallets SET balance = 5 WHERE id = 'a'", model_type="Wallet")
        assert await tx.execute("DELETE FROM wallets WHERE balance < 5") == 2
        assert await tx.execute("SET @nothing = 1") == 0


async def test_percent_signs_are_doubled_only_with_arguments(outbox: Outbox) -> None:
    async with outbox.transaction("Fetch") as tx:
        assert await tx.fetchval("SELECT '100%'") == "100%"
        assert await tx.fetchval("SELECT '%s'") == "%s"
        assert await tx.fetchval("SELECT CONCAT('100%%', %s)", "%s") == "100%%s"


ID, MOMENT = uuid4(), utc_now().replace(microsecond=1)


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("LONGTEXT", TRICKY, TRICKY),
        ("CHAR(36)", ID, str(ID)),
        ("DATETIME(6)", MOMENT, MOMENT),
        ("BLOB", b"\0\xff'\\", b"\0\xff'\\"),
        ("BIGINT", 2**63 - 1, 2**63 - 1),
        ("INT", None, None),
    ],
)
async def test_arguments_are_stored_in_the_databases_types(
    outbox: Outbox, look: Look, kind: str, value: Any, stored: Any
) -> None:
    await look.fetch(f"CREATE TABLE own (value {kind}) CHARACTER SET utf8mb4")
    async with outbox.transaction("Store") as tx:
        await tx.execute("INSERT INTO own VALUES (%s)", value)
        assert await tx.fetchval("SELECT value FROM own") == stored
