"""Adoption of a database created by Ekbatan: handlers continue where they were, and unknown tables are refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from outboxio import Event, EventEnvelope, Outbox, SchemaNotAdoptable
from outboxio.support.clock import utc_now
from tests.contract.test_schema import run_with_the_databases_own_tool
from tests.kit.app import Look

pytestmark = pytest.mark.not_on("sqlite", why="the tables of Ekbatan have other names on SQLite")

ACTION = """
    id {id} NOT NULL, namespace VARCHAR(255) NOT NULL, action_id {id} NOT NULL, action_name VARCHAR(255) NOT NULL,
    action_params {json} NOT NULL, started_date {date} NOT NULL, completion_date {date} NOT NULL,
    model_id VARCHAR(255), model_type VARCHAR(255), payload {json}, event_date {date} NOT NULL
"""
TABLES = f"""
CREATE {{schema}} IF NOT EXISTS eventlog;
CREATE TABLE eventlog.events ({ACTION}, event_type VARCHAR(255), delivered BOOLEAN NOT NULL, PRIMARY KEY (id));
CREATE INDEX ix_events_undelivered ON eventlog.events (event_type, event_date);
CREATE INDEX ix_events_action_id ON eventlog.events (action_id);
CREATE TABLE eventlog.event_notifications ({ACTION}, event_type VARCHAR(255) NOT NULL, event_id {{id}} NOT NULL,
    handler_name VARCHAR(255) NOT NULL, state VARCHAR(24) NOT NULL, attempts INTEGER NOT NULL,
    next_retry_at {{date}} NOT NULL, created_date {{date}} NOT NULL, updated_date {{date}} NOT NULL, PRIMARY KEY (id),
    CONSTRAINT uq_event_notifications_event_handler UNIQUE (event_id, handler_name));
CREATE INDEX ix_event_notifications_due ON eventlog.event_notifications (state, next_retry_at);
"""
STATES = [(1, "PENDING", 0), (2, "FAILED", 2), (3, "SUCCEEDED", 1), (4, "EXPIRED", 7)]


class Counted(Event):
    number: int


def tables(look: Look) -> str:
    if look.dialect == "postgres":
        return TABLES.format(id="UUID", json="JSONB", date="TIMESTAMP", schema="SCHEMA")
    return TABLES.format(id="CHAR(36)", json="JSON", date="DATETIME(6)", schema="DATABASE")


def events(numbers: range, delivered: str) -> str:
    """An INSERT as Ekbatan writes it, with only its columns."""
    date = f"'{utc_now() - timedelta(hours=1)}'"
    rows = ", ".join(
        f"('{UUID(int=number)}', 'app', '{UUID(int=number)}', 'Count', '{{}}', {date}, {date}, '{number}', 'Counter', "
        f"'{{\"number\": {number}}}', {date}, 'Counted', {delivered})"
        for number in numbers
    )
    names = "id, namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type"
    return f"INSERT INTO eventlog.events ({names}, payload, event_date, event_type, delivered) VALUES {rows}"


def notification(number: int, state: str, attempts: int) -> str:
    return f"""
        INSERT INTO eventlog.event_notifications (id, namespace, action_id, action_name, action_params, started_date,
          completion_date, model_id, model_type, payload, event_date, event_type, event_id, handler_name, state,
          attempts, next_retry_at, created_date, updated_date)
        SELECT id, namespace, action_id, action_name, action_params, started_date, completion_date, model_id,
          model_type, payload, event_date, event_type, id, 'counter', '{state}', {attempts}, event_date, event_date,
          event_date
        FROM eventlog.events WHERE model_id = '{number}'"""


async def ekbatan(look: Look, url: str) -> None:
    """A database of Ekbatan in use: each state, and 2 events waiting for fan-out."""
    await run_with_the_databases_own_tool(url, tables(look))
    await look.fetch(events(range(1, 5), "TRUE"))
    await look.fetch(events(range(5, 7), "FALSE"))
    for number, state, attempts in STATES:
        await look.fetch(notification(number, state, attempts))


async def test_each_handler_continues_where_it_was(server_url: str) -> None:
    look = Look(server_url)
    await ekbatan(look, server_url)
    seen = dict[int, int]()
    async with Outbox(server_url, namespace="app") as outbox:

        @outbox.handler(Counted, name="counter")
        async def counter(envelope: EventEnvelope[Counted]) -> None:
            seen[envelope.event.number] = envelope.attempt

        would = await outbox.adopt(dry_run=True)
        assert len(would["default"]) > 4
        assert await outbox.adopt(dry_run=True) == would, "nothing has changed"
        assert await outbox.adopt() == would
        assert await outbox.adopt() == {"default": []}
        assert await outbox.migrate(contract=True) == {"default": []}
        await outbox.check()

        await look.fetch(events(range(7, 9), "FALSE"))  # a writer of Ekbatan continues
        await outbox.drain()

    assert seen == {1: 1, 2: 3, 5: 1, 6: 1, 7: 1, 8: 1}
    rows = await look.fetch("SELECT model_id, state, attempts FROM eventlog.event_notifications")
    found: dict[str, Any] = {row["model_id"]: (row["state"], row["attempts"]) for row in rows}
    assert (found["3"], found["4"]) == (("SUCCEEDED", 1), ("EXPIRED", 7))
    assert {found[number] for number in "15678"} == {("SUCCEEDED", 1)}


async def test_an_interrupted_adoption_continues(server_url: str) -> None:
    look = Look(server_url)
    if look.dialect == "postgres":
        return  # the adoption is a single transaction there
    await ekbatan(look, server_url)
    async with Outbox(server_url, namespace="app") as outbox:
        would = (await outbox.adopt(dry_run=True))["default"]
        await look.fetch(would[0])
        assert await outbox.adopt() == {"default": would[1:]}
        await outbox.check()


async def test_unknown_tables_are_refused_and_nothing_changes(server_url: str) -> None:
    look = Look(server_url)
    await ekbatan(look, server_url)
    await look.fetch("ALTER TABLE eventlog.events ADD COLUMN colour INT")
    async with Outbox(server_url, namespace="app") as outbox:
        with pytest.raises(
            SchemaNotAdoptable, match=r"events\.colour does not belong to Ekbatan; nothing was changed"
        ) as refused:
            await outbox.adopt()
    assert refused.value.flaws == ("the column events.colour does not belong to Ekbatan",)
    assert await look.value("SELECT count(*) FROM eventlog.event_notifications") == len(STATES)


async def test_a_database_without_tables_has_nothing_to_adopt(server_url: str) -> None:
    async with Outbox(server_url, namespace="app") as outbox:
        with pytest.raises(SchemaNotAdoptable, match="the table events is missing"):
            await outbox.adopt()
