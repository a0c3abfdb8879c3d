"""The rows of a handler in the memory of the dispatcher."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.event import Event, EventTypes
from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, Notification, Position
from outboxio.model.outcome import Lease
from outboxio.runs.cursor import FEW_IN_FLIGHT, HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.settings import Settings
from outboxio.support.clock import as_micros, from_micros
from outboxio.support.scan_position import FEW, LATE, SWEEP_NEARBY

NOW = datetime(2026, 11, 21, 12, 0, 0, 123457)
WEEK = timedelta(days=7)


class Opened(Event):
    number: int


async def handle(envelope: object) -> None:
    return None


def queue_of(**settings: timedelta) -> HandlerQueue:
    handler = make_handler(handle, name="h", event_types=(Opened,), aliases=(), topic=None, where="here")
    HandlerRegistry(EventTypes()).add(handler)
    return HandlerQueue(HandlerSpec.of(handler, Settings(**settings), 1, None))


def test_a_row_is_too_old_after_its_window_and_not_at_its_end() -> None:
    queue = queue_of(handling_retention_window=WEEK)
    made = as_micros(NOW - WEEK)
    row = Notification(UUID(int=1), "h", "Opened", "{}", "PENDING", 0, made, made, 1, 0, None)

    assert not queue.spec.is_too_old(row, as_micros(NOW))
    assert queue.spec.is_too_old(row, as_micros(NOW) + 1)


def test_a_moment_as_microseconds_is_the_same_moment() -> None:
    for moment in (NOW, datetime(1970, 1, 1), datetime(1999, 12, 31, 23, 59, 59, 999999), datetime(9999, 12, 31)):
        assert from_micros(as_micros(moment)) == moment


def source(*, in_flight: int, has_backlog: bool = False) -> HandlerCursor:
    read = HandlerCursor(Slot("h"), queue_of(), Lease("app/dispatch/h", "h", 1))
    read.scan.last = (NOW, 7)
    read.in_flight, read.has_backlog = in_flight, has_backlog
    return read


def reads_again(read: HandlerCursor, *moments: float) -> list[bool]:
    """For each moment: True if the read at that moment is a sweep, which finds the rows in flight once more."""
    return [read.next_read(1000, moment).after == BEGINNING for moment in moments]


def test_while_little_is_in_flight_every_read_begins_at_the_beginning() -> None:
    assert reads_again(source(in_flight=FEW_IN_FLIGHT), 10, 10.001, 10.002) == [True] * 3


def test_while_much_is_in_flight_few_reads_find_it_again() -> None:
    assert reads_again(source(in_flight=FEW_IN_FLIGHT + 1), 10, 10.1, 10.19, 10.25, 10.3) == [1, 0, 0, 1, 0]


def test_while_a_backlog_is_read_fewer_still_do() -> None:
    assert reads_again(source(in_flight=1, has_backlog=True), 10, 10.2, 10.45, 10.55, 10.7) == [1, 0, 0, 1, 0]


def test_under_load_a_read_that_begins_again_does_so_where_rows_were_reached_a_while_ago() -> None:
    read = source(in_flight=1)
    bounds = list[tuple[float, Position]]()
    for number in range(1, 201):  # two seconds
        moment = number / 100
        bounds.append((moment, read.next_read(1000, moment).after))
        read.scan.found += 100
        read.scan.last = (NOW + timedelta(seconds=moment), number)

    under_load = [(moment, after) for moment, after in bounds if moment > 1]
    sweeps = [after for _, after in under_load if after == BEGINNING]
    behind = [moment - (after[0] - NOW).total_seconds() for moment, after in under_load if after != BEGINNING]
    assert len(sweeps) == 2, "rows that come to light far behind are found within half a second"
    assert all(seconds + 1e-9 >= SWEEP_NEARBY for seconds in behind), "what came late would be passed by"
    assert all(seconds <= 2 * SWEEP_NEARBY + 0.02 for seconds in behind)


def test_when_the_load_ends_every_read_begins_at_the_beginning_again() -> None:
    read = source(in_flight=1)
    for moment in (1, 1.1, 1.7):
        read.next_read(1000, moment)
        read.scan.found += FEW
    assert read.next_read(1000, 1.8).after != BEGINNING
    assert read.next_read(1000, 2.2).after == BEGINNING  # half a second after the last one, and the load is seen still
    assert read.next_read(1000, 2.3).after != BEGINNING
    assert reads_again(read, 2.7, 2.8, 2.9) == [True] * 3


def test_what_has_become_due_behind_the_position_is_read_for_at_once_under_load_too() -> None:
    read = source(in_flight=1)
    for moment in (1, 1.6):
        read.next_read(1000, moment)
        read.scan.found += FEW
    assert read.next_read(1000, 1.7).after != BEGINNING
    read.sweep_soon()
    assert read.next_read(1000, 1.8).after == BEGINNING


def test_what_was_given_back_is_not_passed_by_under_load() -> None:
    read = source(in_flight=1)
    for moment in (1, 1.2, 1.6):
        read.next_read(1000, moment)
        read.scan.found += FEW
    read.start_over()
    assert read.next_read(1000, 1.7).after == BEGINNING


def test_a_read_that_begins_at_the_beginning_has_room_for_what_is_in_flight() -> None:
    read = source(in_flight=500)
    assert [read.next_read(1000, moment).limit for moment in (10, 10.1)] == [1500, 1000]


# --- while sweeps are put off ----------------------------------------------------------------------


def read_for_a_minute(read: HandlerCursor, *, may_sweep: bool) -> list[tuple[datetime, Position]]:
    """Ten reads a second, some of which find a row: the moments of the reads, and where each began."""
    begun = list[tuple[datetime, Position]]()
    for number in range(600):
        moment = NOW + timedelta(seconds=number / 10)
        begun.append((moment, read.next_read(1000, 100 + number / 10, may_sweep=may_sweep).after))
        read.scan.found += number % 2
        read.reads_on(has_backlog=False, due_by=moment)
    return begun


def test_a_read_that_may_not_sweep_begins_where_all_was_found_some_seconds_ago() -> None:
    read = source(in_flight=1)
    behind = [(moment - after[0]).total_seconds() for moment, after in read_for_a_minute(read, may_sweep=False)]
    assert all(LATE <= seconds <= 2 * LATE + 0.2 for seconds in behind[100:])
    assert read.owes_sweep


def test_where_sweeps_are_allowed_again_the_next_read_is_one() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    assert read.next_read(1000, 200).after == BEGINNING
    assert not read.owes_sweep


def test_what_has_become_due_behind_the_position_is_read_for_although_sweeps_are_put_off() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    read.sweep_soon()
    assert [read.next_read(1000, 200 + n, may_sweep=False).after == BEGINNING for n in range(2)] == [True, False]


def test_what_was_given_back_is_found_although_sweeps_are_put_off() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    read.start_over()
    assert read.next_read(1000, 200, may_sweep=False).after == BEGINNING


def test_a_backlog_behind_the_position_is_read_to_its_end_although_sweeps_are_put_off() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    read.sweep_soon()
    read.next_read(1000, 200, may_sweep=False)
    read.reads_on(has_backlog=True, due_by=NOW + WEEK)
    read.scan.last = (NOW - WEEK, 3)  # where that sweep was cut short
    for moment in (200.1, 200.2, 210):
        assert read.next_read(1000, moment, may_sweep=False).after <= (NOW - WEEK, 3)
    read.reads_on(has_backlog=False, due_by=NOW + WEEK)
    assert read.next_read(1000, 210.1, may_sweep=False).after == BEGINNING, "a while ago is not known any more"
