"""Redacted values appear in no stored error, log record or result, on every database."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from outboxio import (
    Action,
    Batch,
    EventEnvelope,
    HandlerFailed,
    Outbox,
    Retry,
    RetryPolicy,
    Transaction,
    Unprocessable,
)
from outboxio.storage.protocols import InstanceReport
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.inside import database_of
from tests.kit.rows import EPOCH

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

TOKEN = "tok_live_4242"


def hide_tokens(text: str) -> str:
    return re.sub(r"tok_\w+", "(token)", text)


def broken(text: str) -> str:
    raise RuntimeError(f"cannot redact {text}")


def refused(envelope: EventEnvelope[Any]) -> BaseException:
    try:
        raise KeyError(TOKEN)
    except KeyError as cause:
        error = Unprocessable(f"{TOKEN} is refused")
        error.__cause__ = cause
        return error


async def everything_stored(look: Look) -> str:
    """All texts in the notifications, except for the event's own data."""
    rows = await look.notifications()
    return "\n".join(str(value) for row in rows for column, value in row.items() if column != "payload")


@pytest.mark.parametrize("redact", [hide_tokens, broken], ids=["which works", "which is broken"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delivery": "transactional"},
        {"delivery": "at_most_once"},
        {"retry": RetryPolicy(max_attempts=1)},
        {"retry": lambda attempts, error: 1 / 0},
        {"ordered": True},
    ],
    ids=str,
)
async def test_stored_errors_are_redacted_in_every_delivery_mode(
    make_outbox: MakeOutbox, look: Look, caplog: pytest.LogCaptureFixture, redact: Any, options: dict[str, Any]
) -> None:
    outbox = await make_outbox(redact=redact)
    error: Callable[[Any], BaseException] = (lambda envelope: ValueError(TOKEN)) if "retry" in options else refused
    outbox.handler(MoneyDeposited, name="first", **options)(Journal(error))
    await outbox.executor.execute(Emit((1,)))

    done = await outbox.drain()

    assert done.dead + done.failed == 1  # a broken function loses the text, never the outcome
    assert TOKEN not in await everything_stored(look)
    assert TOKEN not in caplog.text
    [row] = await look.notifications()
    [entry] = json.loads(row["errors"]) if isinstance(row["errors"], str) else row["errors"]
    assert ("(token)" in entry["message"]) is (redact is hide_tokens)
    assert ("redact failed with RuntimeError" in entry["message"]) is (redact is broken)


