"""The scheduled times of a job: those of a cron expression in a time zone, or the multiples of a period. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct

from outboxio.errors import ConfigurationError, RegistrationError
from outboxio.model.retry import RetryPolicy
from outboxio.support.clock import EPOCH, naive_utc
from outboxio.transaction import Transaction

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


# --- a registered job, and the object that a job's function gets ----------------------------------


class Job:
    """A run of a job, as its function sees the run.

    - ``name``: the name of the job.
    - ``moment``: the moment of the schedule that the run is for, naive UTC; of an ordered run, when it was ordered.
    - ``attempt``: 1 for the first run of a moment.
    - ``stopping``: set when the process leaves ``running()``; a long job should then come to its end.
    - ``tx``: the transaction of a function that takes ``tx``; otherwise reading ``tx`` raises ConfigurationError.

    Example::

        @outbox.job("report", schedule="0 6 * * *", timezone="Europe/Berlin")
        async def report(job: Job) -> None:
            await write_report(day=job.moment.date())
    """

    def __init__(
        self, name: str, moment: datetime, attempt: int, stopping: asyncio.Event, tx: Transaction | None = None
    ) -> None:
        self.name = name
        self.moment = moment
        self.attempt = attempt
        self.stopping = stopping
        self._tx = tx

    @property
    def tx(self) -> Transaction:
        """The transaction of the run, which commits together with the record of the run."""
        if self._tx is None:
            raise ConfigurationError(f"job {self.name!r} has no transaction: let its function take a parameter tx")
        return self._tx


class JobSpec(Struct, frozen=True, kw_only=True):
    """A registered job."""

    name: str
    schedule: str
    """The moments in words."""
    next_after: NextAfter
    call: Callable[[Job], Awaitable[object]]
    is_transactional: bool
    catch_up: bool
    timeout: timedelta | None
    retry: RetryPolicy
    jitter: timedelta
    where: str

    def starts_at(self, moment: datetime) -> datetime:
        """The moment plus the jitter of the moment, which is equal in all processes."""
        digest = sha256(f"{self.name}\0{moment.isoformat()}".encode()).digest()
        return moment + self.jitter * (int.from_bytes(digest[:4], "big") / 2**32)

    def has(self, moment: datetime) -> bool:
        """True if the schedule has this time."""
        return self.next_after(moment - timedelta(microseconds=1)) == moment


LATE = timedelta(minutes=1)
"""A moment is missed if no run has begun within this time."""


class Due(Struct, frozen=True):
    """The decision about a due job: run the job for ``moment`` unless ``None``, and continue at ``next_date``."""

    moment: datetime | None
    attempt: int
    next_date: datetime
    missed: int = 0


def decide(spec: JobSpec, moment: datetime, now: datetime, *, accepted: datetime | None = None) -> Due:
    """The decision about a job that waits for ``moment``, and is due.

    The newest due time runs if it is at most a minute late, or with ``catch_up``, or if it was ``accepted`` in time and
    has waited for a transaction since. Older times are missed.
    """
    newest, missed = newest_due(spec.next_after, moment, now)
    after = spec.next_after(newest)
    if now - spec.starts_at(newest) > LATE and not spec.catch_up and newest != accepted:
        return Due(None, 0, after, missed + 1)
    return Due(newest, 1, after, missed)
