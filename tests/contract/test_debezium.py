"""Debezium reads the same table as a relay with ``format="debezium"``, and sends the same messages."""

from __future__ import annotations

import asyncio
import json
import re
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from outboxio import Action, EventEnvelope, Outbox, Transaction
from outboxio.integrations.brokers import Wire, message_of, wire_format
from tests.kit.app import MoneyDeposited, eventually
from tests.kit.debezium import debezium, needs_debezium, python_with_debezium
from tests.kit.private_servers import private_postgres

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "change-data-capture.md"
EVENTS = 1000


class Deposit(Action):
    """Emits deposits, or nothing."""

    keys: list[str]

    async def perform(self, tx: Transaction) -> None:
        for key in self.keys:
            tx.emit(MoneyDeposited(uuid4(), Decimal(7)), model_id=key, model_type="Wallet")


def fenced(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None, f"{PAGE} has no block of {language}"
    return found[1]


def documented(url: str, offsets: Path) -> dict[str, str]:
    """The settings on the page, with the server's address and a file for the position."""
    lines = [line for line in fenced("properties").splitlines() if "=" in line and not line.startswith("#")]
    settings = {name.strip(): value.strip() for name, value in (line.split("=", 1) for line in lines)}
    address = re.fullmatch(r"postgresql://(\w+)@([\d.]+):(\d+)/(\w+)", url)
    assert address is not None
    user, host, port, database = address.groups()
    return {
        **settings,
        "name": "outbox",
        "database.user": user,
        "database.hostname": host,
        "database.port": port,
        "database.dbname": database,
        "database.password": "",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(offsets),
        "offset.flush.interval.ms": "1000",
    }


@needs_debezium
@pytest.mark.not_on("sqlite", "mysql", "mariadb", why="the publication with a row filter is PostgreSQL's")
async def test_debezium_reads_own_events_only_while_handlers_drain(
    database_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("debezium")
    python = await asyncio.to_thread(python_with_debezium, folder)
    with private_postgres() as server:
        connection = await asyncpg.connect(server.url)
        await connection.execute("ALTER SYSTEM SET wal_level = 'logical'")
        await connection.close()
        server.stop()
        server.start()
        async with Outbox(server.url, namespace="app") as outbox:
            await outbox.migrate()
            sent: dict[str, tuple[str, Wire]] = {}
            encode = wire_format("debezium", prefix="ce_")

            @outbox.handler(MoneyDeposited, name="watch")
            async def watch(envelope: EventEnvelope[MoneyDeposited]) -> None:
                if envelope.source is None:
                    message = message_of(envelope)
                    sent[message.id] = (message.key, encode(message))

            connection = await asyncpg.connect(server.url)
            await connection.execute(fenced("sql"))
            properties = documented(server.url, tmp_path / "offsets")
            async with debezium(python, properties, tmp_path / "engine.log") as engine, outbox.running():
                await eventually(lambda: connection.fetchval("SELECT bool_or(active) FROM pg_replication_slots"), 120)
                for number in range(EVENTS // 10):
                    await outbox.executor.execute(Deposit([f"w{i}" for i in range(10)]), correlation_id=f"c{number}")
                    await outbox.executor.execute(Deposit([]))  # writes a sentinel
                    await outbox.inbox.receive(
                        source="bank", external_id=f"m{number}", event=MoneyDeposited(uuid4(), Decimal(1))
                    )
                await engine.until(EVENTS)
                await outbox.drain()
                await outbox.executor.execute(Deposit(["last"]))
                await engine.until(EVENTS + 1)
                await eventually(lambda: len(sent) == EVENTS + 1)
                records = engine.records
            await connection.close()
    assert len(records) == EVENTS + 1
    for record in records:
        key, wire = sent.pop(record["headers"]["id"])
        assert record["topic"] == wire.destination == "outbox.event.Wallet"
        assert record["key"] == key
        headers = {name for name in record["headers"] if not name.startswith("__debezium.")}
        assert headers - {"sequence"} == wire.headers.keys()
        assert {name: record["headers"][name] for name in wire.headers} == wire.headers
        assert json.loads(record["value"]) == json.loads(wire.body)
    assert not sent
    assert "Unexpected update" not in engine.log  # an update of `delivered` was not even decoded
