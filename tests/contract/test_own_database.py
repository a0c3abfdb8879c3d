"""``record`` writes only into the database of its shard, even if another database has the same tables."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiosqlite
import asyncpg
import pytest

from outboxio import ConfigurationError, Outbox, Settings, WrongDatabase
from outboxio.storage.connections.identity import DatabaseVerifier, Identity, Kin
from tests.contract.test_record import engine_of
from tests.kit import mysql
from tests.kit.app import Look, WalletOpened, opened
from tests.kit.proxy import proxy_to
from tests.kit.server_actions import actions_on

ALONE = Settings(notify=False)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    """A user-supplied connection in a transaction."""
    look = Look(url)
    if look.driver == "asyncpg":
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()
    elif look.driver == "aiomysql":
        async with mysql.connected(url) as connection:
            await connection.begin()
            yield connection
            await connection.commit()
    else:
        async with aiosqlite.connect(urlsplit(url).path[1:], isolation_level=None) as connection:
            await connection.execute("BEGIN")
            yield connection
            await connection.commit()


async def open_wallet(outbox: Outbox, connection: Any) -> None:
    await outbox.record(connection, WalletOpened(uuid4()), action="Open")


# --- what is refused -------------------------------------------------------------------------------


async def test_a_connection_to_another_database_is_refused_by_name(database_url: str, second_url: str) -> None:
    async with (
        opened(Outbox(database_url, namespace="app", settings=ALONE)) as outbox,
        opened(Outbox(second_url, namespace="app", settings=ALONE)),
    ):
        for _ in range(2):
            async with connected(second_url) as connection:
                with pytest.raises(WrongDatabase, match="shard 'default' is") as caught:
                    await open_wallet(outbox, connection)
                with pytest.raises(ConfigurationError):
                    await outbox.inbox.receive(
                        source="s", external_id="1", event=WalletOpened(uuid4()), connection=connection
                    )
        assert caught.value.actual != caught.value.expected
        for own, url in ((caught.value.expected, database_url), (caught.value.actual, second_url)):
            named = str(urlsplit(url).port) if Look(url).driver == "aiomysql" else urlsplit(url).path[1:]
            assert named in own
            assert await Look(url).events() == []


async def test_a_session_of_another_database_is_refused(database_url: str, second_url: str) -> None:
    engine = engine_of(second_url)
    try:
        async with (
            opened(Outbox(database_url, namespace="app", settings=ALONE)) as outbox,
            opened(Outbox(second_url, namespace="app", settings=ALONE)),
            engine.connect() as connection,
        ):
            await connection.begin()
            with pytest.raises(WrongDatabase):
                await open_wallet(outbox, connection)
            await connection.rollback()
    finally:
        await engine.dispose()
    assert await Look(second_url).events() == []


async def test_each_shard_accepts_only_its_own_connections(database_url: str, second_url: str) -> None:
    shards = {"here": database_url, "there": second_url}
    async with opened(Outbox(shards, namespace="app", settings=ALONE)) as outbox:
        for given, url in shards.items():
            async with connected(url) as connection:
                for shard in shards:
                    if shard == given:
                        await outbox.record(connection, WalletOpened(uuid4()), action="Open", shard=shard)
                    else:
                        with pytest.raises(WrongDatabase, match=f"shard '{shard}' is"):
                            await outbox.record(connection, WalletOpened(uuid4()), action="Open", shard=shard)
            assert len(await Look(url).events()) == 1


# --- what is accepted ------------------------------------------------------------------------------


async def test_a_connection_by_another_route_is_to_the_same_database(server_url: str) -> None:
    """Addresses differ: the host name, and the hops in between."""
    async with (
        opened(Outbox(server_url, namespace="app", settings=ALONE)) as outbox,
        proxy_to(server_url.replace("127.0.0.1", "localhost")) as proxy,
        connected(proxy.url) as connection,
    ):
        await open_wallet(outbox, connection)
    assert len(await Look(server_url).events()) == 1


async def test_nothing_is_refused_if_the_shard_is_unreachable(server_url: str, second_url: str) -> None:
    """The application's connection works, and only that counts."""
    async with opened(Outbox(second_url, namespace="app", settings=ALONE)):
        pass
    async with proxy_to(server_url) as proxy:
        url = proxy.url
    async with Outbox(url, namespace="app", settings=ALONE) as outbox:
        for _ in range(2):
            async with connected(second_url) as connection:
                await open_wallet(outbox, connection)
    assert len(await Look(second_url).events()) == 2


