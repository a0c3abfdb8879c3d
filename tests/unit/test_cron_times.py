"""The scheduled times of cron expressions around every clock change of every time zone from 2024 to 2030."""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from outboxio.jobs.job import MAX_COUNTED, NextAfter, cron_times, every_period, newest_due

pytestmark = pytest.mark.slow

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FIRST, LAST = datetime(2024, 1, 1), datetime(2031, 1, 1)
AROUND = 4 * HOUR
STARTS = range(121, 420, 37)  # minutes from the first time that is compared; the clock changes at 240
SEVENTH = timedelta(seconds=7)


class Change(Struct, frozen=True):
    """A change of the UTC offset of a zone."""

    zone: str
    instant: datetime
    before: timedelta
    after: timedelta

    @property
    def walls(self) -> list[tuple[datetime, datetime]]:
        """The minutes around the change: the instants with the times that the wall clock shows."""
        start, count = self.instant - AROUND, 2 * AROUND // MINUTE
        instants = [start + number * MINUTE for number in range(count)]
        return [(at, at + (self.before if at < self.instant else self.after)) for at in instants]


class Expression(Struct, frozen=True):
    """A cron expression as the sets of its fields."""

    minutes: frozenset[int]
    hours: frozenset[int]
    weekdays: frozenset[int] = frozenset(range(7))

    def __str__(self) -> str:
        fields = [(self.minutes, 60), (self.hours, 24), (self.weekdays, 7)]
        minute, hour, weekday = (
            "*" if len(some) == most else ",".join(map(str, sorted(some))) for some, most in fields
        )
        return f"{minute} {hour} * * {weekday}"

    def matches(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours and wall.isoweekday() % 7 in self.weekdays

    def times(self, walls: Sequence[tuple[datetime, datetime]]) -> list[datetime]:
        """The scheduled instants, by the rule in docs/how-to/run-jobs.md, minute by minute."""
        if len(self.hours) == 24:
            return [at for at, wall in walls if self.matches(wall)]
        times, passed = list[datetime](), walls[0][1]
        for at, wall in walls:
            is_due = False
            while passed <= wall:
                is_due, passed = is_due or self.matches(passed), passed + MINUTE
            times += [at] * is_due
        return times


@cache
def changes() -> list[Change]:
    """Every change of an offset; of zones with the same change, only one."""
    found = {
        (change.instant, change.before, change.after): change
        for name in sorted(zoneinfo.available_timezones() - {"localtime", "Factory"}, reverse=True)
        for change in changes_of(name)
    }
    return list(found.values())


def changes_of(name: str) -> Iterator[Change]:
    zone = ZoneInfo(name)

    def offset_at(instant: datetime) -> timedelta:
        offset = instant.replace(tzinfo=UTC).astimezone(zone).utcoffset()
        assert offset is not None
        return offset

    at, before = FIRST, offset_at(FIRST)
    while at < LAST:
        end = at + 7 * DAY
        if (after := offset_at(end)) != before:
            while end - at > MINUTE:
                middle = at + (end - at) // MINUTE // 2 * MINUTE
                at, end = (middle, end) if offset_at(middle) == before else (at, middle)
            yield Change(name, end, before, after)
        at, before = end, after


def requires(change: Change, expressions: Sequence[Expression], starts: Sequence[datetime] = ()) -> None:
    """Compare the scheduled times with the rule, from before the change on, and from each of ``starts`` on."""
    walls = change.walls
    for expression in expressions:
        follows_the_rule(change, walls, expression, starts or [walls[number][0] + SEVENTH for number in STARTS])


def follows_the_rule(
    change: Change, walls: list[tuple[datetime, datetime]], expression: Expression, starts: Sequence[datetime]
) -> None:
    expected, end = expression.times(walls), walls[-1][0]
    next_after = cron_times("job", str(expression), ZoneInfo(change.zone))
    walked, at = list[datetime](), walls[0][0] - timedelta(seconds=1)
    while (at := after(next_after, at)) <= end:
        walked.append(at)
    assert walked == expected, (change, str(expression))
    for start in starts:
        following = after(next_after, start)
        assert following == next((time for time in expected if time > start), following), (change, str(expression))


def after(next_after: NextAfter, instant: datetime) -> datetime:
    following = next_after(instant)
    assert following > instant
    return following


def test_every_clock_change_of_every_zone_follows_the_rule() -> None:
    assert len(changes()) > 300
    assert {"Australia/LHI", "Antarctica/Troll", "Africa/Casablanca"} <= {change.zone for change in changes()}
    for change in changes():
        wall = change.instant + min(change.before, change.after)  # within the gap, or within the repeated time
        hour, weekday = wall.hour, frozenset({wall.isoweekday() % 7})
        hours = frozenset({hour})
        expressions = (
            Expression(frozenset({wall.minute}), hours, weekday),
            Expression(frozenset(range(0, 60, 20)), hours),
            Expression(frozenset({30}), frozenset({(hour - 1) % 24, hour, (hour + 1) % 24})),
            Expression(frozenset({0}), frozenset(range(0, 24, 2))),
            Expression(frozenset({0, 30}), frozenset(range(24))),
        )
        requires(change, expressions)


def below(most: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(0, most - 1), min_size=1)


@given(st.data())
def test_any_expression_follows_the_rule_at_any_clock_change(data: st.DataObject) -> None:
    change = data.draw(st.sampled_from(changes()))
    hours = data.draw(st.just(frozenset(range(24))) | below(24))
    expression = Expression(data.draw(below(60)), hours, data.draw(below(7)))
    start = st.timedeltas(-AROUND, AROUND - MINUTE).map(lambda distance: change.instant + distance)
    requires(change, [expression], data.draw(st.lists(start, min_size=1, max_size=9)))


@pytest.mark.parametrize("day", [datetime(2026, 3, 29), datetime(2026, 10, 25), datetime(2026, 7, 1)], ids=str)
@pytest.mark.parametrize(
    ("schedule", "spring", "autumn", "usual"),
    [
        ("30 2 * * *", ["03:00"], ["02:30"], ["02:30"]),
        ("*/20 2 * * *", ["03:00"], ["02:00", "02:20", "02:40"], ["02:00", "02:20", "02:40"]),
        ("30 1-3 * * *", ["01:30", "03:00", "03:30"], ["01:30", "02:30", "03:30"], ["01:30", "02:30", "03:30"]),
        ("0 2,3 * * *", ["03:00"], ["02:00", "03:00"], ["02:00", "03:00"]),
        ("0 0-4/2 * * *", ["00:00", "03:00", "04:00"], ["00:00", "02:00", "04:00"], ["00:00", "02:00", "04:00"]),
    ],
)
def test_a_named_hour_runs_once_a_day(
    day: datetime, schedule: str, spring: list[str], autumn: list[str], usual: list[str]
) -> None:
    zone = ZoneInfo("Europe/Berlin")
    next_after, times = cron_times("job", schedule, zone), list[str]()
    at = day.replace(tzinfo=zone).astimezone(UTC).replace(tzinfo=None) - timedelta(seconds=1)
    for _ in range(4):
        at = next_after(at)
        local = at.replace(tzinfo=UTC).astimezone(zone)
        times += [f"{local:%H:%M}"] * (local.date() == day.date())
    assert times == {3: spring, 10: autumn, 7: usual}[day.month]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("* * * * *", "*/1 0-23 * * *"), ("0 * * * *", " 0  0-23 * *  * "), ("5 */1 * * MON", "5 0-23 * * 1"),
        ("0 2 * JAN SUN", "0 2 * 1 7"), ("0,30 2 * * *", "*/30 2 1-31 * *"),
    ],
)  # fmt: skip
def test_the_spelling_of_an_expression_does_not_matter(one: str, other: str) -> None:
    for at in (datetime(2026, 3, 8), datetime(2026, 11, 1), datetime(2026, 12, 30)):
        first = cron_times("job", one, ZoneInfo("US/Eastern"))
        second = cron_times("job", other, ZoneInfo("America/New_York"))
        here = there = at
        for _ in range(40):
            here, there = first(here), second(there)
            assert here == there


