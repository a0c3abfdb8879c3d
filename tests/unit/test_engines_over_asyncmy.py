"""Engines over asyncmy: the options of the engine become arguments of aiomysql, which the loops use."""

from __future__ import annotations

import ssl
import sys
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from outboxio import ConfigurationError, Outbox, Shard

AUTHORITY = ssl.get_default_verify_paths().cafile
URL = "mysql+asyncmy://me:p%40ss@db:3307/app"
CONTEXT = ssl.create_default_context()


def arguments_of(engine: AsyncEngine) -> dict[str, Any]:
    database: Any = Outbox(engine, namespace="app").executor.shard(None).database
    [arguments] = database._arguments.values()
    return dict(arguments)


PLACE = {"user": "me", "password": "p@ss", "host": "db", "port": 3307, "db": "app"}


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        (URL, {}, PLACE),
        (f"{URL}?charset=utf8mb4&connect_timeout=3", {}, {**PLACE, "connect_timeout": 3}),
        ("mariadb+asyncmy://me@db/app", {}, {"user": "me", "host": "db", "db": "app"}),
        (
            "mysql+asyncmy://me@/app?unix_socket=/run/s",
            {"database": "other"},
            {"user": "me", "unix_socket": "/run/s", "db": "other"},
        ),
        (URL, {"init_command": "SET ROLE a", "sql_mode": "ANSI"}, {**PLACE, "init_command": "SET ROLE a"}),
        (URL, {"use_unicode": False, "stmt_cache_size": 100, "echo": True, "read_timeout": 5, "sock": None}, PLACE),
        (URL, {"ssl": CONTEXT}, {**PLACE, "ssl": CONTEXT}),
        (URL, {"ssl": {}}, PLACE),
    ],
)  # fmt: skip
def test_the_loops_connect_as_the_engine_does(url: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert arguments_of(create_async_engine(url, connect_args=options)) == expected


@pytest.mark.parametrize(
    ("url", "options", "checks", "checks_host"),
    [
        (URL, {"ssl": True}, False, False),
        (f"{URL}?ssl_ca={AUTHORITY}", {}, True, True),
        (f"{URL}?ssl_ca={AUTHORITY}&ssl_check_hostname=false", {}, True, False),
    ],
)
def test_the_loops_use_the_tls_of_the_engine(
    url: str, options: dict[str, Any], checks: bool, checks_host: bool
) -> None:
    context = arguments_of(create_async_engine(url, connect_args=options))["ssl"]
    assert (context.verify_mode is ssl.CERT_REQUIRED, context.check_hostname) == (checks, checks_host)


async def connect() -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"async_creator": connect}, "creator, async_creator or pool"),
        ({"creator": object}, "creator, async_creator or pool"),
        ({"connect_args": {"read_default_file": "/etc/my.cnf"}}, "the option read_default_file"),
        ({"connect_args": {"password_creator": connect}}, "the option password_creator"),
        (
            {"connect_args": {"ssl": {"capath": "/etc/ssl", "verify_mode": False}}},
            "the TLS options capath, verify_mode",
        ),
    ],
)
def test_an_option_not_supported_by_the_loops_is_named(options: dict[str, Any], named: str) -> None:
    engine = create_async_engine(URL, **options)
    with pytest.raises(
        ConfigurationError, match=rf"'default' .* asyncmy with {named}\b.*Shard\(engine, direct_url='mysql:"
    ):
        Outbox(engine, namespace="app")
    Outbox(Shard(engine, direct_url="mysql://me@db/app"), namespace="app")


async def test_a_listener_supplies_the_loops_with_an_expiring_password() -> None:
    engine = create_async_engine(URL)
    passwords = iter(["first", "second"])

    @event.listens_for(engine.sync_engine, "do_connect")
    def sign_in(dialect: Any, record: Any, args: Any, options: dict[str, Any]) -> None:
        options["password"] = next(passwords)

    database: Any = Outbox(engine, namespace="app").executor.shard(None).database
    for password in ("first", "second"):
        options = await greenlet_spawn(database._engine.connect_options, listens=True)
        assert options["password"] == password


async def test_a_listener_that_connects_itself_is_refused() -> None:
    engine = create_async_engine(URL)
    event.listen(engine.sync_engine, "do_connect", lambda *_: object())
    database: Any = Outbox(engine, namespace="app").executor.shard(None).database
    with pytest.raises(ConfigurationError, match="a listener to do_connect"):
        await greenlet_spawn(database._engine.connect_options, listens=True)


def test_a_missing_aiomysql_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("database", "driver"):
        monkeypatch.delitem(sys.modules, f"outboxio.storage.mysql.{name}", raising=False)
        monkeypatch.delattr(f"outboxio.storage.mysql.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "aiomysql", None)
    with pytest.raises(ConfigurationError, match=r"the driver aiomysql: pip install 'outboxio\[mysql\]'"):
        Outbox(create_async_engine(URL), namespace="app")