@pytest.mark.parametrize("size", [1, 2])
async def test_a_connection_of_the_user_pool_needs_no_second_one(server_url: str, size: int) -> None:
    async with (
        actions_on(server_url).pool(size) as pool,
        opened(Outbox(pool, namespace="app", settings=ALONE)) as outbox,
        pool.acquire() as connection,
        asyncio.timeout(10),
    ):
        begin = connection.execute("BEGIN") if hasattr(connection, "fetchval") else connection.begin()
        await begin
        await open_wallet(outbox, connection)
        await (connection.execute("COMMIT") if hasattr(connection, "fetchval") else connection.commit())
    assert len(await Look(server_url).events()) == 1


async def test_a_connection_of_an_action_is_accepted(database_url: str) -> None:
    async with opened(Outbox(database_url, namespace="app", settings=ALONE)) as outbox:
        async with outbox.transaction("Open") as tx:
            await open_wallet(outbox, tx.connection)
        assert len(await Look(database_url).events()) == 2


async def test_a_producer_needs_no_additional_rights(postgres_url: str) -> None:
    look, name = Look(postgres_url), f"producer_{urlsplit(postgres_url).path[1:]}"
    parts = urlsplit(postgres_url)
    async with opened(Outbox(postgres_url, namespace="app")):
        pass
    await look.fetch(f'CREATE ROLE "{name}" LOGIN')
    try:
        await look.fetch(f'GRANT USAGE ON SCHEMA eventlog TO "{name}"')
        await look.fetch(f'GRANT INSERT ON eventlog.events TO "{name}"')
        url = parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl()
        async with Outbox(url, namespace="app", settings=ALONE) as outbox, connected(url) as connection:
            await open_wallet(outbox, connection)
    finally:
        await look.fetch(f'DROP OWNED BY "{name}"')
        await look.fetch(f'DROP ROLE "{name}"')
    assert len(await look.events()) == 1


# --- files -----------------------------------------------------------------------------------------


async def test_a_file_is_recognized_by_any_path(sqlite_url: str, tmp_path: Path) -> None:
    path, link = Path(urlsplit(sqlite_url).path[1:]), tmp_path / "link.db"
    relative = os.path.relpath(path)  # noqa: ASYNC240  # no file is looked at
    async with opened(Outbox(sqlite_url, namespace="app")) as outbox:
        link.symlink_to(path)
        for given in (str(link), relative, f"file:{path}?cache=private"):
            connection = sqlite3.connect(given, isolation_level=None, uri=given.startswith("file:"))
            connection.row_factory = lambda cursor, row: dict(zip("abc", row, strict=False))
            connection.execute("BEGIN")
            await open_wallet(outbox, connection)
            connection.execute("COMMIT")
            connection.close()
    assert len(await Look(sqlite_url).events()) == 3


async def test_an_attached_file_is_recognized(sqlite_url: str, tmp_path: Path) -> None:
    async with opened(Outbox(sqlite_url, namespace="app")) as outbox:
        connection = sqlite3.connect(tmp_path / "own.db", isolation_level=None)
        connection.execute("ATTACH ? AS outbox", (urlsplit(sqlite_url).path[1:],))
        connection.execute("BEGIN")
        await open_wallet(outbox, connection)
        connection.execute("COMMIT")
        connection.close()
    assert len(await Look(sqlite_url).events()) == 1


