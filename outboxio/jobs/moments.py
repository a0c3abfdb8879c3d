"""The scheduled times of a job: those of a cron expression in a time zone, or the multiples of a period. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from outboxio.errors import RegistrationError
from outboxio.support.clock import EPOCH, naive_utc

NextAfter = Callable[[datetime], datetime]
"""The first scheduled time after a time; both are naive UTC."""

HOURS = 24
MOST_COUNTED = 100  # scheduled times of a downtime that are counted one by one
_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)
_TICK = timedelta(microseconds=1)


def every_period(period: timedelta) -> NextAfter:
    """The multiples of a period since 1970: they do not drift, and are the same in all processes."""
    return lambda moment: EPOCH + ((moment - EPOCH) // period + 1) * period


def newest_due(next_after: NextAfter, first: datetime, now: datetime) -> tuple[datetime, int]:
    """The last scheduled time up to ``now``, and the number of times from ``first`` until before it, at most 100.

    ``first`` is a scheduled time. Halving the range costs some 15 calls of ``next_after`` for a downtime of a week, and
    at most 50 for any, where a loop over the scheduled times would block the event loop.
    """
    newest, missed = first, 0
    while missed < MOST_COUNTED and (following := next_after(newest)) <= now:
        newest, missed = following, missed + 1
    until = now
    while until > newest and next_after(newest) <= now:
        middle = newest + (until - newest) / 2
        following = next_after(middle)
        if following <= now:
            newest = following
        else:
            until = middle
    return newest, missed


def zone_of(job: str, name: str) -> ZoneInfo:
    """The time zone with this name; :class:`RegistrationError` for an unknown name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as error:
        raise RegistrationError(
            f"job {job!r}: timezone is {name!r}, and no time zone has this name; expected a name such as "
            "'Europe/Berlin', and on a system without time zones pip install 'outboxio[cron]', which brings them"
        ) from error


def cron_moments(job: str, schedule: str, zone: ZoneInfo) -> NextAfter:
    """The times of a cron expression of five fields, by the wall clock of a time zone.

    The hour field decides what happens when clocks change (decision 64):

    * An expression that names hours runs once for each matching time of the wall clock: when the clock first reaches or
      passes that time. A skipped time runs right after the gap, a repeated time runs in the first pass only.
    * An expression of every hour runs whenever the wall clock shows a matching time, so in both passes of a repeated
      hour, and not for a skipped hour.
    """
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise RegistrationError(
            f"job {job!r} has schedule={schedule!r}, and what reads cron expressions is not installed: "
            "pip install 'outboxio[cron]'"
        ) from error

    def next_match(wall: datetime) -> datetime:
        """The next matching time after a time of the wall clock, both without a zone."""
        return next(CronSim(schedule, wall))

    try:
        if len(schedule.split()) != 5:
            raise CronSimError("fields")
        runs_every_hour = len(CronSim(schedule, EPOCH).hours) == HOURS
        wall_clock = _WallClock(zone, next_match)
        next_after = wall_clock.next_showing if runs_every_hour else wall_clock.next_reached
        next_after(datetime(2000, 1, 1))
    except StopIteration:
        raise RegistrationError(f"job {job!r}: schedule {schedule!r} has no moment in the next 50 years") from None
    except (CronSimError, AttributeError):
        raise RegistrationError(
            f"job {job!r}: schedule is {schedule!r}; expected a cron expression of five fields: minute, hour, day of "
            "the month, month, day of the week; of a day that comes"
        ) from None
    return next_after


class _WallClock:
    """The wall clock of a zone. Instants are naive UTC, times of the wall clock are naive as well."""

    def __init__(self, zone: ZoneInfo, next_match: Callable[[datetime], datetime]) -> None:
        self._zone = zone
        self._next_match = next_match

    def next_reached(self, instant: datetime) -> datetime:
        """The first instant after ``instant`` at which the wall clock first reaches or passes a matching time."""
        wall = instant + self._offset(instant)
        while True:
            wall = self._next_match(wall)
            if (reached := self._reaches(wall)) > instant:
                return reached  # otherwise ``instant`` is in the second pass, and ``wall`` was reached in the first

    def next_showing(self, instant: datetime) -> datetime:
        """The first instant after ``instant`` at which the wall clock shows a matching time."""
        offset = self._offset(instant)
        while True:
            shows = self._next_match(instant + offset) - offset
            end = min(shows, instant + _DAY)
            change = self._change(instant, end, offset)
            if change is not None:
                instant, offset = change - _TICK, self._offset(change)
            elif end == shows:
                return shows
            else:  # the wall clock shows no matching time for days
                instant = max(end, shows - _DAY)
                offset = self._offset(instant)

    def _offset(self, instant: datetime) -> timedelta:
        offset = instant.replace(tzinfo=UTC).astimezone(self._zone).utcoffset()
        assert offset is not None
        return offset

    def _reaches(self, wall: datetime) -> datetime:
        """The instant at which the wall clock first shows ``wall``, or skips it."""
        instant = naive_utc(wall.replace(tzinfo=self._zone))
        if instant + (offset := self._offset(instant)) == wall:
            return instant
        before = naive_utc(wall.replace(tzinfo=self._zone, fold=1))
        change = self._change(before, instant, self._offset(before))
        assert change is not None, (wall, self._zone, offset)
        return change

    def _change(self, after: datetime, until: datetime, offset: timedelta) -> datetime | None:
        """The first instant in (``after``, ``until``] with a different offset than ``offset``, that of ``after``."""
        while after < until:
            end = min(after + _HOUR, until)
            if self._offset(end) != offset:
                while end - after > _TICK:
                    middle = after + (end - after) / 2
                    if self._offset(middle) == offset:
                        after = middle
                    else:
                        end = middle
                return end
            after = end
        return None
