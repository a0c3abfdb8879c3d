"""Alerts and advice about partitions: unowned partitions, too many locks, unintended concurrency limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from outboxio import Outbox
from outboxio.cli.commands import schema
from outboxio.model.lock_name import Slot
from outboxio.operations.partitions import upkeep
from outboxio.operations.partitions.upkeep import UnownedWatch, advice_on_partitions
from outboxio.testing import MovableClock
from tests.kit.app import Journal, Look, MoneyDeposited
from tests.kit.inside import clock_of, database_of, handlers_of, shard_of
from tests.kit.storage import Store

pytestmark = pytest.mark.with_tables


def watch_of(outbox: Outbox) -> UnownedWatch:
    return UnownedWatch("app", database_of(outbox), clock_of(outbox))


def alarms(caplog: pytest.LogCaptureFixture) -> list[tuple[object, object]]:
    """The handler and partition of each alarm."""
    found = [vars(record) for record in caplog.records if vars(record).get("outboxio_alarm") == "partition_unowned"]
    assert all(one["levelno"] == logging.ERROR for one in found)
    return [(one["outboxio_handler"], one["outboxio_partition"]) for one in found]


# --- partitions without an owner -----------------------------------------------------------------


async def test_an_unowned_partition_raises_an_alarm_only_with_due_rows(
    outbox: Outbox, look: Look, clock: MovableClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "QUERY_INTERVAL", 0.0)
    store, watch = Store(outbox, look), watch_of(outbox)
    await store.subscribe("score")
    slots = [Slot("score", 0), Slot("rating", 0)]

    await watch.check(slots)
    assert alarms(caplog) == []

    await store.insert_notifications("a", "b")
    await watch.check(slots)
    await watch.check(slots)
    assert alarms(caplog) == [("score", 0)]
    assert "partition 0 of handler 'score' has due notifications" in caplog.text
    assert "restart the processes that have the handler" in caplog.text


async def test_the_alarm_is_repeated_after_the_partition_had_an_owner(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "QUERY_INTERVAL", 0.0)
    monkeypatch.setattr(upkeep, "REPORT_AFTER", 0.0)  # every slot had an owner since the last call
    store, watch = Store(outbox, look), watch_of(outbox)
    await store.subscribe("score")
    await store.insert_notifications("a")

    for _ in range(2):
        await watch.check([Slot("score", 0)])

    assert alarms(caplog) == [("score", 0)] * 2


async def test_the_database_is_not_queried_in_every_round(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "QUERY_INTERVAL", 3600.0)
    store, watch = Store(outbox, look), watch_of(outbox)
    await store.subscribe("score")
    await watch.check([Slot("score", 0)])
    await store.insert_notifications("a")

    await watch.check([Slot("score", 0)])

    assert alarms(caplog) == []


# --- advice --------------------------------------------------------------------------------------


@pytest.fixture
async def server(server_url: str) -> AsyncIterator[Outbox]:
    async with Outbox(server_url, namespace="app") as outbox:
        await outbox.migrate()
        yield outbox


async def advice_for(outbox: Outbox) -> list[str]:
    return await advice_on_partitions(database_of(outbox), "app", handlers_of(outbox))


async def lacking_locks(outbox: Outbox) -> dict[str, bool]:
    facts = await shard_of(outbox).collector().collect()
    return {handler.name: handler.lacks_locks for handler in facts.handlers}


async def test_partitions_using_over_a_quarter_of_the_locks_are_reported(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        room = await database_of(outbox).lock_capacity()
        assert room >= 640
        for number in range(room // 4 // 64):
            outbox.handler(MoneyDeposited, name=f"handler-{number}", partitions=64)(Journal())
        before = await advice_for(outbox)
        for number in range(2):
            outbox.handler(MoneyDeposited, name=f"more-{number}", partitions=64)(Journal())
        [sentence] = await advice_for(outbox)

    assert before == [] or room % 256 == 0
    assert f"the server has a capacity of {room:,}" in sentence
    assert "raise max_locks_per_transaction" in sentence


async def test_partitions_set_by_an_operator_count_too(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="score", aliases={"rating"})(Journal())
        monkeypatch.setattr(database_of(outbox), "lock_capacity", _room_for_100)
        assert await advice_for(outbox) == []

        await outbox.admin.partitions("score", 16)

        [sentence] = await advice_for(outbox)
        assert "need 33 locks" in sentence  # 16 under each name, and fan-out


async def test_automatic_partitions_that_exhaust_their_locks_are_reported(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="score")(Journal())
        async with outbox.running():
            pass  # the handler is announced
        monkeypatch.setattr(database_of(outbox), "lock_capacity", _room_for_100)
        await outbox.admin.partitions("score", 8)
        assert await advice_for(outbox) == []

        await outbox.admin.partitions("score", "auto")

        [sentence] = await advice_for(outbox)
        assert sentence.startswith("automatic partitions use 8 of the server's 100 locks")
        assert await lacking_locks(outbox) == {"score": True}
        await outbox.admin.partitions("score", 8)
        assert await lacking_locks(outbox) == {"score": False}


async def _room_for_100() -> int:
    return 100


async def test_a_concurrency_meant_for_the_cluster_is_reported(server: Outbox) -> None:
    server.handler(MoneyDeposited, name="bank", partitions=16, concurrency=4)(Journal())
    server.handler(MoneyDeposited, name="known", partitions=2, concurrency=1, total_concurrency=2)(Journal())
    server.handler(MoneyDeposited, name="large", partitions=8, concurrency=100)(Journal())
    server.handler(MoneyDeposited, name="single", concurrency=1)(Journal())

    [sentence] = await advice_for(server)

    assert sentence.startswith("handler 'bank' has concurrency=4 and partitions=16: each process runs up to 4 at once")
    assert "up to 64 in 16 processes" in sentence
    assert "total_concurrency" in sentence


async def test_a_per_process_concurrency_of_a_shared_handler_is_reported(server: Outbox) -> None:
    server.handler(MoneyDeposited, name="bank", concurrency=20)(Journal())
    server.handler(MoneyDeposited, name="known", concurrency=20, total_concurrency=20)(Journal())
    server.handler(MoneyDeposited, name="whole", concurrency=20, partitions=20)(Journal())
    server.handler(MoneyDeposited, name="single", concurrency=1)(Journal())
    server.handler(MoneyDeposited, name="free")(Journal())

    [sentence] = await advice_for(server)

    assert sentence.startswith("handler 'bank' has concurrency=20: if it has a backlog, outboxio shares it")
    assert "to keep the handler in one process use partitions=1" in sentence


async def test_a_database_with_a_single_writer_needs_no_advice(sqlite_url: str) -> None:
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="bank", partitions=16, concurrency=4)(Journal())

        assert await advice_for(outbox) == []


async def test_check_prints_the_advice_and_still_succeeds(server: Outbox, capsys: pytest.CaptureFixture[str]) -> None:
    server.handler(MoneyDeposited, name="bank", partitions=16, concurrency=4)(Journal())

    assert await schema.check(server, as_json=False) == 0

    output = capsys.readouterr().out
    assert "ok  default: reachable" in output
    assert "WARN  default: handler 'bank' has concurrency=4 and partitions=16" in output
