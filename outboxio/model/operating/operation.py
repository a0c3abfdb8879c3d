"""Operations: the recorded orders of operators."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Literal, TypeVar
from uuid import UUID

from msgspec import Struct


class OperationState(StrEnum):
    """The life of an operation. All states but RUNNING are ends."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    STOPPED = "STOPPED"
    """An operator has stopped the operation. The pieces that were done stay done."""
    FAILED = "FAILED"


class Operation(Struct, frozen=True, kw_only=True):
    """An order of an operator: a row of ``operations``, or the answer to a dry run, which writes no row."""

    id: UUID
    kind: str
    """The order: ``retry``, ``skip``, ``resume``, ``replay``, ``backfill``, ``pause``, ``unpause``, ``purge``,
    ``unsubscribe``, ``partitions``, ``pause_job``, ``unpause_job``, ``run_job_now``, ``remove_job``."""
    state: OperationState
    matched: int
    """The notifications that the filter has matched so far; all of them in the state DONE."""
    done: int
    """The notifications that the order has changed."""
    refused: int
    """The matched notifications that the order cannot change, such as a notification that has succeeded."""
    request: dict[str, object]
    """The filter and the other arguments."""
    actor: str
    origin: str
    """The place of the order: ``code``, ``cli``, ``dashboard``."""
    reason: str | None
    created_date: datetime
    updated_date: datetime
    finished_date: datetime | None
    error: str | None
    shard: str
    """The name of the shard; of an order on several shards, the names with commas."""
    is_dry_run: bool = False
    is_complete: bool = True
    """False if ``matched`` of a dry run is the bound of a count: there are more matches, or there may be."""

    @property
    def has_ended(self) -> bool:
        """True unless the operation is RUNNING."""
        return self.state is not OperationState.RUNNING


# --- A row of ``jobs`` ----------------------------------------------------------------------------
#
# A row of ``jobs``: a function that runs at set moments, once in the cluster for each moment.


JobState = Literal["WAITING", "RUNNING", "RETRYING"]
JobResult = Literal["SUCCEEDED", "FAILED", "TIMED_OUT", "INTERRUPTED"]


class JobRow(Struct, frozen=True):
    """A job as the database knows the job. Moments are naive UTC.

    - ``name``, ``schedule``: the job, and its moments in words.
    - ``state``: ``RUNNING`` while a process runs the job, ``RETRYING`` between two attempts, otherwise ``WAITING``.
    - ``next_date``: the next moment of the schedule. ``due_date``: when a process looks at the row.
    - ``term``: rises with each run. A run can end the row only under its own term.
    - ``attempts``, ``moment_date``, ``instance``, ``started_date``: the present run, or the last run.
    - ``lease``, ``lease_term``: the cluster lock under which the run began.
    - ``finished_date``, ``result``, ``error``: the end of the last run.
    - ``succeeded``, ``failed``, ``missed``: the numbers of runs, and of moments without a run.
    - ``paused_date``: when an operator paused the job. ``ordered_date``: when an operator ordered a run.

    Example::

        for job in await outbox.admin.jobs():
            print(job.name, job.state, job.next_date, job.result, job.error)
    """

    name: str
    schedule: str
    state: JobState
    next_date: datetime
    due_date: datetime
    term: int = 0
    attempts: int = 0
    moment_date: datetime | None = None
    lease: str = ""
    lease_term: int = 0
    instance: str = ""
    started_date: datetime | None = None
    finished_date: datetime | None = None
    result: JobResult | None = None
    error: str | None = None
    succeeded: int = 0
    failed: int = 0
    missed: int = 0
    paused_date: datetime | None = None
    ordered_date: datetime | None = None


# --- answers that are bounded: a page of a list, and a count --------------------------------------


T = TypeVar("T")


class Page(list[T]):
    """A part of a list, the newest first, and the text with which the list goes on.

    Example::

        page = await outbox.admin.list(state="DEAD")
        while page.next is not None:
            page = await outbox.admin.list(state="DEAD", after=page.next)
    """

    def __init__(self, rows: Iterable[T] = (), next: str | None = None) -> None:
        super().__init__(rows)
        self.next = next
        """The argument ``after`` for the next page; ``None`` at the end of the list.

        A page may have fewer rows than the limit, or none, and a text: the read ended at its bound.
        """


class BoundedCount(int):
    """A number that was counted up to a bound. ``str`` shows a count that ended at the bound as ``10,000+``.

    Example::

        dead = await outbox.admin.count(Filter(states=("DEAD",)))
        print(f"{dead} dead letters")  # 10,000+ dead letters
    """

    is_complete: bool
    """False if there are more matches, or there may be."""

    def __new__(cls, number: int, *, is_complete: bool = True) -> BoundedCount:
        made = super().__new__(cls, number)
        made.is_complete = is_complete
        return made

    def __str__(self) -> str:
        return f"{int(self):,}{'' if self.is_complete else '+'}"

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)
