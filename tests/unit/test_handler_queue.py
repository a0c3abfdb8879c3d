"""The rows of a handler in the memory of the dispatcher."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.event import Event, EventTypes
from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_POSITION, Notification, Position
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


def test_a_row_expires_after_the_end_of_its_window() -> None:
    queue = queue_of(handling_retention_window=WEEK)
    made = as_micros(NOW - WEEK)
    row = Notification(UUID(int=1), "h", "Opened", "{}", "PENDING", 0, made, made, 1, 0, None)

    assert not queue.spec.is_too_old(row, as_micros(NOW))
    assert queue.spec.is_too_old(row, as_micros(NOW) + 1)


def test_a_time_in_microseconds_equals_the_datetime() -> None:
    for time in (NOW, datetime(1970, 1, 1), datetime(1999, 12, 31, 23, 59, 59, 999999), datetime(9999, 12, 31)):
        assert from_micros(as_micros(time)) == time


def source(*, in_flight: int, has_backlog: bool = False) -> HandlerCursor:
    read = HandlerCursor(Slot("h"), queue_of(), Lease("app/dispatch/h", "h", 1))
    read.scan.last = (NOW, 7)
    read.in_flight, read.has_backlog = in_flight, has_backlog
    return read


def reads_again(read: HandlerCursor, *times: float) -> list[bool]:
    """For each time: True if the read at that time is a sweep, which finds the rows in flight again."""
    return [read.next_read(1000, time).after == FIRST_POSITION for time in times]


def test_with_few_rows_in_flight_every_read_starts_at_the_beginning() -> None:
    assert reads_again(source(in_flight=FEW_IN_FLIGHT), 10, 10.001, 10.002) == [True] * 3


def test_with_many_rows_in_flight_few_reads_find_them_again() -> None:
    assert reads_again(source(in_flight=FEW_IN_FLIGHT + 1), 10, 10.1, 10.19, 10.25, 10.3) == [1, 0, 0, 1, 0]


def test_during_a_backlog_even_fewer_reads_find_them_again() -> None:
    assert reads_again(source(in_flight=1, has_backlog=True), 10, 10.2, 10.45, 10.55, 10.7) == [1, 0, 0, 1, 0]


def test_under_load_a_new_scan_starts_at_a_recently_reached_position() -> None:
    read = source(in_flight=1)
    bounds = list[tuple[float, Position]]()
    for number in range(1, 201):  # two seconds
        time = number / 100
        bounds.append((time, read.next_read(1000, time).after))
        read.scan.found += 100
        read.scan.last = (NOW + timedelta(seconds=time), number)

    under_load = [(time, after) for time, after in bounds if time > 1]
    sweeps = [after for _, after in under_load if after == FIRST_POSITION]
    behind = [time - (after[0] - NOW).total_seconds() for time, after in under_load if after != FIRST_POSITION]
    assert len(sweeps) == 2, "rows that become visible far behind are found within half a second"
    assert all(seconds + 1e-9 >= SWEEP_NEARBY for seconds in behind), "a late commit would be skipped"
    assert all(seconds <= 2 * SWEEP_NEARBY + 0.02 for seconds in behind)


def test_after_the_load_every_read_starts_at_the_beginning_again() -> None:
    read = source(in_flight=1)
    for time in (1, 1.1, 1.7):
        read.next_read(1000, time)
        read.scan.found += FEW
    assert read.next_read(1000, 1.8).after != FIRST_POSITION
    assert (
        read.next_read(1000, 2.2).after == FIRST_POSITION
    )  # half a second after the last read, when the load is still visible
    assert read.next_read(1000, 2.3).after != FIRST_POSITION
    assert reads_again(read, 2.7, 2.8, 2.9) == [True] * 3


def test_rows_due_behind_the_position_are_read_at_once_under_load() -> None:
    read = source(in_flight=1)
    for time in (1, 1.6):
        read.next_read(1000, time)
        read.scan.found += FEW
    assert read.next_read(1000, 1.7).after != FIRST_POSITION
    read.sweep_soon()
    assert read.next_read(1000, 1.8).after == FIRST_POSITION


def test_released_rows_are_not_skipped_under_load() -> None:
    read = source(in_flight=1)
    for time in (1, 1.2, 1.6):
        read.next_read(1000, time)
        read.scan.found += FEW
    read.start_over()
    assert read.next_read(1000, 1.7).after == FIRST_POSITION


def test_a_read_from_the_beginning_has_capacity_for_rows_in_flight() -> None:
    read = source(in_flight=500)
    assert [read.next_read(1000, time).limit for time in (10, 10.1)] == [1500, 1000]


# --- while sweeps are delayed -----------------------------------------------------------------------


def read_for_a_minute(read: HandlerCursor, *, may_sweep: bool) -> list[tuple[datetime, Position]]:
    """Ten reads a second, some of which find a row: the times of the reads, and where each started."""
    reads = list[tuple[datetime, Position]]()
    for number in range(600):
        time = NOW + timedelta(seconds=number / 10)
        reads.append((time, read.next_read(1000, 100 + number / 10, may_sweep=may_sweep).after))
        read.scan.found += number % 2
        read.reads_on(has_backlog=False, due_by=time)
    return reads


def test_a_read_without_a_sweep_starts_at_a_completely_read_position() -> None:
    read = source(in_flight=1)
    behind = [(time - after[0]).total_seconds() for time, after in read_for_a_minute(read, may_sweep=False)]
    assert all(LATE <= seconds <= 2 * LATE + 0.2 for seconds in behind[100:])
    assert read.owes_sweep


def test_once_sweeps_are_allowed_again_the_next_read_is_one() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    assert read.next_read(1000, 200).after == FIRST_POSITION
    assert not read.owes_sweep


def test_rows_due_behind_the_position_are_read_despite_delayed_sweeps() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    read.sweep_soon()
    assert [read.next_read(1000, 200 + n, may_sweep=False).after == FIRST_POSITION for n in range(2)] == [True, False]


def test_released_rows_are_found_despite_delayed_sweeps() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    read.start_over()
    assert read.next_read(1000, 200, may_sweep=False).after == FIRST_POSITION


def test_a_backlog_behind_the_position_is_read_completely_despite_delayed_sweeps() -> None:
    read = source(in_flight=1)
    read_for_a_minute(read, may_sweep=False)
    read.sweep_soon()
    read.next_read(1000, 200, may_sweep=False)
    read.reads_on(has_backlog=True, due_by=NOW + WEEK)
    read.scan.last = (NOW - WEEK, 3)  # where that sweep was cut short
    for time in (200.1, 200.2, 210):
        assert read.next_read(1000, time, may_sweep=False).after <= (NOW - WEEK, 3)
    read.reads_on(has_backlog=False, due_by=NOW + WEEK)
    assert read.next_read(1000, 210.1, may_sweep=False).after == FIRST_POSITION, (
        "the earlier position is no longer known"
    )
