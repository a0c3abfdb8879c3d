"""The figures of overview, health and metrics, on every database."""

from __future__ import annotations

from datetime import datetime

import pytest

from outboxio import Outbox
from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_DEFERRED
from outboxio.runs.deferral import deferred_until
from outboxio.storage.protocols.operating import Counted, DeadFigures, DueFigures, ParkedKey
from outboxio.storage.protocols.values import Waiting
from outboxio.storage.tables import probes as module
from outboxio.storage.tables.probes import Probes
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.marks import needs_partitions
from tests.kit.rows import EPOCH, EventRow, Row, at, insert

NOW = EPOCH
MANY = 1000
PENDING = Row()
DEAD = Row(state="DEAD")


@pytest.fixture
def probes(outbox: Outbox) -> Probes:
    probes: Probes = database_of(outbox).probes
    return probes


async def test_due_and_waiting_rows_are_counted_without_deferred_ones(probes: Probes, look: Look) -> None:
    await insert(look, [
        PENDING.but(next_retry_at=at(-5)), PENDING.but(next_retry_at=NOW, state="FAILED"),
        PENDING.but(next_retry_at=at(-3), state="DYING"), PENDING.but(next_retry_at=at(-9), state="BLOCKED"),
        PENDING.but(next_retry_at=at(-9), state="SUCCEEDED"), PENDING.but(next_retry_at=at(-9), state="DEAD"),
        PENDING.but(next_retry_at=at(-9), namespace="another"),
        PENDING.but(next_retry_at=at(1)), PENDING.but(next_retry_at=at(3600), state="FAILED"),
        PENDING.but(next_retry_at=FIRST_DEFERRED), PENDING.but(next_retry_at=datetime(9999, 12, 30, 5)),
        PENDING.but(handler_name="later", next_retry_at=at(1)),
        PENDING.but(handler_name="unrequested", next_retry_at=at(-1)),
    ])  # fmt: skip

    found = await probes.due("app", [Slot("ledger"), Slot("later"), Slot("nobody")], NOW, MANY)

    assert sorted(found, key=lambda figures: figures.handler_name) == [
        DueFigures("later", 0, 1, None), DueFigures("ledger", 3, 2, at(-5), retrying=1),
        DueFigures("nobody", 0, 0, None),
    ]  # fmt: skip
    assert await probes.due("app", [], NOW, MANY) == []


async def test_rows_of_newer_versions_are_counted_by_version(outbox: Outbox, look: Look) -> None:
    deferred = database_of(outbox).deferred
    second, third = deferred_until(2), deferred_until(3)
    await insert(look, [
        PENDING.but(next_retry_at=second), PENDING.but(next_retry_at=second, state="FAILED"),
        PENDING.but(next_retry_at=third), PENDING.but(next_retry_at=second, event_type="Other"),
        PENDING.but(handler_name="later", next_retry_at=third), PENDING.but(next_retry_at=at(3600)),
        PENDING.but(next_retry_at=second, state="SUCCEEDED"), PENDING.but(next_retry_at=second, namespace="another"),
        PENDING.but(handler_name="unrequested", next_retry_at=second),
    ])  # fmt: skip

    found = await deferred.count("app", [Slot("ledger"), Slot("later"), Slot("nobody")], MANY)

    assert sorted((one.handler_name, one.event_type, one.version, one.number) for one in found) == [
        ("later", PENDING.event_type, 3, 1), ("ledger", PENDING.event_type, 2, 2), ("ledger", PENDING.event_type, 3, 1),
        ("ledger", "Other", 2, 1),
    ]  # fmt: skip
    bounded = await deferred.count("app", [Slot("ledger")], 3)
    assert sum(one.number for one in bounded) == 3
    assert await deferred.count("app", [], MANY) == []


@needs_partitions
async def test_rows_of_newer_versions_are_counted_in_every_partition(outbox: Outbox, look: Look) -> None:
    await insert(
        look, [PENDING.but(next_retry_at=deferred_until(2), partition_number=number) for number in (0, 1, 1, 40)]
    )

    found = await database_of(outbox).deferred.count("app", [Slot("ledger", number) for number in range(41)], MANY)

    assert sum(one.number for one in found) == 4


