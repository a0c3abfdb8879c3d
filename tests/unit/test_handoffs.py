"""Handoffs: which rows fan-out may hand off, and what happens if the state changes in between."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outboxio.dispatch.finder import Finder, Handoffs
from outboxio.model.notification import FIRST_POSITION
from outboxio.storage.protocols import PartitionCount
from tests.kit.dispatching import NOON, Parts, queue_of, row_of


def offered(parts: Parts) -> Handoffs:
    parts.workers.start()
    finder = Finder(parts.core, parts.intake, cast(Any, None))
    return Handoffs(parts.core, parts.intake, finder)


def keeps_up(parts: Parts, *names: str) -> None:
    for cursor in parts.cursors:
        if cursor.slot.handler_name in names:
            cursor.next_read(10, 1.0)


def spread(parts: Parts, number: int, active: int = 0) -> None:
    parts.partitions.apply({"h": PartitionCount("h", number, max(number, active), NOON)})


async def test_rows_of_handlers_that_keep_up_are_taken() -> None:
    parts = Parts(queue_of("plain"), queue_of("ledger", ordered=True), queue_of("never-read"))
    keeps_up(parts, "plain", "ledger")
    handoff = offered(parts).offer()
    assert handoff is not None
    assert list(handoff.names) == ["plain"]
    handoff.hand([row_of(1, "plain"), row_of(2, "ledger"), row_of(3, "plain", flaw="payload")])
    assert handoff.taken == 1
    assert await parts.quiet() == [("SUCCEEDED", [1])]
    assert [number.int for number in handoff.settled] == [1]
    handoff.close()
    assert parts.in_flight.handoff is None
    await parts.close()


async def test_nothing_is_offered_while_runs_may_not_start() -> None:
    parts = Parts(queue_of())
    handoffs = offered(parts)
    assert handoffs.offer() is None, "its rows were never swept for"
    keeps_up(parts, "h")
    parts.table.can_settle = False
    assert handoffs.offer() is None
    parts.table.can_settle = True
    parts.state.is_stopping = True
    assert handoffs.offer() is None
    await parts.close()


async def test_a_pause_during_the_handoff_is_applied() -> None:
    parts = Parts(queue_of())
    keeps_up(parts, "h")
    handoff = offered(parts).offer()
    assert handoff is not None
    parts.cursor().is_paused = True
    handoff.hand([row_of(1)])
    assert (handoff.taken, parts.in_flight.rows) == (0, {})
    await parts.close()


async def test_a_row_settled_before_its_handoff_does_not_run_again() -> None:
    parts = Parts(queue_of())
    keeps_up(parts, "h")
    handoff = offered(parts).offer()
    assert handoff is not None
    parts.in_flight.release(parts.in_flight_run(1))
    handoff.hand([row_of(1)])
    assert handoff.taken == 0
    await parts.close()


async def test_overlapping_rounds_get_a_single_handoff() -> None:
    parts = Parts(queue_of())
    keeps_up(parts, "h")
    handoffs = offered(parts)
    handoff = handoffs.offer()
    assert handoff is not None
    assert handoffs.offer() is None, "settled rows would be recorded for only one handoff"
    parts.in_flight.release(parts.in_flight_run(1))
    handoff.hand([row_of(1)])
    assert handoff.taken == 0
    handoff.close()
    assert handoffs.offer() is not None
    await parts.close()


async def test_rows_of_a_partitioned_handler_need_all_partitions_held_here() -> None:
    parts = Parts(queue_of())
    spread(parts, 3)
    handoffs = offered(parts)
    for partition, expected in ((1, None), (2, ["h"])):
        parts.hold(parts.cursor().queue, partition)
        keeps_up(parts, "h")
        handoff = handoffs.offer()
        assert (handoff and list(handoff.names)) == expected
    assert handoff is not None
    handoff.hand([row_of(number, partition=number) for number in range(3)])
    assert (handoff.taken, [parts.cursor("h", number).in_flight for number in range(3)]) == (3, [1, 1, 1])
    await parts.close()


@pytest.mark.parametrize("obstacle", ["paused", "backlog", "halted", "a partition that is drained", "rehashing"])
async def test_rows_with_a_partition_that_cannot_be_handed_off_are_read(obstacle: str) -> None:
    parts = Parts(queue_of())
    parts.hold(parts.cursor().queue, 1)
    spread(parts, 2)
    keeps_up(parts, "h")
    handoffs = offered(parts)
    handoff = handoffs.offer()
    assert handoff is not None

    second = parts.cursor("h", 1)
    if obstacle == "paused":
        second.is_paused = True
    elif obstacle == "backlog":
        second.has_backlog = True
    elif obstacle == "halted":
        parts.cursors.halt(second.slot)
    elif obstacle == "rehashing":
        handoffs._finder.rehashing._owing[second.slot] = FIRST_POSITION
    else:
        spread(parts, 2, active=3)
    handoff.hand([row_of(1)])
    handoff.close()
    assert (handoffs.offer(), handoff.taken) == (None, 0)
    await parts.close()
