"""Registers jobs, and computes their scheduled times from a cron expression in a time zone or from a period."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct

from outboxio.errors import ConfigurationError, RegistrationError
from outboxio.handlers.resources import UNKNOWN, Resources, is_factory, members, plain, resolved
from outboxio.model.event import checked_name
from outboxio.model.retry import RetryPolicy
from outboxio.support.clock import EPOCH, naive_utc
from outboxio.support.duration import parse_duration
from outboxio.support.signature import where_defined
from outboxio.support.text import briefly
from outboxio.transaction import Transaction

if TYPE_CHECKING:
    from outboxio.jobs.runner import JobSetup

NextAfter = Callable[[datetime], datetime]
"""Returns the first scheduled time after a time; both are naive UTC."""

HOURS = 24
MAX_COUNTED = 100  # scheduled times during a downtime that are counted one by one
_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)
_TICK = timedelta(microseconds=1)


def every_period(period: timedelta) -> NextAfter:
    """Return the multiples of a period since 1970, which do not drift and are the same in all processes."""
    return lambda time: EPOCH + ((time - EPOCH) // period + 1) * period


def newest_due(next_after: NextAfter, first: datetime, now: datetime) -> tuple[datetime, int]:
    """Return the last scheduled time up to ``now``, and the number of earlier ones since ``first``, at most 100.

    ``first`` is a scheduled time. Bisection takes about 15 calls of ``next_after`` for a downtime of a week, and
    at most 50 for any downtime. Iterating over all scheduled times could block the event loop.
    """
    newest, missed = first, 0
    while missed < MAX_COUNTED and (following := next_after(newest)) <= now:
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
    """Return the time zone with this name. Raises :class:`RegistrationError` for an unknown name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as error:
        raise RegistrationError(
            f"job {job!r}: timezone is {name!r}, which is not a known time zone; expected a name such as "
            "'Europe/Berlin'; on a system without time zones, pip install 'outboxio[cron]' provides them"
        ) from error


def cron_times(job: str, schedule: str, zone: ZoneInfo) -> NextAfter:
    """Return the times of a five-field cron expression, by the wall clock of a time zone.

    The hour field decides what happens when clocks change (decision 64):

    * An expression with specific hours runs once for each matching wall clock time, when the clock first reaches or
      passes it. A skipped time runs right after the gap, and a repeated time only in the first pass.
    * An expression for every hour runs whenever the wall clock shows a matching time: in both passes of a repeated
      hour, and not for a skipped hour.
    """
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise RegistrationError(
            f"job {job!r} has schedule={schedule!r}, but the parser for cron expressions is not installed: "
            "pip install 'outboxio[cron]'"
        ) from error

    def next_match(wall: datetime) -> datetime:
        """Return the next matching time after a wall clock time, both without a zone."""
        return next(CronSim(schedule, wall))

    try:
        if len(schedule.split()) != 5:
            raise CronSimError("fields")
        runs_every_hour = len(CronSim(schedule, EPOCH).hours) == HOURS
        wall_clock = _WallClock(zone, next_match)
        next_after = wall_clock.next_showing if runs_every_hour else wall_clock.next_reached
        next_after(datetime(2000, 1, 1))
    except StopIteration:
        raise RegistrationError(f"job {job!r}: schedule {schedule!r} never occurs in the next 50 years") from None
    except (CronSimError, AttributeError):
        raise RegistrationError(
            f"job {job!r}: schedule is {schedule!r}; expected a cron expression of five fields: minute, hour, day of "
            "the month, month, day of the week; for a date that exists"
        ) from None
    return next_after


class _WallClock:
    """The wall clock of a zone. Instants are naive UTC, and wall clock times are naive as well."""

    def __init__(self, zone: ZoneInfo, next_match: Callable[[datetime], datetime]) -> None:
        self._zone = zone
        self._next_match = next_match

    def next_reached(self, instant: datetime) -> datetime:
        """Return the next instant at which the wall clock reaches or passes a matching time for the first time."""
        wall = instant + self._offset(instant)
        while True:
            wall = self._next_match(wall)
            if (reached := self._reaches(wall)) > instant:
                return reached  # otherwise ``instant`` is in the second pass, and ``wall`` was reached in the first

    def next_showing(self, instant: datetime) -> datetime:
        """Return the first instant after ``instant`` at which the wall clock shows a matching time."""
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
        """Return the instant at which the wall clock first shows or skips ``wall``."""
        instant = naive_utc(wall.replace(tzinfo=self._zone))
        if instant + (offset := self._offset(instant)) == wall:
            return instant
        before = naive_utc(wall.replace(tzinfo=self._zone, fold=1))
        change = self._change(before, instant, self._offset(before))
        assert change is not None, (wall, self._zone, offset)
        return change

    def _change(self, after: datetime, until: datetime, offset: timedelta) -> datetime | None:
        """Return the first instant in (``after``, ``until``] whose offset is not ``offset``, that of ``after``."""
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


