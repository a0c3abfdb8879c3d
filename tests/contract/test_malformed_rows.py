"""A malformed row of ``event_notifications`` ends alone, with its error, and affects no other row."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest

from outboxio import Batch, Event, EventEnvelope, HandlerFailed, MalformedRow, Outbox
from outboxio.testing import MovableClock
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.probes import open_transactions
from tests.kit.storage import Store

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

_ZERO = "'0000-00-00 00:00:00'"
DAMAGE = {
    "postgres": {"retention_from": ("'infinity'", "'-infinity'", "'20000-01-01'")},
    "mysql": {"retention_from": (_ZERO,)},
    "mariadb": {"retention_from": (_ZERO,)},
    "sqlite": {
        "retention_from": ("'nonsense'", "''", "X'ff'"),
        "attempts": ("'many'", "X'00'"),
        "sequence": ("'first'",),
        "payload": ("X'7b7d'", "CAST(X'ff' AS TEXT)"),
        "headers": ("X'7b7d'",),
    },
}
CONTEXT_DAMAGE = {
    "postgres": ("started_date", "'infinity'"),
    "mysql": ("started_date", _ZERO),
    "mariadb": ("started_date", _ZERO),
    "sqlite": ("started_date", "'nonsense'"),
}
NULLABLE = {
    "postgres": "ALTER TABLE eventlog.event_notifications ALTER retention_from DROP NOT NULL",
    "mysql": "ALTER TABLE eventlog.event_notifications MODIFY retention_from DATETIME(6) NULL",
    "mariadb": "ALTER TABLE eventlog.event_notifications MODIFY retention_from DATETIME(6) NULL",
}


class Strict(Event, strict_priority=True):
    number: int


async def damage(look: Look, statement: str) -> None:
    """Write values that no correct program would write. MySQL accepts a zero timestamp only with a special setting."""
    if look.driver != "aiomysql":
        await look.fetch(statement)
        return
    async with mysql.connected(look.url, init_command="SET SESSION sql_mode = ''") as connection:
        await mysql.fetch(connection, look.named(statement))


async def insert_new(outbox: Outbox, look: Look, numbers: tuple[int, ...]) -> Store:
    """Notifications of this many events, for each handler, without a run so far."""
    await outbox.admin.counts()
    await outbox.drain()  # announces the handlers
    store = Store(outbox, look)
    await outbox.executor.execute(Emit(numbers))
    await store.fan_out()
    return store


async def rows(look: Look) -> dict[tuple[str, int], tuple[str, int]]:
    """State and attempts by handler and number, from columns that can always be read."""
    found = await look.fetch("SELECT handler_name, model_id, state, attempts FROM {event_notifications}")
    return {(row["handler_name"], int(row["model_id"])): (row["state"], row["attempts"]) for row in found}


async def errors_of(look: Look, handler: str, number: int) -> str:
    return str(
        await look.value(
            "SELECT errors FROM {event_notifications} WHERE handler_name = $1 AND model_id = $2", handler, str(number)
        )
    )


def cases(look: Look) -> list[tuple[str, str]]:
    return [(column, value) for column, values in DAMAGE[look.dialect].items() for value in values]


async def test_a_malformed_row_ends_alone_with_its_error(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    outbox.handler(MoneyDeposited, name="second")(second)
    damaged = cases(look)
    await insert_new(outbox, look, tuple(range(len(damaged) + 2)))
    for number, (column, value) in enumerate(damaged):
        of_first = f"handler_name = 'first' AND model_id = '{number}'"
        await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE {of_first}")

    drained = await outbox.drain()

    assert (drained.dead, drained.failed) == (len(damaged), 0)
    assert sorted(first.amounts) == [len(damaged), len(damaged) + 1]
    assert sorted(second.amounts) == list(range(len(damaged) + 2))
    for number, (column, value) in enumerate(damaged):
        ended = await errors_of(look, "first", number)
        assert "MalformedRow" in ended, (column, value)
        assert column in ended or "bytes that are not text" in ended, (column, value, ended)
    recorded = [record for record in caplog.records if "MalformedRow" in record.getMessage()]
    assert len(recorded) + sum(vars(record).get("outboxio_suppressed", 0) for record in recorded) == len(damaged)
    caplog.clear()
    assert (await outbox.drain()).dead == 0  # it is not retried
    of_machine = "outboxio.loops.blocked_loop"  # a machine that stops the process for a second adds a record
    assert [record for record in caplog.records if record.name != of_machine] == []


async def test_a_null_timestamp_ends_only_its_row(outbox: Outbox, look: Look) -> None:
    if look.is_file:
        return  # SQLite cannot drop NOT NULL
    first = Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await insert_new(outbox, look, (1, 2))
    await look.fetch(NULLABLE[look.dialect])
    await damage(look, "UPDATE {event_notifications} SET retention_from = NULL WHERE model_id = '1'")

    await outbox.drain()

    assert await rows(look) == {("first", 1): ("DEAD", 1), ("first", 2): ("SUCCEEDED", 1)}


async def test_a_corrected_and_retried_row_is_handled(outbox: Outbox, look: Look) -> None:
    first = Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await insert_new(outbox, look, (1,))
    column, value = cases(look)[0]
    assert column == "retention_from"  # a retry rewrites it
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value}")
    assert (await outbox.drain()).dead == 1

    row_id = await look.value("SELECT id FROM {event_notifications}")
    assert (await outbox.admin.retry([row_id])).done == 1

    assert (await outbox.drain()).succeeded == 1
    assert first.amounts == [1]


@pytest.mark.parametrize("batch", [None, Batch(size=10, max_wait=0)], ids=["one", "batch"])
async def test_a_handler_that_ignores_the_action_gets_rows_with_malformed_ones(
    outbox: Outbox, look: Look, batch: Batch | None
) -> None:
    called: list[Any] = []

    async def handler(given: Any) -> None:
        called.append(given)

    outbox.handler(MoneyDeposited, name="first", batch=batch)(handler)
    await insert_new(outbox, look, (1, 2))
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE model_id = '1'")

    assert (await outbox.drain()).succeeded == 2


async def test_a_failure_of_a_row_without_its_event_is_counted(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError("no")))
    await insert_new(outbox, look, (1,))
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value}")

    assert (await outbox.drain()).failed == 1

    assert await rows(look) == {("first", 1): ("FAILED", 1)}
    assert "of notification" in caplog.text


@pytest.mark.parametrize(
    "options", [{"ordered": True}, {"relay": True}, {"batch": Batch(size=2, schedule="* * * * *")}], ids=str
)
async def test_a_row_without_a_sequence_ends_and_others_keep_theirs(
    outbox: Outbox, look: Look, clock: MovableClock, options: dict[str, Any]
) -> None:
    called: list[Any] = []

    async def handler(given: Any) -> None:
        called.extend(given if isinstance(given, list) else [given])

    outbox.handler(MoneyDeposited, name="first", **options)(handler)
    await insert_new(outbox, look, (1, 2, 3))
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE model_id = '1'")

    await outbox.drain()
    clock.advance("2m")
    await outbox.drain()

    assert [int(envelope.event.amount) for envelope in called] == [2, 3]
    assert (await rows(look))["first", 1] == ("DEAD", 1)


async def test_a_strict_row_without_its_event_blocks_no_other(outbox: Outbox, look: Look) -> None:
    first, second = Journal(), Journal()
    outbox.handler(Strict, name="first", priority=1)(first)
    outbox.handler(Strict, name="second", priority=2)(second)
    await outbox.drain()  # announces the handlers
    async with outbox.transaction("Emit") as tx:
        for number in (1, 2):
            tx.emit(Strict(number), model_id=number)
    await Store(outbox, look).fan_out()
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE model_id = '1'")

    await outbox.drain()

    after = await rows(look)
    assert (after["first", 1], after["second", 1]) == (("DEAD", 1), ("DEAD", 1))
    assert (after["first", 2], after["second", 2]) == (("SUCCEEDED", 1), ("SUCCEEDED", 1))


async def test_hooks_are_called_for_malformed_rows_with_a_known_event(outbox: Outbox, look: Look) -> None:
    recorded: list[tuple[Any, str]] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        recorded.append((envelope.event_id is not None, error.type))

    first = Journal()
    outbox.handler(MoneyDeposited, name="first", on_dead=hook)(first)
    await insert_new(outbox, look, (1, 2))
    column, value = next((c, v) for c, v in cases(look) if "X'" not in v)
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE model_id = '1'")

    await outbox.drain()

    assert recorded == [(True, "MalformedRow")]
    assert await rows(look) == {("first", 1): ("DEAD", 1), ("first", 2): ("SUCCEEDED", 1)}


async def test_an_outcome_without_its_event_is_dead_without_its_hook(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    recorded: list[str] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        recorded.append(error.type)

    outbox.handler(MoneyDeposited, name="first", on_dead=hook, ordered=True)(Journal())
    await insert_new(outbox, look, (1,))
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{event_notifications}} SET state = 'DYING', {column} = {value}")

    assert (await outbox.drain()).dead == 1

    assert recorded == []
    assert await rows(look) == {("first", 1): ("DEAD", 0)}
    assert "the hook of handler 'first' did not run" in caplog.text


async def test_a_transactional_handler_of_a_malformed_row_leaves_nothing_open(outbox: Outbox, look: Look) -> None:
    first = Journal()
    outbox.handler(MoneyDeposited, name="first", delivery="transactional")(first)
    await insert_new(outbox, look, (1, 2))
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE model_id = '1'")

    await outbox.drain()

    assert await rows(look) == {("first", 1): ("FAILED", 1), ("first", 2): ("SUCCEEDED", 1)}
    assert await open_transactions(look.url) == []


async def test_a_row_in_an_unknown_state_affects_no_other(outbox: Outbox, look: Look) -> None:
    first = Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await insert_new(outbox, look, (1, 2))
    await damage(look, "UPDATE {event_notifications} SET state = 'PAUSED' WHERE model_id = '1'")

    assert (await outbox.drain()).succeeded == 1

    assert (await rows(look))["first", 1] == ("PAUSED", 0)
    assert (await outbox.admin.counts())["PAUSED"] == 1


ERRORS = ("'{}'", "'5'", "'\"x\"'", "'[1, null]'", '\'[{"verdict": "NONSENSE", "hook_of": 7}]\'')


@pytest.mark.parametrize("errors", ERRORS)
async def test_replaced_errors_do_not_prevent_an_outcome(
    outbox: Outbox, look: Look, clock: MovableClock, errors: str
) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError("no")))
    await insert_new(outbox, look, (1, 2))
    await damage(look, f"UPDATE {{event_notifications}} SET errors = {errors} WHERE model_id = '1'")

    assert (await outbox.drain()).failed == 2

    assert await rows(look) == {("first", 1): ("FAILED", 1), ("first", 2): ("FAILED", 1)}
    assert "ValueError" in await errors_of(look, "first", 1)


@pytest.mark.parametrize("errors", ERRORS)
async def test_a_replaced_outcome_is_dead_and_its_hook_is_called(outbox: Outbox, look: Look, errors: str) -> None:
    recorded: list[str] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        recorded.append(error.type)

    outbox.handler(MoneyDeposited, name="first", on_dead=hook)(Journal())
    await insert_new(outbox, look, (1,))
    await damage(look, f"UPDATE {{event_notifications}} SET errors = {errors}, state = 'DYING'")

    assert (await outbox.drain()).dead == 1
    assert recorded == ["unknown"]


async def test_a_row_with_a_malformed_id_is_skipped_and_logged_once(
    outbox: Outbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    if look.dialect in ("postgres", "mariadb"):
        return  # the column accepts only an id there
    first = Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await insert_new(outbox, look, (1, 2, 3))
    await damage(look, "UPDATE {event_notifications} SET id = 'no id' WHERE model_id = '1'")

    for _ in range(3):
        await outbox.drain()

    assert sorted(first.amounts) == [2, 3]
    assert (await rows(look))["first", 1] == ("PENDING", 0)
    recorded = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(recorded) == 1
    assert "no id" in recorded[0]


async def test_an_event_with_an_invalid_timestamp_blocks_no_other(outbox: Outbox, look: Look) -> None:
    first = Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await outbox.executor.execute(Emit((1, 2)))
    column, value = CONTEXT_DAMAGE[look.dialect]
    await damage(look, f"UPDATE {{events}} SET {column} = {value} WHERE model_id = '1'")

    assert (await outbox.drain()).succeeded == 2

    assert sorted(first.amounts) == [1, 2]


async def test_running_continues_beside_a_malformed_row(outbox: Outbox, look: Look, clock: MovableClock) -> None:
    first = Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await insert_new(outbox, look, (1, 2))
    column, value = cases(look)[0]
    await damage(look, f"UPDATE {{event_notifications}} SET {column} = {value} WHERE model_id = '1'")

    async with outbox.running():
        await first.calls(1)
        await outbox.executor.execute(Emit((3,)))
        await first.calls(2)

    assert sorted(first.amounts) == [2, 3]
    assert (await rows(look))["first", 1] == ("DEAD", 1)


def test_the_error_suggests_a_fix() -> None:
    recorded = str(MalformedRow(UUID(int=1), "retention_from: not a number"))

    assert "retention_from" in recorded
    assert "correct the row" in recorded
