"""A refused connection raises the same clear error for a URL, an engine and a user-supplied pool."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from outboxio import DatabaseUnavailable, Outbox
from tests.kit import mysql
from tests.kit.forked import fork
from tests.kit.opened_by import engine_url
from tests.kit.refusing import refusing_server

ROOT = Path(__file__).parents[2]

#: Answers of real servers: no such database, wrong password, too many connections, starting up, not accepting, and an
#: error that is in no list of outboxio.
REFUSALS = [
    ("postgresql", "3D000", 'database "app" does not exist'),
    ("postgresql", "28P01", 'password authentication failed for user "app"'),
    ("postgresql", "28000", 'role "app" is not permitted to log in'),
    ("postgresql", "53300", "sorry, too many clients already"),
    ("postgresql", "57P03", "the database system is starting up"),
    ("postgresql", "55000", 'database "app" is not currently accepting connections'),
    ("postgresql", "XX000", "an error of a proxy"),
    ("mysql", "1049", "Unknown database 'app'"),
    ("mysql", "1045", "Access denied for user 'app'"),
    ("mysql", "1040", "Too many connections"),
    ("mysql", "1053", "Server shutdown in progress"),
    ("mysql", "9999", "an error of a proxy"),
    ("mariadb", "1040", "Too many connections"),
]
SOURCES = ["url", "engine", "pool"]


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncGenerator[Outbox]:
    """An outbox with a URL, an engine or a driver's pool."""
    if kind == "url":
        async with Outbox(url, namespace="shop") as outbox:
            yield outbox
    elif kind == "engine":
        engine = create_async_engine(engine_url(url))
        async with Outbox(engine, namespace="shop") as outbox:
            yield outbox
        await engine.dispose()
    else:
        pool: Any = asyncpg.create_pool(url, min_size=0) if "postgres" in url else mysql.pool(url, minsize=0)
        async with pool as opened_pool, Outbox(opened_pool, namespace="shop") as outbox:
            yield outbox


async def enter(outbox: Outbox) -> None:
    async with outbox.running():
        pass


async def write(outbox: Outbox) -> None:
    async with outbox.transaction("Order"):
        pass


async def lock(outbox: Outbox) -> None:
    async with outbox.lock("key"):
        pass


CALLS: dict[str, Callable[[Outbox], Awaitable[object]]] = {
    "check": Outbox.check,
    "running": enter,
    "transaction": write,
    "lock": lock,
    "migrate": Outbox.migrate,
    "counts": lambda outbox: outbox.admin.counts(),
}


async def assert_unavailable(outbox: Outbox, message: str) -> None:
    for name, call in CALLS.items():
        with pytest.raises(DatabaseUnavailable) as caught:
            await call(outbox)
        assert message in caught.value.reason, name
        assert "s3cret" not in str(caught.value)
    health, overview = await outbox.health(), await outbox.admin.overview()
    assert (health.status, overview.level) == ("down", "down")
    assert message in overview.verdict[0]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("scheme", "code", "message"), REFUSALS)
async def test_a_refused_connection_is_an_unavailable_database(kind: str, scheme: str, code: str, message: str) -> None:
    async with refusing_server(scheme, code, message) as url, opened(kind, url) as outbox:
        await assert_unavailable(outbox, message)


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_missing_database_of_a_real_server_is_unavailable(kind: str, server_url: str) -> None:
    url = urlsplit(server_url)._replace(path="/no_such_database").geturl()

    async with opened(kind, url) as outbox:
        await assert_unavailable(outbox, "no_such_database")


async def test_an_engine_reports_a_server_without_the_required_role() -> None:
    async def connect() -> None:
        raise asyncpg.TargetServerAttributeNotMatched("None of the hosts match the target attribute requirement")

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect)
    async with Outbox(engine, namespace="shop") as outbox:
        with pytest.raises(DatabaseUnavailable, match="None of the hosts match"):
            await outbox.check()
        with pytest.raises(DatabaseUnavailable, match="None of the hosts match"):
            await write(outbox)


APP = """
import os
from sqlalchemy.ext.asyncio import create_async_engine
from outboxio import Outbox
outbox = Outbox(create_async_engine(os.environ["APP_DATABASE"]), namespace="shop")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def run(directory: Path, url: str, *arguments: str) -> tuple[int | None, str, str]:
    environ = {**os.environ, "APP_DATABASE": engine_url(url)}
    process = await fork("outboxio.cli", *arguments, folder=directory, environ=environ, with_stderr=True)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_commands_on_an_engine_exit_with_3(directory: Path) -> None:
    scheme, code, message = REFUSALS[0]
    async with refusing_server(scheme, code, message) as url:
        for command in ("worker", "health", "doctor"):
            exit_code, out, err = await run(directory, url, command, "app:outbox")

            assert exit_code == 3, (command, out, err)
            assert command == "health" or message in out + err  # a probe names the shard only
            assert "Traceback" not in err, command


async def test_a_worker_reports_its_failed_start_in_the_log_format(directory: Path) -> None:
    async with refusing_server("postgresql", "53300", "sorry, too many clients already") as url:
        exit_code, _, err = await run(directory, url, "worker", "app:outbox", "--log-format", "json")

    entries = [json.loads(line) for line in err.splitlines()]
    assert exit_code == 3
    assert [entry["level"] for entry in entries].count("ERROR") == 1
    assert "sorry, too many clients already" in entries[-1]["message"]
    assert entries[-1]["outboxio_error_type"] == "DatabaseUnavailable"


async def test_a_worker_without_an_outbox_reports_that_in_the_log_format(directory: Path) -> None:
    exit_code, _, err = await run(directory, "postgresql://", "worker", "app:outbos", "--log-format", "json")

    [entry] = [json.loads(line) for line in err.splitlines()]
    assert exit_code == 2
    assert "module app has no 'outbos'" in entry["message"]
