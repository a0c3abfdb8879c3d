"""A row of ``jobs``: a function that runs at set moments, once in the cluster for each moment."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from msgspec import Struct

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