@pytest.mark.parametrize("is_file", [True, False])
async def test_a_file_and_an_in_memory_database_are_different(tmp_path: Path, is_file: bool) -> None:
    url, path = ("sqlite://", str(tmp_path / "a.db")) if is_file else (f"sqlite:///{tmp_path / 'a.db'}", ":memory:")
    async with opened(Outbox(url, namespace="app")) as outbox:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("BEGIN")
        with pytest.raises(WrongDatabase, match="a database in memory"):
            await open_wallet(outbox, connection)
        connection.close()


# --- the verifier alone ----------------------------------------------------------------------------


class Connection:
    """A stand-in for a caller's connection."""


class Answers:
    """The identity that a database reports for each query; ``None``: no response."""

    def __init__(self, *keys: str | None, kin: Kin | None = None) -> None:
        self.left = list(keys)
        self.kin = kin

    async def given(self) -> Identity:
        key = self.left.pop(0)
        if key is None:
            raise ConnectionRefusedError
        return Identity(key, f"the database {key}", self._kin)

    async def own(self) -> tuple[Identity, Kin | None]:
        return await self.given(), self.kin

    async def _kin(self) -> Kin | None:
        return self.kin


async def test_each_connection_is_checked_once() -> None:
    own, given, connection = DatabaseVerifier("main", Answers("a").own), Answers("a"), Connection()
    for _ in range(3):
        await own.require(connection, given.given)


async def test_a_restarted_server_is_checked_again_before_refusing() -> None:
    own = DatabaseVerifier("main", Answers("a", "b", "b").own)
    await own.require(Connection(), Answers("a").given)
    await own.require(Connection(), Answers("b").given)

    with pytest.raises(WrongDatabase, match="the connection is to the database c, but shard 'main' is the database b"):
        await own.require(Connection(), Answers("c").given)


@pytest.mark.parametrize(
    ("given", "own", "is_same"),
    [
        (("system", "app"), ("system", "app"), True),
        (("system", "app"), ("system", "other"), False),
        (("system", "app"), ("another", "app"), False),
        ((None, "app"), ("system", "app"), True),
        ((None, "app"), ("system", "other"), False),
        (None, None, False),
    ],
)
async def test_a_server_and_its_replicas_are_one_database(given: Kin | None, own: Kin | None, is_same: bool) -> None:
    """A load balancer may send a query to any replica."""
    database = DatabaseVerifier("main", Answers("b", kin=own).own)
    verified = database.require(Connection(), Answers("a", kin=given).given)
    if is_same:
        await verified
    else:
        with pytest.raises(WrongDatabase):
            await verified


async def test_an_accepted_connection_is_checked_again_once_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, given, connection = Answers(None, "a"), Answers("b", "b", "b"), Connection()
    own = DatabaseVerifier("main", ours.own)
    await own.require(connection, given.given)
    await own.require(connection, given.given)
    assert ours.left == ["a"]  # it is not checked with every record

    monkeypatch.setattr("outboxio.storage.connections.identity.RECHECK_INTERVAL", 0.0)
    with pytest.raises(WrongDatabase):
        await own.require(connection, given.given)


async def test_a_user_without_the_identity_right_keeps_its_transaction(postgres_url: str, second_url: str) -> None:
    """A failed query would end the transaction."""
    look = Look(second_url)
    async with (
        opened(Outbox(postgres_url, namespace="app", settings=ALONE)) as outbox,
        opened(Outbox(second_url, namespace="app", settings=ALONE)),
    ):
        await look.fetch("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_control_system() FROM PUBLIC")
        name = f"poor_{urlsplit(second_url).path[1:]}"
        await look.fetch(f'CREATE ROLE "{name}" LOGIN')
        try:
            parts = urlsplit(second_url)
            url = parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl()
            async with connected(url) as connection:
                with pytest.raises(WrongDatabase):
                    await open_wallet(outbox, connection)
                assert await connection.fetchval("SELECT 1") == 1
        finally:
            await look.fetch(f'DROP ROLE "{name}"')
