"""The intake: how each due row is routed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from outboxio.handlers.options import Batch
from outboxio.model.notification import DYING, State
from outboxio.runs.key_queues import KeyQueue
from outboxio.runs.run import BatchRun
from tests.kit.dispatching import NOON, Parts, queue_of, row_of


async def hook(envelope: object, error: object) -> None: ...


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    parts = Parts(
        queue_of("h", on_dead=hook),
        queue_of("ledger", ordered=True),
        queue_of("mails", batch=Batch(size=3, max_wait="1h")),
    )
    yield parts
    await parts.close()


def numbers(runs: Any) -> list[int]:
    return [run.notification.id.int for run in runs]


async def test_a_row_becomes_ready_once(parts: Parts) -> None:
    queue = parts.cursor().queue
    assert parts.intake.take_in([row_of(1), row_of(2)], ()) == (2, {})
    assert parts.intake.take_in([row_of(1), row_of(2), row_of(3)], ()) == (1, {})
    assert (numbers(queue.ready), parts.state.ready, parts.cursor().in_flight) == ([1, 2, 3], 3, 3)
    assert not parts.state.quiet.is_set()


async def test_settled_or_stuck_rows_and_rows_without_a_slot_are_skipped(parts: Parts) -> None:
    settled, stuck, elsewhere = row_of(1), row_of(2), row_of(3, "elsewhere")
    parts.stuck.add([stuck.id])
    assert parts.intake.take_in([settled, stuck, elsewhere], {settled.id}) == (0, {})
    assert parts.in_flight.rows == {}


async def test_a_malformed_row_fails_alone(parts: Parts) -> None:
    assert parts.intake.take_in([row_of(1, flaw="payload: no JSON"), row_of(2)], ()) == (2, {})
    assert [outcome.state for outcome in parts.settler.waiting] == [State.FAILED]
    assert numbers(parts.cursor().queue.ready) == [2]


async def test_events_before_the_start_date_of_a_handler_are_skipped(parts: Parts) -> None:
    parts.cursor().queue.start_date = NOON + timedelta(days=1)
    assert parts.intake.take_in([row_of(1)], ()) == (1, {})
    assert ([outcome.state for outcome in parts.settler.waiting], parts.state.ready) == ([State.SKIPPED], 0)


async def test_a_remembered_outcome_is_written_instead_of_a_second_run(parts: Parts) -> None:
    run = parts.in_flight_run(1)
    parts.settler.refused.remember(run, parts.outcome(run), 7)
    parts.in_flight.release(run)
    assert parts.intake.take_in([row_of(1)], ()) == (1, {})
    assert ([outcome.state for outcome in parts.settler.waiting], len(parts.settler.refused)) == (["SUCCEEDED"], 0)
    assert parts.state.ready == 0


async def test_an_unchanged_row_under_a_refused_lease_makes_the_lock_suspect(parts: Parts) -> None:
    run = parts.in_flight_run(1)
    parts.settler.refused.remember(run, parts.outcome(run), 1)
    parts.in_flight.release(run)
    assert parts.intake.take_in([row_of(1)], ()) == (0, {})
    assert parts.locks.suspected == [run.lease]


async def test_rows_that_may_have_to_wait_go_to_the_admission_gate(parts: Parts) -> None:
    taken, undecided = parts.intake.take_in([row_of(1, "ledger")], ())
    assert (taken, {queue.handler.name: numbers(runs) for queue, runs in undecided.items()}) == (0, {"ledger": [1]})

    [run] = next(iter(undecided.values()))
    parts.intake.start([run])
    assert parts.state.ready == 1


async def test_an_admitted_row_whose_lock_was_lost_is_released(parts: Parts) -> None:
    run = parts.in_flight_run(1, "ledger")
    parts.cursors.lose(parts.cursor("ledger").slot)
    parts.intake.start([run])
    assert (parts.in_flight.rows, parts.state.ready) == ({}, 0)


async def test_an_outcome_goes_to_the_hooks(parts: Parts) -> None:
    assert parts.intake.take_in([row_of(1, state=DYING)], ()) == (1, {})
    assert numbers(parts.cursor().queue.hook_lane.ready) == [1]


async def test_rows_of_a_batch_handler_accumulate_until_full_or_flushed(parts: Parts) -> None:
    queue = parts.cursor("mails").queue
    parts.intake.take_in([row_of(number, "mails") for number in range(1, 6)], ())
    parts.intake.make_batches(queue)
    [batch] = queue.ready
    assert isinstance(batch, BatchRun)
    assert (numbers(batch.undone), numbers(queue.batch_buffer)) == ([1, 2, 3], [4, 5])
    assert queue.gather_timer is not None

    assert parts.intake.flush()
    assert [numbers(call.undone) for call in queue.ready] == [[1, 2, 3], [4, 5]]
    assert (queue.gather_timer, parts.intake.flush()) == (None, False)


async def test_ready_rows_of_a_lost_handler_are_released_and_others_stay(parts: Parts) -> None:
    parts.intake.take_in([row_of(1), row_of(2, "mails"), row_of(3, state=DYING)], ())
    parts.intake.drop(parts.cursor())
    assert [number.int for number in parts.in_flight.rows] == [2]
    assert (parts.state.ready, parts.cursor().in_flight, parts.cursor("mails").in_flight) == (0, 0, 1)
    assert (parts.signals.find.is_set, parts.state.quiet.is_set()) == (True, True)


async def test_rows_behind_a_head_are_released_with_the_others(parts: Parts) -> None:
    head, second = (parts.in_flight_run(number, "ledger") for number in (1, 2))
    head.key = second.key = "a"
    keys = parts.keys.queues[id(head.queue), "a"] = KeyQueue(head)
    keys.queue_up([second], 10)
    parts.intake.drop_all()
    assert (keys.waiting, second.key, [number.int for number in parts.in_flight.rows]) == ([], None, [1])


async def test_an_admitted_row_is_released_if_its_lock_changed_owner(parts: Parts) -> None:
    run = parts.in_flight_run(1, "ledger")
    parts.hold(parts.cursor("ledger").queue)
    parts.intake.start([run])
    assert (parts.in_flight.rows, parts.state.ready) == ({}, 0)


async def test_reading_only_rows_in_flight_leaves_an_idle_dispatcher_idle() -> None:
    parts = Parts(queue_of())
    parts.in_flight_run(1)
    assert parts.take(row_of(1)) == 0
    assert parts.state.quiet.is_set()
    await parts.close()