def test_a_zone_that_leaves_out_a_day_still_runs() -> None:
    # Samoa had no 30 December 2011.
    daily = cron_times("job", "0 12 * * *", ZoneInfo("Pacific/Apia"))
    times = [datetime(2011, 12, 28, 23)]
    for _ in range(3):
        times.append(daily(times[-1]))
    assert times[1:] == [datetime(2011, 12, 29, 22), datetime(2011, 12, 30, 10), datetime(2011, 12, 30, 22)]


@pytest.mark.parametrize("downtime", [MINUTE, HOUR, DAY, 7 * DAY, 3000 * DAY], ids=str)
@pytest.mark.parametrize("schedule", ["* * * * *", "*/7 * * * *", "30 2 * * *", "0 0 29 2 *", "* * 1 1 *"])
def test_the_work_after_a_downtime_is_constant(schedule: str, downtime: timedelta) -> None:
    cron, calls = cron_times("job", schedule, ZoneInfo("Europe/Berlin")), 0

    def next_after(instant: datetime) -> datetime:
        nonlocal calls
        calls += 1
        return cron(instant)

    first = cron(datetime(2026, 10, 20))
    now = first + downtime
    newest, missed = newest_due(next_after, first, now)
    assert first <= newest <= now < cron(newest)
    assert calls < 2 * MAX_COUNTED
    exact, at = 0, first
    while exact < MAX_COUNTED and (at := cron(at)) <= now:
        exact += 1
    assert missed == exact


def test_the_newest_time_of_a_period_is_found_after_any_downtime() -> None:
    every = every_period(timedelta(seconds=7))
    first = every(FIRST)
    assert newest_due(every, first, first) == (first, 0)
    assert newest_due(every, first, first + timedelta(seconds=20)) == (first + timedelta(seconds=14), 2)
    newest, missed = newest_due(every, first, LAST)
    assert (every(newest) > LAST, newest <= LAST, missed) == (True, True, MAX_COUNTED)
