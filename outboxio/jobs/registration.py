"""The part of an outbox that registers jobs."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from outboxio.errors import ConfigurationError, RegistrationError
from outboxio.handlers.resources import UNKNOWN, Resources, is_factory, members, plain, resolved
from outboxio.jobs.job import Job, JobSpec, cron_moments, every_period, zone_of
from outboxio.model.event import checked_name
from outboxio.model.retry import RetryPolicy
from outboxio.support.clock import naive_utc
from outboxio.support.duration import parse_duration
from outboxio.support.signature import where_defined
from outboxio.support.text import briefly
from outboxio.transaction import Transaction

if TYPE_CHECKING:
    from outboxio.jobs.runner import JobSetup

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
        """The parts of the first shard that jobs work with."""

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
        """Register an async function that runs at set moments, once in the cluster for each moment.

        The moments are those of ``schedule``, a cron expression of five fields by the wall clock of ``timezone`` (needs
        ``outboxio[cron]``), or those of ``every``, a period of at least 1 s: the multiples of the period since 1970.
        ``jitter`` delays each run by up to that time. The first shard of the outbox keeps the jobs.

        The function may take ``job`` (a :class:`Job`), ``tx`` (a :class:`Transaction`, which commits together with the
        record of the run), and resources by type. A job does not overlap with itself. A moment that comes during a run
        begins after the run, at most 1 minute late. An older moment is missed: with ``catch_up=True`` the newest missed
        moment runs, otherwise the job waits for its next moment.

        ``timeout`` (default: setting ``handler_timeout``) cancels a run. ``retry`` is a :class:`RetryPolicy` for failed
        runs, and for runs whose process has died; the default is a single attempt.

        Raises :class:`RegistrationError` if the name is taken, if both or neither of ``schedule`` and ``every`` are
        given, and for an expression, a time zone or a function that cannot work.

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
                told, next_after = f"{schedule} {timezone}", cron_moments(checked, schedule, zone)
            else:
                period = parse_duration(every, key=f"every of job {checked!r}")
                if period < SHORTEST:
                    raise RegistrationError(f"job {checked!r}: every is {briefly(every)}; expected at least 1 s")
                told, next_after = f"every {period.total_seconds():g} s", every_period(period)
            if retry is not None and not isinstance(retry, RetryPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
                raise RegistrationError(f"job {checked!r}: retry is {briefly(retry)}; expected RetryPolicy(...)")
            self._jobs[checked] = JobSpec(
                name=checked, schedule=told, next_after=next_after, call=call, is_transactional=is_transactional,
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
                        f"job {name!r}: parameter {parameter.name!r} of {where} is a resource that a factory makes "
                        "from an envelope; a job has no envelope, so make the resource in the job"
                    )
                sources[parameter.name] = _always(value)
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
            ):  # fmt: skip
                raise RegistrationError(
                    f"job {name!r}: nothing is known for parameter {parameter.name!r} of {where}; a job may take "
                    f"job: Job, tx: Transaction, and resources by type ({self._job_resources.told})"
                )
        return (lambda job: function(**{key: source(job) for key, source in sources.items()})), takes_tx


def _always(value: Any) -> Callable[[Job], Any]:
    return lambda _: value


async def run_here(outbox: JobRegistration, name: str, moment: datetime | None, attempt: int) -> None:
    """Run a job once in this task, without its row, for :func:`outboxio.testing.run_job`."""
    jobs, setup = outbox._jobs, outbox._setup_of_jobs()  # pyright: ignore[reportPrivateUsage]  # of this module
    spec = jobs.get(name)
    if spec is None:
        known = ", ".join(map(repr, jobs)) or "none"
        raise ConfigurationError(f"no job is named {briefly(name)}; the jobs of this outbox are {known}")
    from outboxio.jobs.runner import JobRunner

    runner = JobRunner(setup, asyncio.Event())
    await runner.run_alone(spec, setup.clock() if moment is None else naive_utc(moment), attempt)


def _tx_of(job: Job) -> Transaction:
    return job.tx


def _itself(job: Job) -> Job:
    return job
