"""``outbox.health()`` on every database: reachability, the tables, the clock, an unreachable database."""

from __future__ import annotations

import pytest

from outboxio import Outbox
from outboxio.health import reader
from tests.kit.app import Look, eventually, opened
from tests.kit.inside import run_of

pytestmark = pytest.mark.with_tables


@pytest.fixture
def look(database_url: str) -> Look:
    return Look(database_url)


async def test_an_outbox_is_healthy_inside_and_outside_running(database_url: str) -> None:
    async with opened(Outbox(database_url, namespace="app")) as outbox:
        outside = await outbox.health()
        async with outbox.running():
            await eventually(lambda: run_of(outbox).locks.held)
            inside = await outbox.health()

    assert (outside.status, outside.live, outside.ready) == ("ok", True, False)
    assert (inside.status, inside.live, inside.ready, inside.reasons) == ("ok", True, True, ())
    shard = inside.shards["default"]
    assert (shard.reachable, shard.schema, shard.locks_held) == (True, "fits", ["app/fanout"])
    assert shard.clock_offset is not None
    assert abs(shard.clock_offset) < 60


@pytest.mark.with_tables(False)
async def test_missing_or_newer_tables_are_reported(
    database_url: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FRESH", 0.0)
    async with Outbox(database_url, namespace="app") as outbox:
        missing = await outbox.health()
        await outbox.migrate()
        well = await outbox.health()
        await look.fetch("INSERT INTO {schema_versions} VALUES (9999, '9999_later.sql', '2030-01-01 00:00:00')")
        monkeypatch.setattr(reader, "CHECKED_AGAIN", 0.0)
        newer = await outbox.health()

    assert [health.shards["default"].schema for health in (missing, well, newer)] == ["missing", "fits", "newer"]
    assert [health.status for health in (missing, well, newer)] == ["down", "ok", "down"]
    assert {health.shards["default"].reachable for health in (missing, well, newer)} == {True}


async def test_a_newer_migration_leaves_running_processes_in_service(
    database_url: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FRESH", 0.0)
    monkeypatch.setattr(reader, "CHECKED_AGAIN", 0.0)
    async with opened(Outbox(database_url, namespace="app")) as outbox, outbox.running():
        await look.fetch("INSERT INTO {schema_versions} VALUES (9999, '9999_later.sql', '2030-01-01 00:00:00')")
        health = await outbox.health()

    assert (health.status, health.ready, health.shards["default"].schema) == ("ok", True, "fits")


async def test_an_unreachable_server_is_reported_without_an_error() -> None:
    for url in ("postgresql://127.0.0.1:1/x", "mysql://127.0.0.1:1/x"):
        async with Outbox(url, namespace="app") as outbox:
            health = await outbox.health()

        assert (health.status, health.live, health.ready) == ("down", True, False)
        assert health.reasons[0] == "shard 'default' cannot be reached"
