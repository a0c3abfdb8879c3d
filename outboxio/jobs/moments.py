"""The moments of a job: those of a cron expression in a time zone, or those of a period. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from outboxio.errors import RegistrationError
from outboxio.support.clock import EPOCH, naive_utc

NextAfter = Callable[[datetime], datetime]
"""The next moment after a moment; both are naive UTC."""


def every_period(period: timedelta) -> NextAfter:
    """The multiples of a period since 1970, so that moments do not drift, and all processes know the same moments."""
    return lambda moment: EPOCH + ((moment - EPOCH) // period + 1) * period


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
    """The moments of a cron expression of five fields, by the wall clock of a time zone.

    At the change to summer time, a moment in the hour that is left out comes right after the gap. At the change back, a
    moment at a set hour comes once.
    """
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise RegistrationError(
            f"job {job!r} has schedule={schedule!r}, and what reads cron expressions is not installed: "
            "pip install 'outboxio[cron]'"
        ) from error

    def next_after(moment: datetime) -> datetime:
        local = moment.replace(tzinfo=UTC).astimezone(zone)
        return naive_utc(next(CronSim(schedule, local)))

    try:
        if len(schedule.split()) != 5:
            raise CronSimError("fields")
        next_after(datetime(2000, 1, 1))
    except StopIteration:
        raise RegistrationError(f"job {job!r}: schedule {schedule!r} has no moment in the next 50 years") from None
    except (CronSimError, AttributeError):
        raise RegistrationError(
            f"job {job!r}: schedule is {schedule!r}; expected a cron expression of five fields: minute, hour, day of "
            "the month, month, day of the week; of a day that comes"
        ) from None
    return next_after