# --- a registered job, and the object that is passed to its function ------------------------------


class Job:
    """A run of a job, passed to its function.

    - ``name``: the name of the job.
    - ``scheduled_at``: the scheduled time of the run, naive UTC; for ``run_job_now``, the time of the request.
    - ``attempt``: 1 for the first run of a scheduled time.
    - ``stopping``: set when the process leaves ``running()``; a long job should then finish early.
    - ``tx``: the transaction, if the function takes ``tx``; otherwise reading it raises ConfigurationError.

    Example::

        @outbox.job("report", schedule="0 6 * * *", timezone="Europe/Berlin")
        async def report(job: Job) -> None:
            await write_report(day=job.scheduled_at.date())
    """

    def __init__(
        self, name: str, scheduled_at: datetime, attempt: int, stopping: asyncio.Event, tx: Transaction | None = None
    ) -> None:
        self.name = name
        self.scheduled_at = scheduled_at
        self.attempt = attempt
        self.stopping = stopping
        self._tx = tx

    @property
    def tx(self) -> Transaction:
        """The transaction of the run, which commits together with the record of the run."""
        if self._tx is None:
            raise ConfigurationError(f"job {self.name!r} has no transaction: add a parameter tx to its function")
        return self._tx


class JobSpec(Struct, frozen=True, kw_only=True):
    """A registered job."""

    name: str
    schedule: str
    """The schedule as text."""
    next_after: NextAfter
    call: Callable[[Job], Awaitable[object]]
    is_transactional: bool
    catch_up: bool
    timeout: timedelta | None
    retry: RetryPolicy
    jitter: timedelta
    where: str

    def starts_at(self, scheduled_at: datetime) -> datetime:
        """Return the scheduled time plus its jitter, which is the same in all processes."""
        digest = sha256(f"{self.name}\0{scheduled_at.isoformat()}".encode()).digest()
        return scheduled_at + self.jitter * (int.from_bytes(digest[:4], "big") / 2**32)

    def has(self, scheduled_at: datetime) -> bool:
        """Return True if the schedule has this time."""
        return self.next_after(scheduled_at - timedelta(microseconds=1)) == scheduled_at


LATE = timedelta(minutes=1)
"""A scheduled time is missed if no run has started within this time."""


class Due(Struct, frozen=True):
    """The decision about a due job: run it for ``scheduled_at``, unless ``None``, and continue at ``next_date``."""

    scheduled_at: datetime | None
    attempt: int
    next_date: datetime
    missed: int = 0


def decide(spec: JobSpec, scheduled_at: datetime, now: datetime, *, accepted: datetime | None = None) -> Due:
    """Decide what to run for a due job that waits for ``scheduled_at``.

    The newest due time runs if it is at most a minute late, with ``catch_up``, or if it was ``accepted`` in time but
    had to wait for a transaction. Older times are missed.
    """
    newest, missed = newest_due(spec.next_after, scheduled_at, now)
    after = spec.next_after(newest)
    if now - spec.starts_at(newest) > LATE and not spec.catch_up and newest != accepted:
        return Due(None, 0, after, missed + 1)
    return Due(newest, 1, after, missed)


J = TypeVar("J", bound=Callable[..., Awaitable[object]])

SHORTEST = timedelta(seconds=1)


