"""Handoffs: which rows fan-out may hand over, and what happens if something comes between."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outboxio.dispatch.finder import Finder, Handoffs
from outboxio.model.notification import BEGINNING
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
    parts.partitions.heed({"h": PartitionCount("h", number, max(number, active), NOON)})


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


async def test_nothing_is_offered_while_nothing_may_start() -> None:
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


async def test_a_pause_that_comes_between_is_heeded() -> None:
    parts = Parts(queue_of())
    keeps_up(parts, "h")
    handoff = offered(parts).offer()
    assert handoff is not None
    parts.cursor().is_paused = True
    handoff.hand([row_of(1)])
    assert (handoff.taken, parts.in_flight.rows) == (0, {})
    await parts.close()


async def test_a_row_that_was_found_and_settled_before_it_is_handed_over_does_not_run_again() -> None:
    parts = Parts(queue_of())
    keeps_up(parts, "h")
    handoff = offered(parts).offer()
    assert handoff is not None
    parts.in_flight.release(parts.in_flight_run(1))
    handoff.hand([row_of(1)])
    assert handoff.taken == 0
    await parts.close()


async def test_rows_of_a_handler_with_partitions_are_taken_if_all_partitions_are_here() -> None:
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


@pytest.mark.parametrize("obstacle", ["paused", "backlog", "halted", "a partition that is drained", "re-homing"])
async def test_rows_of_a_handler_with_partitions_are_read_if_a_partition_may_not_be_handed(obstacle: str) -> None:
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
    elif obstacle == "re-homing":
        handoffs._finder.rehoming._owing[second.slot] = BEGINNING
    else:
        spread(parts, 2, active=3)
    handoff.hand([row_of(1)])
    assert (handoffs.offer(), handoff.taken) == (None, 0)
    await parts.close()
