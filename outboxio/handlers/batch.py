"""Batches: handlers that get many events in a call, at once or at set times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

from outboxio.errors import ConfigurationError, SettingsError
from outboxio.support.duration import OptionalDuration, default_duration, parse_duration

DEFAULT_WAIT = timedelta(seconds=1)
LARGEST_BATCH = 10_000


class Batch(Struct, frozen=True, kw_only=True):
    """How the events of a handler are gathered into calls.

    ``size``: the most events of a call, 1 to 10,000. ``max_wait``: how long an event waits for a full call (default:
    1 s; zero: no wait). ``schedule``: a cron expression with five fields, in UTC, instead of ``max_wait``: events wait
    for the first such moment after the oldest event was recorded. If that moment passed while no process ran, the call
    is made at the next start. Needs ``outboxio[cron]``.

    Raises :class:`~outboxio.SettingsError` for a value or a combination that makes no sense.

    Example::

        @outbox.handler(MoneyDeposited, name="daily-report", batch=Batch(size=1000, schedule="0 0 * * *"))
        async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None: ...
    """

    size: int = 500
    max_wait: OptionalDuration = default_duration(None)
    schedule: str | None = None

    def __post_init__(self) -> None:
        size: Any = self.size  # callers may not be typed
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_BATCH:
            raise SettingsError("Batch.size", size, f"a whole number from 1 to {LARGEST_BATCH}")
        if self.max_wait is not None:
            if self.schedule is not None:
                raise SettingsError("Batch.max_wait", self.max_wait, "no max_wait beside schedule, which says when")
            force_setattr(self, "max_wait", parse_duration(self.max_wait, key="Batch.max_wait"))
        if self.schedule is not None:
            moments_of(self.schedule)

    @property
    def longest_wait(self) -> float:
        """The seconds that an event waits for a full call, at most."""
        return (DEFAULT_WAIT if self.max_wait is None else self.max_wait).total_seconds()


def moments_of(schedule: str) -> Callable[[datetime], datetime]:
    """A function from a moment to the next moment of a cron expression."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise ConfigurationError(
            f"Batch.schedule is {schedule!r}, and what reads cron expressions is not installed: "
            "pip install 'outboxio[cron]'"
        ) from error

    def next_after(moment: datetime) -> datetime:
        try:
            return next(CronSim(schedule, moment))
        except StopIteration:
            raise SettingsError("Batch.schedule", schedule, "a time that comes, at least once in 50 years") from None

    try:
        if len(schedule.split()) != 5:
            raise CronSimError("fields")
        next_after(datetime(2000, 1, 1))
    except (CronSimError, AttributeError):
        raise SettingsError(
            "Batch.schedule", schedule,
            "a cron expression of five fields: minute, hour, day of the month, month, day of the week",
        ) from None  # fmt: skip
    return next_after
