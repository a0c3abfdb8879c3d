"""A round trip of each extra, with the versions that are installed: ``.ci/lowest-versions`` installs the lowest.

``python -m tests.lowest.smoke`` prints a line for each check, and exits with 1 if a check failed. A database or
broker without an installed program is named and skipped. ``python -m tests.lowest.smoke sqlalchemy nats`` runs two of
the checks.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import outboxio
from outboxio import Event, EventEnvelope, Outbox
from tests.kit.app import eventually

Check = Callable[[Path], Awaitable[object]]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from outboxio.cli import main; main()"]
WITHIN = 120.0
"""Seconds for a check."""

CHECKS: dict[str, Check] = {}


class LeftOut(Exception):
    """A program is missing, which pip cannot install."""


class Placed(Event):
    number: int
    text: str = "é😀"


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


async def round_trip(outbox: Outbox, count: int = 3) -> None:
    """Migrate, record events, handle them in order and in a transaction, and read the state."""
    found: dict[str, list[int]] = {"plain": [], "ordered": [], "transactional": []}

    @outbox.handler(Placed, name="plain")
    async def plain(envelope: EventEnvelope[Placed]) -> None:
        found["plain"].append(envelope.event.number)

    @outbox.handler(Placed, name="ordered", ordered=True)
    async def ordered(envelope: EventEnvelope[Placed]) -> None:
        found["ordered"].append(envelope.event.number)

    @outbox.handler(Placed, name="transactional", delivery="transactional")
    async def transactional(envelope: EventEnvelope[Placed]) -> None:
        assert envelope.event.text == "é😀"
        found["transactional"].append(envelope.event.number)

    await outbox.migrate()
    await outbox.check()
    async with outbox.transaction("Place") as tx:
        for number in range(count):
            tx.emit(Placed(number), ordering_key="k", model_id=number)
    await outbox.inbox.receive(source="s", external_id="1", type="Placed", payload={"number": count})
    await outbox.drain()
    expected = list(range(count + 1))
    assert {name: sorted(numbers) for name, numbers in found.items()} == dict.fromkeys(found, expected), found
    assert [number for number in found["ordered"] if number < count] == expected[:count]
    assert (await outbox.admin.counts())["SUCCEEDED"] == 3 * (count + 1)


# --- without a server -------------------------------------------------------------------------------


@check
async def sqlite(home: Path) -> None:
    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:
        await round_trip(outbox)


@check
async def cron(home: Path) -> None:
    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:
        ran: list[object] = []

        @outbox.job("nightly", schedule="30 2 * * *", timezone="Europe/Berlin")
        async def nightly() -> None:
            """Has a next time."""

        @outbox.job("often", every=timedelta(seconds=1))
        async def often() -> None:
            ran.append(1)

        await outbox.migrate()
        async with outbox.running():
            await eventually(lambda: bool(ran), timeout=WITHIN)
        names = {job.name for job in await outbox.admin.jobs()}
        assert names == {"nightly", "often"}, names


APPLICATION = """
from outboxio import Event, EventEnvelope, Outbox

outbox = Outbox("sqlite:///{home}/a.db", namespace="app")

class Placed(Event):
    number: int

@outbox.handler(Placed, name="journal")
async def journal(envelope: EventEnvelope[Placed]) -> None:
    if envelope.event.number < 0:
        raise ValueError("negative")
"""


def application(home: Path) -> dict[str, Any]:
    (home / "smoke_app.py").write_text(textwrap.dedent(APPLICATION.format(home=home)))
    path = os.pathsep.join([str(home), str(ROOT)])
    return {"cwd": home, "env": {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}}


async def command(home: Path, *arguments: str) -> str:
    """The output of a command, which must succeed."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, **application(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, (
        f"outboxio {' '.join(arguments)} ended with {process.returncode}:\n{output.decode()}"
    )
    return output.decode()


@check
async def cli(home: Path) -> None:
    import msgspec

    target = "smoke_app:outbox"
    overview, of_migrate, _ = await asyncio.gather(
        command(home, "--help"), command(home, "migrate", "--help"), command(home, "migrate", target)
    )
    assert "migrate" in overview
    assert "--contract" in of_migrate
    assert "Your outbox" in of_migrate, "an argument has no description"
    await command(home, "emit", target, "Placed", '{"number": 1}')
    await command(home, "worker", target, "--drain", "--log-format", "json")
    status = msgspec.json.decode(await command(home, "status", target, "--json"))
    assert status, status
    shown = ("status", "list", "events", "handlers", "describe", "jobs")
    await asyncio.gather(*(command(home, name, target) for name in shown))


@check
async def dashboard(home: Path) -> None:
    import httpx

    from outboxio.dashboard import Access, Dashboard

    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:
        await round_trip(outbox)
        app = Dashboard(outbox, authorize=lambda request: Access("me", can={"retry"}))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://outbox.test") as client:
            for page in ("/", "/handlers", "/handlers/plain", "/events", "/notifications", "/jobs", "/operations"):
                await eventually(partial(shows, client, page), timeout=WITHIN)