async def test_no_count_exceeds_the_bound(probes: Probes, look: Look) -> None:
    await insert(look, [PENDING.but(next_retry_at=at(number)) for number in range(-9, 10)])
    await insert(look, [DEAD.but(updated_date=at(number)) for number in range(9)])
    await insert(look, [EventRow(delivered=False) for _ in range(9)])
    await insert(look, [PENDING.but(handler_name="ordered", state="BLOCKED", ordering_key="a") for _ in range(9)])

    assert await probes.due("app", [Slot("ledger")], NOW, 4) == [DueFigures("ledger", 4, 4, at(-9))]
    assert await probes.due("app", [Slot("ledger")], NOW, 20) == [DueFigures("ledger", 10, 9, at(-9))]
    assert await probes.dead("app", ["ledger"], at(2), 4) == [DeadFigures("ledger", 4, 4, at(8))]
    assert await probes.dead("app", ["ledger"], at(7), 4) == [DeadFigures("ledger", 4, 2, at(8))]
    assert await probes.undelivered("app", NOW, 4) == {"MoneyDeposited": Waiting(4, EPOCH)}
    assert await probes.blocked("app", ["ordered"], 4) == {"ordered": Counted(4, False)}
    assert await probes.blocked("app", ["ordered"], 10) == {"ordered": Counted(9, True)}


