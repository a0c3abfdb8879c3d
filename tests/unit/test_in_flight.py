"""Rows in flight: this memory alone keeps a row from being started twice."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import Handoff
from tests.kit.dispatching import Parts, queue_of


async def test_a_cursor_counts_its_rows_in_flight() -> None:
    parts = Parts(queue_of())
    first, second = parts.in_flight_run(1), parts.in_flight_run(2)
    assert (parts.cursor().in_flight, parts.in_flight.count(Slot("h")), parts.in_flight.count(Slot("other"))) == (
        2,
        2,
        0,
    )

    parts.in_flight.release(first)
    parts.in_flight.forget([second.notification.id, UUID(int=99)])
    assert (parts.cursor().in_flight, parts.in_flight.rows) == (0, {})


async def test_a_row_whose_lock_was_lost_is_forgotten_without_its_cursor() -> None:
    parts = Parts(queue_of())
    run = parts.in_flight_run(1)
    parts.cursors.lose(parts.cursor().slot)
    parts.in_flight.release(run)
    assert parts.in_flight.rows == {}


async def test_settled_rows_are_recorded_only_during_a_read() -> None:
    parts = Parts(queue_of())
    before, during = parts.in_flight_run(1), parts.in_flight_run(2)
    parts.in_flight.release(before)
    async with parts.state.finding:
        parts.in_flight.release(during)
    assert parts.in_flight.settled_during_read == {during.notification.id}


async def test_a_handoff_sees_rows_that_were_settled_during_its_round() -> None:
    parts = Parts(queue_of())
    handoff: Any = Handoff(["h"], 10, lambda handoff, rows: 0, lambda handoff: None)
    parts.in_flight.handoff = handoff
    run = parts.in_flight_run(1)
    parts.in_flight.release(run)
    assert handoff.settled == {run.notification.id}


async def test_a_leaving_row_allows_its_ordering_key_to_move() -> None:
    parts = Parts(queue_of("ledger", ordered=True), queue_of("plain"))
    ordered, plain = parts.in_flight_run(1, "ledger"), parts.in_flight_run(2, "plain")
    ordered.key = plain.key = "a"
    parts.in_flight.release(plain)
    assert not parts.keys.has_moved
    parts.in_flight.release(ordered)
    assert list(parts.keys.moved.values()) == [ordered.queue]
