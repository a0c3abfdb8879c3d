"""The settler: no outcome is lost, and an outcome that the database refuses does not block others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import msgspec
import pytest

from outboxio.errors import ShutdownError
from outboxio.model.notification import State
from outboxio.model.outcome import Bucket
from outboxio.settings import Settings
from tests.kit.dispatching import Gone, Parts, Refused, queue_of
from tests.kit.virtual_time import timers


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    parts = Parts(queue_of(), settings=Settings(outcome_batch=4))
    yield parts
    await parts.close()


def add(parts: Parts, *numbers: int, state: State = State.SUCCEEDED, error: str | None = None) -> None:
    for number in numbers:
        parts.settler.add(parts.outcome(parts.in_flight_run(number), state, error))


async def test_equal_outcomes_are_written_together_and_their_rows_forgotten(parts: Parts) -> None:
    add(parts, 3, 1, 2)
    add(parts, 4, state=State.FAILED, error='"no"')
    result = await parts.settler.settle_once()

    assert sorted(parts.table.settled) == [("FAILED", [4]), ("SUCCEEDED", [1, 2, 3])]
    assert (result.found, result.more, parts.in_flight.rows) == (4, False, {})
    assert (parts.state.counters.succeeded, parts.state.counters.failed) == (3, 1)


async def test_outcomes_wait_for_each_other_while_more_are_expected(parts: Parts) -> None:
    parts.state.running = 1
    add(parts, 1, 2, 3)
    assert not parts.signals.settle.is_set
    add(parts, 4)
    assert parts.signals.settle.is_set, "a batch is complete"


async def test_the_last_outcome_is_written_at_once(parts: Parts) -> None:
    add(parts, 1)
    assert parts.signals.settle.is_set


async def test_an_outcome_waits_at_most_for_the_delay() -> None:
    parts = Parts(queue_of(), settings=Settings(outcome_delay="20ms"))
    parts.state.running = 1
    add(parts, 1)
    assert not parts.signals.settle.is_set
    assert await parts.signals.settle.wait(5)
    await parts.close()


async def test_outcomes_stay_in_order_while_the_database_is_away(parts: Parts) -> None:
    def gone(bucket: Bucket) -> None:
        raise Gone

    add(parts, 1, 2)
    parts.table.trouble = gone
    with pytest.raises(Gone):
        await parts.settler.settle_once()
    add(parts, 3)
    assert [outcome.notification_id.int for outcome in parts.settler.waiting] == [1, 2, 3]
    assert len(parts.in_flight.rows) == 3

    parts.table.trouble = lambda bucket: None
    await parts.settler.settle_once()
    assert parts.table.settled == [("SUCCEEDED", [1, 2, 3])]


async def test_an_error_in_one_bucket_does_not_stop_the_others(parts: Parts) -> None:
    def only_failures(bucket: Bucket) -> None:
        if bucket.state is State.FAILED:
            raise RuntimeError("of this bucket")

    add(parts, 1)
    add(parts, 2, state=State.FAILED, error='"no"')
    parts.table.trouble = only_failures
    with pytest.raises(RuntimeError, match="of this bucket"):
        await parts.settler.settle_once()
    assert parts.table.settled == [("SUCCEEDED", [1])]
    assert [outcome.notification_id.int for outcome in parts.settler.waiting] == [2]


async def test_a_value_that_the_database_refuses_is_isolated_by_halving(parts: Parts) -> None:
    def refuses(bucket: Bucket) -> None:
        if any(outcome.error == '"\\u0000"' for outcome in bucket.outcomes):
            raise Refused

    add(parts, 1, 2, 4, state=State.FAILED, error='"no"')
    add(parts, 3, state=State.FAILED, error='"\\u0000"')
    parts.table.trouble = refuses
    await parts.settler.settle_once()

    assert sorted(number for _, numbers in parts.table.settled for number in numbers) == [1, 2, 3, 4]
    assert (parts.settler.waiting, parts.in_flight.rows) == ([], {})


@pytest.mark.parametrize("reacquired", [False, True])
async def test_refused_outcomes_are_remembered_and_their_rows_are_swept(parts: Parts, reacquired: bool) -> None:
    def refuse_all(bucket: Bucket) -> int:
        parts.cursors.takes += reacquired
        return 0

    parts.cursor().next_read(10, 1.0)
    runs = [parts.in_flight_run(number) for number in (1, 2)]
    for run in runs:
        parts.settler.add(parts.outcome(run))
    parts.table.trouble = refuse_all
    await parts.settler.settle_once()

    remembered = [parts.settler.refused.of(run.notification) for run in runs]
    assert [None if refused is None else refused.term for refused in remembered] == [None if reacquired else 1] * 2
    assert (parts.state.counters.refused, parts.state.counters.succeeded, parts.in_flight.rows) == (2, 0, {})
    assert not parts.cursor().scan.has_period


async def test_a_row_without_an_outcome_is_released_and_swept(parts: Parts) -> None:
    parts.cursor().next_read(10, 1.0)
    parts.settler.end(parts.in_flight_run(1), None)
    assert (parts.settler.waiting, parts.in_flight.rows, parts.cursor().scan.has_period) == ([], {}, False)


async def test_a_row_settled_in_its_own_transaction_is_counted_and_forgotten(parts: Parts) -> None:
    run = parts.in_flight_run(1)
    run.is_settled = True
    parts.settler.end(run, None)
    assert (parts.state.counters.succeeded, parts.in_flight.rows, parts.settler.waiting) == (1, {}, [])


async def test_outcomes_not_written_by_the_deadline_are_named(parts: Parts) -> None:
    def gone(bucket: Bucket) -> None:
        raise Gone

    add(parts, 1, 2)
    parts.table.trouble = gone
    with pytest.raises(ShutdownError) as error:
        await parts.settler.settle_all(asyncio.get_running_loop().time() + 0.1, patience=0.1)
    assert sorted(number.int for number in error.value.notification_ids) == [1, 2]


async def test_reading_pauses_while_too_many_outcomes_wait(parts: Parts) -> None:
    limit = 4 * 4 + parts.settings.handling_batch_size
    add(parts, *range(limit))
    assert not parts.settler.is_overloaded
    add(parts, limit)
    assert parts.settler.is_overloaded


async def test_a_refusal_names_the_slots(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    parts.hold(parts.cursor().queue, 3)
    for number, partition in ((1, 0), (2, 3)):
        parts.settler.add(parts.outcome(parts.in_flight_run(number, partition=partition)))
    parts.table.trouble = lambda bucket: 0
    await parts.settler.settle_once()
    assert "has taken over 'h', 'h', partition 3," in caplog.text


async def test_retries_due_soon_are_found_in_time_with_one_timer(parts: Parts) -> None:
    before, soon = timers(), [parts.now + timedelta(seconds=seconds) for seconds in (0.03, 0.01, 0.02)]
    for number, due in enumerate(soon, 1):
        outcome = parts.outcome(parts.in_flight_run(number), State.FAILED, '"no"')
        parts.settler.add(msgspec.structs.replace(outcome, next_retry_at=due))
        await parts.settler.settle_once()
    assert timers() == before + 1
    for _ in soon:
        assert await parts.signals.find.wait(5)
    assert timers() == before


async def test_a_stopped_settler_leaves_no_retry_timer(parts: Parts) -> None:
    before = timers()
    outcome = parts.outcome(parts.in_flight_run(1), State.FAILED, '"no"')
    parts.settler.add(msgspec.structs.replace(outcome, next_retry_at=parts.now + timedelta(seconds=0.5)))
    await parts.settler.settle_once()
    assert timers() == before + 1
    parts.settler.stop_timer()
    assert timers() == before