async def test_the_share_of_retries_is_estimated_among_many_later_rows(
    probes: Probes, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(look, [PENDING.but(next_retry_at=at(9), state="FAILED") for _ in range(8)])
    await insert(look, [PENDING.but(next_retry_at=at(99)) for _ in range(8)])
    assert await probes.due("app", [Slot("ledger")], NOW, MANY) == [DueFigures("ledger", 0, 16, None, retrying=8)]
    monkeypatch.setattr(module, "SAMPLED", 10)
    assert await probes.due("app", [Slot("ledger")], NOW, MANY) == [DueFigures("ledger", 0, 16, None, retrying=13)]
    assert await probes.due("app", [Slot("ledger")], NOW, 2**31 - 1) == [DueFigures("ledger", 0, 16, None, retrying=8)]


@needs_partitions
async def test_the_partitions_of_a_handler_are_counted_together(probes: Probes, look: Look) -> None:
    await insert(look, [
        PENDING.but(partition_number=number % 4, next_retry_at=at(number - 20)) for number in range(30)
    ])  # fmt: skip

    four = [Slot("ledger", partition) for partition in range(4)]
    assert await probes.due("app", four, NOW, MANY) == [DueFigures("ledger", 21, 9, at(-20))]
    assert await probes.due("app", four, NOW, 7) == [DueFigures("ledger", 7, 7, at(-20))]
    assert await probes.due("app", four[:2], NOW, MANY) == [DueFigures("ledger", 11, 5, at(-20))]


async def test_dead_and_expired_rows_are_counted_by_handler(probes: Probes, look: Look) -> None:
    await insert(look, [
        DEAD.but(updated_date=at(-90)), DEAD.but(updated_date=at(-60)), DEAD.but(updated_date=at(-30), state="EXPIRED"),
        DEAD.but(handler_name="old", updated_date=at(-99)), DEAD.but(handler_name="A'\\", updated_date=at(1)),
        DEAD.but(namespace="another", handler_name="other"), PENDING.but(handler_name="alive"),
        DEAD.but(state="SKIPPED", handler_name="skipped"),
    ])  # fmt: skip

    names = await probes.dead_names("app")

    assert sorted(names) == ["A'\\", "ledger", "old"]
    figures = await probes.dead("app", [*names, "nobody"], at(-60), MANY)
    assert {one.handler_name: one for one in figures} == {
        "A'\\": DeadFigures("A'\\", 1, 1, at(1)), "ledger": DeadFigures("ledger", 3, 2, at(-30)),
        "old": DeadFigures("old", 1, 0, at(-99)), "nobody": DeadFigures("nobody", 0, 0, None),
    }  # fmt: skip
    assert await probes.dead("app", [], at(-60), MANY) == []
    assert await probes.dead_names("nobody's") == []


async def test_names_of_many_handlers_are_found_by_index_skips(probes: Probes, look: Look) -> None:
    names = [f"handler-{number:03}" for number in range(150)]
    await insert(look, [DEAD.but(handler_name=name, updated_date=at(day)) for name in names for day in range(3)])
    await insert(look, [EventRow(event_type=f"T{number}", delivered=False) for number in range(150)])

    assert sorted(await probes.dead_names("app")) == names
    assert len(await probes.dead("app", names, at(1), MANY)) == 150
    assert len(await probes.undelivered("app", NOW, MANY)) == 150
    assert len(await probes.due("app", [Slot(name) for name in names], NOW, MANY)) == 150


async def test_blocked_rows_are_counted_with_and_without_an_ordering_key(probes: Probes, look: Look) -> None:
    blocked = Row(state="BLOCKED")
    await insert(look, [
        blocked.but(), blocked.but(ordering_key="a"), blocked.but(ordering_key="a"), blocked.but(ordering_key=""),
        PENDING.but(ordering_key="b"), PENDING.but(), blocked.but(namespace="another"), DEAD.but(ordering_key="a"),
    ])  # fmt: skip

    assert await probes.blocked("app", ["ledger", "nobody"], MANY) == {
        "ledger": Counted(4, True), "nobody": Counted(0, True),
    }  # fmt: skip


def queue(key: str, *states: str, name: str = "ledger") -> list[Row]:
    return [Row(handler_name=name, ordering_key=key, state=state, updated_date=at(index))
            for index, state in enumerate(states)]  # fmt: skip


async def test_a_key_is_parked_by_a_failed_row_before_blocked_ones(probes: Probes, look: Look) -> None:
    parked = {
        "dead": queue("dead", "DEAD", "BLOCKED", "BLOCKED"),
        "expired": queue("expired", "SUCCEEDED", "EXPIRED", "DEAD", "BLOCKED"),
        "": queue("", "DEAD", "BLOCKED"),
        "z'\\": queue("z'\\", "DEAD", "BLOCKED"),
    }
    not_parked = [
        *queue("no-waiting", "DEAD"),
        *queue("alive", "DEAD", "PENDING", "BLOCKED"),
        *queue("busy", "FAILED", "BLOCKED"),
        *queue("behind", "BLOCKED", "DEAD"), *queue("skipped", "SKIPPED", "BLOCKED"),
        *queue("other", "DEAD", "BLOCKED", name="unrequested"),
        *(row.but(namespace="another") for row in queue("foreign", "DEAD", "BLOCKED")),
    ]  # fmt: skip
    await insert(look, [row for rows in parked.values() for row in rows] + not_parked)

    found = {key.ordering_key: key for key in await probes.parked("app", [["ledger"], ["nobody"]], MANY)}

    def expected(key: str, index: int, blocked: int) -> ParkedKey:
        row = parked[key][index]
        return ParkedKey("ledger", key, row.id, row.event_id, row.updated_date, blocked)

    assert found == {
        "dead": expected("dead", 0, 2), "expired": expected("expired", 1, 1), "": expected("", 0, 1),
        "z'\\": expected("z'\\", 0, 1),
    }  # fmt: skip
    assert len(await probes.parked("app", [["ledger"]], 2)) == 2
    assert await probes.parked("app", [], MANY) == []


async def test_a_key_is_parked_by_a_former_name_of_its_handler(probes: Probes, look: Look) -> None:
    await insert(look, [*queue("a", "DEAD", name="former"), *queue("a", "BLOCKED", name="ledger")])

    [found] = await probes.parked("app", [["ledger", "former"]], MANY)
    assert (found.handler_name, found.ordering_key, found.blocked) == ("former", "a", 1)
    assert await probes.parked("app", [["ledger"], ["former"]], MANY) == []


async def test_parked_keys_are_found_among_many_keys(probes: Probes, look: Look) -> None:
    await insert(look, [row for number in range(300) for row in queue(f"{number:03}", "PENDING", "BLOCKED")])
    await insert(look, [row for number in range(300, 600) for row in queue(f"{number:03}", "DEAD")])
    wanted = [f"{number:03}" for number in range(600, 720)]
    await insert(look, [row for key in wanted for row in queue(key, "DEAD", "BLOCKED")])

    assert sorted(key.ordering_key for key in await probes.parked("app", [["ledger"]], MANY)) == wanted


async def test_undelivered_events_are_counted_by_type_with_the_oldest(probes: Probes, look: Look) -> None:
    await insert(look, [
        EventRow(event_type="A", event_date=at(-9), available_at=at(60), delivered=False),
        EventRow(event_type="A", event_date=at(-5), available_at=at(-1), delivered=False),
        EventRow(event_type="A", event_date=at(-2), delivered=False),
        EventRow(event_type="A", event_date=at(-99)),
        EventRow(event_type="B", event_date=at(-3), topic="money", delivered=False),
        EventRow(event_type="C", event_date=at(-3), available_at=at(1), delivered=False),
        EventRow(event_type=None, payload=None, delivered=False),
        EventRow(event_type="A", namespace="another", event_date=at(-99), delivered=False),
    ])  # fmt: skip

    assert await probes.undelivered("app", NOW, MANY) == {
        "A": Waiting(3, at(-1)), "B": Waiting(1, at(-3)), "C": Waiting(1, None),
    }  # fmt: skip
    assert await probes.undelivered("nobody's", NOW, MANY) == {}