async def test_a_batch_and_its_split_calls_are_redacted(
    make_outbox: MakeOutbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = await make_outbox(redact=hide_tokens)

    @outbox.handler(MoneyDeposited, name="first", batch=Batch(size=10, max_wait=0))
    async def first(envelopes: list[EventEnvelope[MoneyDeposited]]) -> Any:
        if any(envelope.event.amount == 1 for envelope in envelopes):
            raise ValueError(TOKEN)
        return [(envelope, ValueError(TOKEN)) for envelope in envelopes if envelope.event.amount == 2]

    await outbox.executor.execute(Emit((1, 2, 3)))
    with caplog.at_level(logging.DEBUG):
        done = await outbox.drain()

    assert (done.failed, done.succeeded) == (2, 1)
    assert "halves" in caplog.text
    assert TOKEN not in await everything_stored(look) + caplog.text


async def test_hooks_get_stored_errors_and_their_own_are_redacted(
    make_outbox: MakeOutbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    hook_errors: list[HandlerFailed] = []

    async def on_dead(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        hook_errors.append(error)
        raise ConnectionError(f"cannot mail about {TOKEN}")

    outbox = await make_outbox(redact=hide_tokens, on_dead=on_dead)
    outbox.handler(MoneyDeposited, name="first")(Journal(refused))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    assert [error.message for error in hook_errors] == ["(token) is refused"]
    assert await look.states() == {"DYING": 1}
    stored = await everything_stored(look)
    assert "cannot mail about (token)" in stored
    assert TOKEN not in stored + caplog.text


async def test_failures_stored_by_consume_are_redacted(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(redact=hide_tokens)
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError(TOKEN)))
    event = MoneyDeposited(uuid4(), Decimal(1))

    result = await outbox.inbox.consume(source="billing", external_id="7", event=event, on_error="store")

    assert str(result.failed["first"]) == TOKEN  # the error of the caller's handler, unchanged
    assert "(token)" in await everything_stored(look)
    assert TOKEN not in await everything_stored(look)


async def test_operators_see_redacted_data_and_handlers_see_everything(make_outbox: MakeOutbox, look: Look) -> None:
    before = await make_outbox()
    journal = Journal(lambda envelope: ValueError(TOKEN))
    before.handler(MoneyDeposited, name="first")(journal)
    async with before.transaction("Pay", {"token": TOKEN}, headers={"authorization": TOKEN}) as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
    await before.drain()
    outbox = await make_outbox(redact=hide_tokens)

    [record] = await outbox.admin.list()

    assert [record] == list(await outbox.admin.inspect(record.id))
    assert (record.action_params, record.headers) == ({"token": "(token)"}, {"authorization": "(token)"})
    assert record.errors[0]["message"] == "(token)"
    assert TOKEN not in str(record)
    assert TOKEN in str(await before.admin.list())
    [envelope] = journal.envelopes
    assert (envelope.action_params, envelope.headers) == ({"token": TOKEN}, {"authorization": TOKEN})


async def test_old_errors_of_jobs_and_operations_are_shown_redacted(make_outbox: MakeOutbox, look: Look) -> None:
    before, outbox = await make_outbox(), await make_outbox(redact=hide_tokens)
    now = EPOCH
    text = now.isoformat(" ", "microseconds")
    await look.fetch(f"""
        INSERT INTO {look.table("jobs")} (namespace, job_name, schedule, state, next_date, due_date, term, attempts,
          lease, lease_term, instance, finished_date, result, error, succeeded, failed, missed)
        VALUES ('app', 'nightly', '', 'WAITING', '2031-01-01 00:00:00.000000', '2031-01-01 00:00:00.000000', 1, 1, '',
          0, '', '{text}', 'FAILED', 'ValueError: {TOKEN}', 0, 1, 0)""")
    await look.fetch(f"""
        INSERT INTO {look.table("operations")} (id, namespace, kind, state, request, actor, origin, matched, done,
          refused, worker, stop_ordered, created_date, updated_date, error)
        VALUES ('{uuid4()}', 'app', 'purge', 'FAILED', '{{}}', 'ada', 'code', 0, 0, 0, 'me', FALSE, '{text}', '{text}',
          'ValueError: {TOKEN}')""")
    rest = {"since": now.isoformat(), "reason": TOKEN}
    report = InstanceReport(
        instance="me", version="1", started_date=now, last_seen_date=now, delay_seconds=30,
        report=msgspec.Raw(msgspec.json.encode({"handlers": {"first": {"rest": rest}}})),
    )  # fmt: skip
    await database_of(before).reports.write_report("app", report)

    async def shown(outbox: Outbox) -> str:
        operations = await outbox.admin.operations()
        found = [await outbox.admin.jobs(), operations, await outbox.admin.operation(operations[0].id)]
        assert str(found).count("ValueError") == 3
        overview = await outbox.admin.overview()
        assert {"job_failing", "operation_failed", "circuit_open"} <= {one.rule for one in overview.findings}
        return f"{found} {overview}"

    assert TOKEN in await shown(before)
    assert TOKEN not in await shown(outbox)


async def test_the_error_of_a_retried_action_is_redacted(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    class Pay(Action):
        async def perform(self, tx: Transaction) -> None:
            raise ConnectionError(TOKEN)

    outbox = await make_outbox(redact=hide_tokens)
    with caplog.at_level(logging.INFO), pytest.raises(ConnectionError, match=TOKEN):
        await outbox.executor.execute(Pay(), retry=Retry(on=ConnectionError, attempts=2, delay=0))

    assert "(token)" in caplog.text
    assert TOKEN not in caplog.text
