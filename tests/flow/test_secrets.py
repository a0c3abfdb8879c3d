"""No command, error or log record shows a password, on every database, reachable or not."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer.main
from httpx import AsyncClient
from typer.testing import CliRunner

from outboxio import ConfigurationError, DatabaseUnavailable, Outbox, Settings, SettingsError, Shard
from outboxio.cli.app import app
from tests.kit import mysql
from tests.kit.app import Emit, Journal, MoneyDeposited, eventually
from tests.kit.server_actions import actions_on, with_password

ROOT = Path(__file__).parents[2]
SECRET = "s3cret"

SHOP = f"""
import os
from outboxio import Event, EventEnvelope, Outbox, Shard

class Ordered(Event):
    number: int

URL = os.environ.get("SHOP_DATABASE", "postgresql://ada:{SECRET}@127.0.0.1:1/app")
outbox = Outbox(URL, namespace="shop")
shards = Outbox({{"one": Shard(URL, direct_url=URL)}}, namespace="shop")
shard = Shard(URL, direct_url=URL)
urls = {{"one": URL}}

@outbox.handler(Ordered, name="ship")
async def ship(envelope: EventEnvelope[Ordered]) -> None: ...

def raises(): raise RuntimeError(f"cannot open {{URL}}")
def raises_literally(): raise RuntimeError("cannot open postgresql://ada:{SECRET}@127.0.0.1:1/app")
"""


def commands() -> set[str]:
    """Every available command."""
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # typer types it as a plain command


ROWS = ("--database", "URL", "--namespace", "shop")
UNKNOWN = "01900000-0000-7000-8000-000000000000"

#: How the database is passed to each command; the URL replaces ``URL``.
CALLS: dict[str, list[tuple[str, ...]]] = {
    **{
        name: [ROWS]
        for name in (
            *("doctor", "handlers", "instances", "locks", "list", "dead", "list-events", "tail", "keys", "paused"),
            *("operations", "export", "health", "jobs"),
        )
    },
    **{name: [(*ROWS, UNKNOWN)] for name in ("show", "stop")},
    **{name: [(*ROWS, "--all", "--yes")] for name in ("retry", "skip")},
    **{name: [("shop:outbox", "ship")] for name in ("pause", "unpause")},
    **{name: [("shop:outbox", "ship", "--since", "1h", "--yes")] for name in ("replay", "backfill")},
    "resume": [("shop:outbox", "ship", "key", "--yes")],
    "purge": [(*ROWS, "--yes")],
    "cancel": [("shop:outbox", UNKNOWN, "--reason", "it hangs")],
    "watch": [("shop:outbox", "--once", "--webhook", "http://127.0.0.1:9/")],
    "unsubscribe": [("shop:outbox", "ship", "--yes")],
    "events": [("shop:outbox", "--database", "URL", "--namespace", "shop")],
    "emit": [("shop:outbox", "Ordered", '{"number": 1}')],
    "migrate": [("--database", "URL"), ("shop:shards", "--json")],
    "check": [("--database", "URL"), ("shop:outbox", "--json"), ("shop:shards",)],
    "status": [("--database", "URL", "--namespace", "shop"), ("shop:outbox", "--json"), ("shop:shards",)],
    "partitions": [("--database", "URL", "--namespace", "shop"), ("shop:outbox", "--json")],
    "worker": [("shop:outbox", "--drain", "--log-level", "debug")],
    "demo": [("--database", "URL")],
}


class Shell:
    """Runs commands in the directory of an application, and collects their output."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (directory / "shop.py").write_text(SHOP)
        monkeypatch.chdir(directory)
        monkeypatch.syspath_prepend(directory)
        for variable in [name for name in os.environ if name.startswith("OUTBOXIO_")]:
            monkeypatch.delenv(variable)
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str, database: str | None = None) -> tuple[int | None, str]:
        """In this process."""
        if database is not None:
            self._monkeypatch.setenv("SHOP_DATABASE", database)
        self._monkeypatch.delitem(sys.modules, "shop", raising=False)
        done = CliRunner().invoke(app, [database or "" if a == "URL" else a for a in arguments])
        return done.exit_code, done.output

    async def apart(self, *arguments: str, database: str) -> tuple[int | None, str]:
        """In a separate process, with its log."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outboxio.cli", *(database if a == "URL" else a for a in arguments)),
            env={**os.environ, "PYTHONPATH": str(ROOT), "SHOP_DATABASE": database},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        written, _ = await process.communicate()
        return process.returncode, written.decode()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    log, is_set_up = logging.getLogger("outboxio"), logging.getLogger().handlers
    level = log.level
    assert is_set_up  # otherwise a command would configure logging permanently
    yield Shell(tmp_path, monkeypatch)
    log.setLevel(level)


def test_every_command_is_covered() -> None:
    ask_no_database = {"alembic-revision", "describe", "completion"}
    serves = {"dashboard"}  # runs until a signal; tested below
    assert set(CALLS) == commands() - ask_no_database - serves


@pytest.mark.above_statements
async def test_no_command_shows_the_password_of_a_reachable_database(shell: Shell, server_url: str) -> None:
    async with with_password(server_url, SECRET) as url:
        for command, arguments in [(command, call) for command, calls in CALLS.items() for call in calls]:
            # In a thread, because a command starts an event loop; signals belong to the main thread.
            code, written = await asyncio.to_thread(shell, command, *arguments, database=url)

            assert code in (0, 1), (command, arguments, written)  # 1: there is nothing to show or to change
            assert SECRET not in written, (command, arguments)


@pytest.mark.parametrize("command", sorted(CALLS))
@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_no_command_shows_the_password_of_an_unreachable_database(shell: Shell, command: str, scheme: str) -> None:
    url = f"{scheme}://ada:{SECRET}@127.0.0.1:1/app"
    for arguments, verbose in itertools.product(CALLS[command], [(), ("--verbose",)]):
        code, written = shell(command, *arguments, *verbose, database=url)

        assert code == 3, (arguments, written)
        assert "127.0.0.1:1/app" in written or command == "health"  # a probe names the shard only
        assert SECRET not in written, (arguments, verbose)


async def test_the_dashboard_hides_the_password_of_an_unreachable_database(tmp_path: Path) -> None:
    url = f"postgresql://ada:{SECRET}@127.0.0.1:1/app"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOXIO_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outboxio.cli", "dashboard", url, "--namespace", "shop", "--port", "0"),
        env={**inherited, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        async with AsyncClient(base_url=line.split()[-1], timeout=60) as client:
            answers = [await client.get(path) for path in ("/", "/dead", "/shards", "/shards?format=json")]
    finally:
        process.terminate()
        output = (await process.stdout.read()).decode()
        await process.wait()

    assert "127.0.0.1:1/app" in answers[0].text
    assert SECRET not in line + output + "".join(answer.text for answer in answers)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "shop:URL"),
        ("status", "shop:shard"),
        ("status", "shop:urls"),
        ("status", "shop:raises", "--verbose"),
        ("status", "shop:raises", "--json"),
        ("status", "shop:raises_literally", "--verbose"),
        ("status", f"postgresql://ada:{SECRET}@host/app"),
        ("status", "shop:outbox", f"postgresql://ada:{SECRET}@host/app"),
        (f"postgresql://ada:{SECRET}@host/app",),
        ("worker", "shop:outbox", "--log-level", f"postgresql://ada:{SECRET}@host/app"),
        ("worker", "shop:outbox", "--drain", "--timeout", f"postgresql://ada:{SECRET}@host/app"),
        ("status", f"--databse=postgresql://ada:{SECRET}@host/app"),
        ("check", "--database", f"postgresql://ada:{SECRET}/x@host/app"),
        ("check", "--database", f"mysql://ada:{SECRET}?x@host/app"),
        ("check", "--database", f"mysql://ada:1?{SECRET}=x@host/app"),
        ("check", "--database", f"mysql://ada:1/{SECRET}@host/app"),
        ("check", "--database", f"mysql://ada:1#{SECRET}@host/app"),
        ("check", "--database", f"mysql://ada:1@2?{SECRET}/x@host/app"),
        ("check", "--database", f"postgresql://ada:1@2/{SECRET}@host/app"),
        ("check", "--database", f"sqlite://ada:{SECRET}@host/app.db"),
        ("check", "--database", f"oracle://ada:{SECRET}@host/app"),
        ("check", "--database", f"postgresql://127.0.0.1:1/app?user=ada&password={SECRET}"),
        ("check", "--database", f"postgresql://ada:{SECRET}@127.0.0.1:1/app?sslmode=sometimes"),
        ("check", "--database", f"postgresql://ada:{SECRET}@127.0.0.1:1/app?sslmode=verify-full&sslrootcert=/no/ca"),
        ("check", "--database", f"mysql://ada:{SECRET}@127.0.0.1:1/app?ssl_ca=/no/ca.pem"),
        ("check", "--database", f"mysql://ada:{SECRET}@127.0.0.1:1/app?charset=latin1"),
    ],
    ids=" ".join,
)
def test_mistyped_urls_are_refused_without_their_password(shell: Shell, arguments: tuple[str, ...]) -> None:
    code, written = shell(*arguments)

    assert code in (2, 3), written
    assert SECRET not in written, written


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb", "sqlite"])
@pytest.mark.parametrize(
    "password", ["1/{}", "1?{}", "1#{}", "1?{}=2", "{}/1", "{}#1", "{}?1", "1@2/{}", "{}[", "{} 1", "1:{}"]
)
async def test_an_unescaped_password_is_in_no_error(scheme: str, password: str) -> None:
    url = f"{scheme}://ada:{password.format(SECRET)}@127.0.0.1:1/app"
    with pytest.raises((ConfigurationError, DatabaseUnavailable)) as caught:
        async with Outbox(url, namespace="app") as outbox:
            await outbox.check()

    assert SECRET not in str(caught.value)


def test_objects_that_hold_a_url_hide_its_password(caplog: pytest.LogCaptureFixture) -> None:
    url = f"postgresql://ada:{SECRET}@host/app"
    outbox = Outbox({"one": Shard(url, direct_url=url)}, namespace="app")

    for value in (Shard(url), Shard(url, direct_url=url), outbox, outbox.executor, outbox.admin, outbox.inbox):
        assert SECRET not in repr(value) + str(value)
    assert repr(Shard(url)) == "Shard('postgresql://***@host/app')"
    for table in ({"database": url}, {"handling": {"poll_delay": url}}, {"databases": [url]}):
        with pytest.raises(SettingsError) as caught:
            Settings.load(table, environ=None)
        assert SECRET not in str(caught.value)


async def refused_by(outbox: Outbox) -> str:
    """The whole readable text of the error, whichever call comes first."""
    text = ""

    async def run() -> None:
        async with outbox.running():
            pass

    for way in (outbox.check, outbox.migrate, run, outbox.drain, outbox.admin.counts, outbox.admin.list):
        with pytest.raises(DatabaseUnavailable) as caught:
            await way()  # type: ignore[operator]
        text += "".join(traceback.format_exception(caught.value))
    return text


async def test_a_wrong_password_is_shown_nowhere(mysql_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with mysql.connected(mysql_url) as connection:
        await mysql.fetch(connection, "CREATE USER teller IDENTIFIED BY 'another'")
        try:
            wrong = urlsplit(mysql_url)._replace(
                netloc=f"teller:{SECRET}@{urlsplit(mysql_url).netloc.rpartition('@')[2]}"
            )
            async with Outbox(wrong.geturl(), namespace="app") as outbox:
                text = await refused_by(outbox)
        finally:
            await mysql.fetch(connection, "DROP USER teller")

    assert "teller" in text
    assert SECRET not in text + caplog.text


async def test_losing_the_database_while_running_logs_no_password(
    server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with with_password(server_url, SECRET) as url, Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
        journal = Journal()
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            acts = actions_on(server_url)

            async def is_noticed() -> bool:
                await acts.end(list(acts.outbox_sessions(outbox).values()))
                return any(record.levelno >= logging.WARNING for record in caplog.records)

            await eventually(is_noticed)
            await eventually(lambda: committed(outbox))
            await journal.calls(1)

    assert SECRET not in caplog.text


async def committed(outbox: Outbox) -> bool:
    """True if an event could be committed; the first attempts find the connections that were cut."""
    try:
        await outbox.executor.execute(Emit((1,)))
    except Exception:
        return False
    return True