async def shows(client: Any, page: str) -> bool:
    """False if a busy machine was too slow for the page (504)."""
    answer = await client.get(page)
    assert answer.status_code in (200, 504), (page, answer.status_code, answer.text[:300])
    return bool(answer.status_code == 200)


@check
async def dashboard_command(home: Path) -> None:
    """The command, which serves the dashboard with uvicorn."""
    import httpx

    await command(home, "migrate", "smoke_app:outbox")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = await asyncio.create_subprocess_exec(
        *COMMAND, "dashboard", "smoke_app:outbox", "--port", str(port),
        **application(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    answers: list[httpx.Response] = []

    async def is_served() -> bool:
        assert served.returncode is None, (await served.communicate())[0].decode()
        try:
            answers.append(await client.get(f"http://127.0.0.1:{port}/", follow_redirects=True))
        except httpx.TransportError:
            return False
        return True

    async with httpx.AsyncClient() as client:
        try:
            await eventually(is_served, timeout=WITHIN)
        finally:
            with suppress(ProcessLookupError):
                served.terminate()
            await served.communicate()
    assert answers[0].status_code == 200, answers[0].text[:300]


@check
async def prometheus(home: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from outboxio.integrations.prometheus import OutboxCollector, metrics_text

    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:
        await round_trip(outbox)
        registry = CollectorRegistry()
        registry.register(OutboxCollector(outbox))
        for text in (generate_latest(registry), metrics_text(outbox)):
            assert b"outboxio_" in text


@check
async def opentelemetry(home: Path) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outboxio.integrations.opentelemetry import OpenTelemetry

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = OpenTelemetry(provider)
    async with Outbox(f"sqlite:///{home}/a.db", namespace="app", telemetry=telemetry) as outbox:
        await round_trip(outbox)
    assert len(exporter.get_finished_spans()) >= 9


@check
async def sentry(home: Path) -> None:
    import sentry_sdk

    from outboxio import RetryPolicy
    from outboxio.integrations.sentry import OutboxIntegration

    issues: list[Any] = []

    def keep(event: Any, hint: Any) -> None:
        issues.append(event)

    sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", before_send=keep, integrations=[OutboxIntegration()])
    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:

        @outbox.handler(Placed, name="fails", retry=RetryPolicy(max_attempts=1))
        async def fails(envelope: EventEnvelope[Placed]) -> None:
            raise ValueError("dead")

        await outbox.migrate()
        async with outbox.transaction("Place") as tx:
            tx.emit(Placed(1))
        await outbox.drain()
    assert issues, "no issue for a notification that is DEAD"
    sentry_sdk.init()


@check
async def pydantic(home: Path) -> None:
    from pydantic import BaseModel

    @outboxio.event("shipped")
    class Shipped(BaseModel):
        number: int
        tags: list[str] = []

    await of_kind(home, Shipped)


@check
async def attrs(home: Path) -> None:
    import attrs as attrs_module

    @outboxio.event("shipped")
    @attrs_module.frozen
    class Shipped:
        number: int
        tags: list[str] = attrs_module.field(factory=list)

    await of_kind(home, Shipped)


async def of_kind(home: Path, kind: Any) -> None:
    handled: list[Any] = []
    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:

        async def handle(envelope: Any) -> None:
            handled.append(envelope.event)

        outbox.handler(kind, name="journal")(handle)
        await outbox.migrate()
        async with outbox.transaction("Ship") as tx:
            tx.emit(kind(number=7, tags=["a"]))
        await outbox.drain()
    assert handled == [kind(number=7, tags=["a"])], handled


@check
async def alembic(home: Path) -> None:
    from alembic import command as alembic_command

    from outboxio.integrations.alembic import write_revision
    from tests.kit.alembic_project import project

    for template in ("generic", "async"):
        (home / template).mkdir()
        url = f"sqlite:///{home}/{template}.db"
        with redirect_stdout(io.StringIO()):
            config = project(home / template, url, template=template)
            assert write_revision(config) is not None
        await asyncio.to_thread(alembic_command.upgrade, config, "head")
        async with Outbox(url, namespace="app") as outbox:
            await outbox.check()
            assert await outbox.migrate() == {"default": []}


@check
async def sqlalchemy(home: Path) -> None:
    await of_engine(f"sqlite+aiosqlite:///{home}/a.db")


async def of_engine(url: str) -> None:
    """An outbox on an engine: its transactions, a mapped object that raises an event, and a session of its own."""
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    from tests.kit.orm import Base, Noted, Order

    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with Outbox(engine, namespace="app") as outbox:
            await round_trip(outbox)
            texts: list[str] = []

            @outbox.handler(Noted, name="noted")
            async def noted(envelope: EventEnvelope[Noted]) -> None:
                texts.append(envelope.event.text)

            async with outbox.transaction("Add") as tx:
                tx.session.add(Order(id=1))
                tx.emit(Noted("session of the transaction"))
            async with async_sessionmaker(engine)() as session:
                outbox.bind(session)
                order = Order(id=2)
                session.add(order)
                order.note("object")
                await session.commit()
            await outbox.drain()
            assert sorted(texts) == ["object", "session of the transaction"], texts
    finally:
        await engine.dispose()


@check
async def fastapi(home: Path) -> None:
    import httpx
    from fastapi import FastAPI

    from outboxio.health.pages import health_app

    async with Outbox(f"sqlite:///{home}/a.db", namespace="app") as outbox:
        await outbox.migrate()
        app = FastAPI()
        app.mount("/health", health_app(outbox))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            assert (await client.get("/health/live")).status_code in (200, 503)


# --- databases --------------------------------------------------------------------------------------


@asynccontextmanager
async def a_server(like: str) -> AsyncIterator[str]:
    from tests.kit.private_servers import private_server

    context = private_server(like)
    server = await asyncio.to_thread(or_left_out, context.__enter__)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def or_left_out(start: Callable[[], Any]) -> Any:
    import pytest

    try:
        return start()
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        raise LeftOut(str(missing)) from None


@check
async def postgres(home: Path) -> None:
    import asyncpg

    async with a_server("postgresql://") as url:
        async with Outbox(url, namespace="url") as outbox:
            await round_trip(outbox)
        async with asyncpg.create_pool(url, min_size=0, max_size=8) as pool, Outbox(pool, namespace="pool") as outbox:
            await round_trip(outbox)
        await of_engine(url.replace("postgresql:", "postgresql+asyncpg:"))


@check
async def psycopg(home: Path) -> None:
    async with a_server("postgresql://") as url:
        url = url.replace("postgresql:", "postgresql+psycopg:")
        async with Outbox(url, namespace="url") as outbox:
            await round_trip(outbox)
        await of_engine(url)


async def of_mysql(scheme: str) -> None:
    import aiomysql

    from tests.kit import mysql as kit

    async with a_server(f"{scheme}://root@127.0.0.1/x") as url:
        async with Outbox(url, namespace="url") as outbox:
            await round_trip(outbox)
        async with (
            aiomysql.create_pool(**kit.address(url), minsize=0, maxsize=12) as pool,
            Outbox(pool, namespace="pool") as outbox,
        ):
            await round_trip(outbox)
        await of_engine(url.replace(f"{scheme}:", f"{scheme}+aiomysql:"))


@check
async def mysql(home: Path) -> None:
    await of_mysql("mysql")


@check
async def mariadb(home: Path) -> None:
    await of_mysql("mariadb")


# --- brokers ----------------------------------------------------------------------------------------


class Counted(Event):
    number: int


async def through(name: str, home: Path) -> None:
    """An event goes from one outbox through the broker into another."""
    from tests.kit.broker_kinds import KINDS

    broker = await asyncio.to_thread(or_left_out, lambda: KINDS[name](home))
    await asyncio.to_thread(or_left_out, broker.start)
    try:
        await broker.prepare()
        received: list[int] = []
        relay = broker.relay(broker.url)
        async with (
            Outbox(f"sqlite:///{home}/from.db", namespace="from") as sender,
            Outbox(f"sqlite:///{home}/to.db", namespace="to") as receiver,
        ):
            sender.add_handler(relay)

            @receiver.handler(Counted, name="journal")
            async def journal(envelope: EventEnvelope[Counted]) -> None:
                received.append(envelope.event.number)

            await sender.migrate()
            await receiver.migrate()
            inbox = broker.inbox(receiver, broker.url)
            async with sender.transaction("Count") as tx:
                for number in range(3):
                    tx.emit(Counted(number), ordering_key="k")
            async with sender.running(), receiver.running(), inbox.running():
                await eventually(lambda: len(received) >= 3, timeout=WITHIN)
        assert sorted(received) == [0, 1, 2], received
    finally:
        await asyncio.to_thread(broker.stop)


@check
async def nats(home: Path) -> None:
    await through("nats", home)


@check
async def rabbitmq(home: Path) -> None:
    await through("rabbitmq", home)


@check
async def redis(home: Path) -> None:
    await through("redis", home)


@check
async def kafka(home: Path) -> None:
    await through("kafka", home)


# --- all --------------------------------------------------------------------------------------------


async def run(name: str) -> tuple[str, bool]:
    """The line of a check, and True if it did not fail."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outboxio-smoke-") as home:
        try:
            async with asyncio.timeout(WITHIN):
                await CHECKS[name](Path(home))
        except LeftOut as missing:
            return f"left out  {name}: {missing}", "OUTBOXIO_TEST_REQUIRE" not in os.environ
        except Exception:
            return f"FAILED    {name}\n{traceback.format_exc()}", False
    return f"ok        {name} ({time.monotonic() - began:.1f} s)", True


async def main(names: list[str]) -> int:
    if unknown := set(names) - CHECKS.keys():
        sys.exit(f"unknown check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    # Servers start in threads and wait more than they compute, so the checks run at the same time.
    turns = asyncio.Semaphore(4)

    async def one(name: str) -> bool:
        async with turns:
            line, is_well = await run(name)
        print(line, flush=True)
        return is_well

    return 0 if all(await asyncio.gather(*map(one, names or CHECKS))) else 1


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.exit(asyncio.run(main(sys.argv[1:])))