class JobRegistration(ABC):
    """The base class of :class:`~outboxio.Outbox` that registers jobs."""

    def __init__(self, resources: object) -> None:
        self._jobs: dict[str, JobSpec] = {}
        self._job_resources = Resources(resources)

    @abstractmethod
    def _refuse_while_running(self) -> None: ...

    @abstractmethod
    def _setup_of_jobs(self) -> JobSetup:
        """The parts of the first shard that jobs use."""

    def job(
        self,
        name: str,
        *,
        schedule: str | None = None,
        every: timedelta | float | str | None = None,
        timezone: str = "UTC",
        catch_up: bool = False,
        timeout: timedelta | float | str | None = None,
        retry: RetryPolicy | None = None,
        jitter: timedelta | float | str = 0,
    ) -> Callable[[J], J]:
        """Register an async function that runs on a schedule, once in the cluster for each scheduled time.

        The scheduled times are those of ``schedule``, a cron expression of five fields in the time zone ``timezone``
        (needs ``outboxio[cron]``), or of ``every``, a period of at least 1 s: its multiples since 1970. ``jitter``
        delays each run by up to that time. Jobs are stored on the first shard of the outbox.

        The function may take ``job`` (a :class:`Job`), ``tx`` (a :class:`Transaction`, which commits together with the
        record of the run), and resources by type. Runs of a job do not overlap: if a scheduled time passes during a
        run, the next run starts afterwards, at most 1 minute late. Older scheduled times are missed: with
        ``catch_up=True`` the newest of them runs, otherwise the job waits for its next scheduled time.

        ``timeout`` (default: setting ``handler_timeout``) cancels a run. ``retry`` is a :class:`RetryPolicy` for failed
        runs, and for runs whose process died; the default is a single attempt.

        Raises :class:`RegistrationError` if the name is taken, if both or neither of ``schedule`` and ``every`` are
        given, and for an invalid expression, time zone or function.

        Example::

            @outbox.job("close-day", schedule="0 0 * * *", timezone="Europe/Berlin", retry=RetryPolicy(max_attempts=3))
            async def close_day(tx: Transaction) -> None:
                await tx.execute("UPDATE days SET closed = TRUE WHERE day < CURRENT_DATE")
        """

        def register(function: Any) -> Any:
            self._refuse_while_running()
            checked, where = checked_name(name, "job name"), where_defined(function)
            if (other := self._jobs.get(checked)) is not None:
                raise RegistrationError(
                    f"job name {checked!r} is registered twice: by {other.where} and {where}; names are stored in the "
                    "table jobs and must be unique"
                )
            if (schedule is None) == (every is None):
                raise RegistrationError(
                    f"job {checked!r} has {'both' if schedule else 'neither'} of schedule and every; give one of them"
                )
            call, is_transactional = self._call_of(checked, function, where)
            if schedule is not None:
                zone = zone_of(checked, timezone)
                text, next_after = f"{schedule} {timezone}", cron_times(checked, schedule, zone)
            else:
                period = parse_duration(every, key=f"every of job {checked!r}")
                if period < SHORTEST:
                    raise RegistrationError(f"job {checked!r}: every is {briefly(every)}; expected at least 1 s")
                text, next_after = f"every {period.total_seconds():g} s", every_period(period)
            if retry is not None and not isinstance(retry, RetryPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
                raise RegistrationError(f"job {checked!r}: retry is {briefly(retry)}; expected RetryPolicy(...)")
            self._jobs[checked] = JobSpec(
                name=checked, schedule=text, next_after=next_after, call=call, is_transactional=is_transactional,
                catch_up=catch_up, retry=retry or RetryPolicy(max_attempts=1), where=where,
                timeout=None if timeout is None else parse_duration(timeout, key=f"timeout of job {checked!r}"),
                jitter=parse_duration(jitter, key=f"jitter of job {checked!r}"),
            )  # fmt: skip
            return function

        return register

    def _call_of(self, name: str, function: Any, where: str) -> tuple[Callable[[Job], Awaitable[object]], bool]:
        if not inspect.iscoroutinefunction(function):
            raise RegistrationError(f"job {name!r}: {where} is not async; write async def, and await asyncio.to_thread")
        sources: dict[str, Callable[[Job], Any]] = {}
        takes_tx = False
        for parameter in inspect.signature(function).parameters.values():
            annotation = resolved(parameter.annotation, plain(function))
            forms = [] if annotation is UNKNOWN else list(members(annotation))
            if Transaction in forms or (not forms and parameter.name == "tx"):
                takes_tx, sources[parameter.name] = True, _tx_of
            elif Job in forms or (not forms and parameter.name == "job"):
                sources[parameter.name] = _itself
            elif (key := self._job_resources.key_of(annotation)) is not None:
                value = self._job_resources[key]
                if is_factory(key, value):
                    raise RegistrationError(
                        f"job {name!r}: parameter {parameter.name!r} of {where} is a resource that a factory creates "
                        "from an envelope; a job has no envelope, so create the resource in the job"
                    )
                sources[parameter.name] = _always(value)
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
            ):  # fmt: skip
                raise RegistrationError(
                    f"job {name!r}: unknown parameter {parameter.name!r} of {where}; a job may take "
                    f"job: Job, tx: Transaction, and resources by type ({self._job_resources.type_names})"
                )
        return (lambda job: function(**{key: source(job) for key, source in sources.items()})), takes_tx


def _always(value: Any) -> Callable[[Job], Any]:
    return lambda _: value


async def run_here(outbox: JobRegistration, name: str, scheduled_at: datetime | None, attempt: int) -> None:
    """Run a job once in this task, without its row, for :func:`outboxio.testing.run_job`."""
    jobs, setup = outbox._jobs, outbox._setup_of_jobs()  # pyright: ignore[reportPrivateUsage]  # of this module
    spec = jobs.get(name)
    if spec is None:
        known = ", ".join(map(repr, jobs)) or "none"
        raise ConfigurationError(f"no job is named {briefly(name)}; the jobs of this outbox are {known}")
    from outboxio.jobs.runner import JobRunner

    runner = JobRunner(setup, asyncio.Event())
    await runner.run_alone(spec, setup.clock() if scheduled_at is None else naive_utc(scheduled_at), attempt)


def _tx_of(job: Job) -> Transaction:
    return job.tx


def _itself(job: Job) -> Job:
    return job
