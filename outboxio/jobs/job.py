"""A registered job, and the object that a job's function gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from hashlib import sha256

from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.jobs.moments import NextAfter, newest_due
from outboxio.model.retry import RetryPolicy
from outboxio.transaction import Transaction


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
