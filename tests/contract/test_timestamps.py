"""Timestamps at the ends of the calendar, on every database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from outboxio import ConfigurationError, Event, InvalidEvent, Outbox, RetryAfter
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.probes import written

pytestmark = pytest.mark.one_of_family

WEST, EAST = timezone(-timedelta(hours=5)), timezone(timedelta(hours=5))

#: Dates that stand for "never" and "since the beginning", as people write them.
NEVER = (datetime.max, datetime.max.replace(tzinfo=WEST), datetime.max.replace(tzinfo=EAST))
SINCE_EVER = (datetime.min, datetime.min.replace(tzinfo=WEST), datetime.min.replace(tzinfo=EAST))


class Ping(Event):
    number: int


@pytest.mark.parametrize("time", [*NEVER, *SINCE_EVER], ids=str)
async def test_events_available_at_an_end_of_the_calendar_are_stored(
    outbox: Outbox, look: Look, time: datetime
) -> None:
    journal = Journal()
    outbox.handler(Ping, name="ping")(journal)

    async with outbox.transaction("Wait") as tx:
        tx.emit(Ping(1), available_at=time)
    await outbox.inbox.receive(source="s", external_id="1", event=Ping(2), available_at=time)
    await outbox.inbox.consume(source="s", external_id="2", event=Ping(3), available_at=time, on_error="store")
    await outbox.drain()

    assert len(await written(look)) == (3 if time in NEVER else 2)
    assert sorted(envelope.event.number for envelope in journal.envelopes) == ([] if time in NEVER else [1, 2, 3])
    assert len(await outbox.admin.list(state="PENDING")) == (3 if time in NEVER else 0)


@pytest.mark.parametrize("time", SINCE_EVER, ids=str)
async def test_available_since_the_earliest_time_is_due_at_once(outbox: Outbox, time: datetime) -> None:
    journal = Journal()
    outbox.handler(Ping, name="in-order", ordered=True)(journal)

    await outbox.inbox.consume(source="s", external_id="1", event=Ping(1), available_at=time, on_error="store")
    await outbox.drain()

    assert len(journal) == 1


@pytest.mark.parametrize("since", SINCE_EVER, ids=str)
@pytest.mark.parametrize("until", NEVER, ids=str)
async def test_an_operator_may_select_all_of_time(outbox: Outbox, since: datetime, until: datetime) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    outbox.handler(MoneyDeposited, name="second")(Journal())
    await outbox.drain()

    assert await outbox.admin.backfill("second", since=since) == 2
    assert await outbox.admin.replay("first", since=since, until=until) == 2
    assert await outbox.admin.replay("first", since=until) == 0
    assert await outbox.admin.backfill("first", since=until) == 0


@pytest.mark.parametrize("time", [*SINCE_EVER, datetime(1800, 1, 1), datetime(1900, 1, 1)], ids=str)
async def test_a_retry_at_a_time_long_past_is_due_at_once(outbox: Outbox, clock: MovableClock, time: datetime) -> None:
    journal = Journal(lambda envelope: RetryAfter(at=time) if envelope.attempt == 1 else None)
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1,)))

    await outbox.drain()
    await outbox.drain()

    assert [record.state for record in await outbox.admin.list()] == ["SUCCEEDED"]


@pytest.mark.above_statements
@pytest.mark.parametrize("given", [None, True, 7, "2026-01-01", b"x", datetime(2026, 1, 1).date(), timedelta()])
async def test_an_invalid_timestamp_is_refused_by_name(outbox: Outbox, look: Look, given: Any) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    for call in (
        lambda: outbox.admin.backfill("first", since=given),
        lambda: outbox.admin.replay("first", since=given),
    ):
        with pytest.raises(ConfigurationError, match=r"since is .*; expected a datetime"):
            await call()
    if given is None:
        return
    with pytest.raises(ConfigurationError, match=r"until is .*; expected a datetime"):
        await outbox.admin.replay("first", since=datetime(2026, 1, 1), until=given)
    with pytest.raises(InvalidEvent, match="is not a datetime"):
        await outbox.inbox.receive(source="s", external_id="1", event=Ping(1), available_at=given)
    assert await written(look) == []
