"""The rules of the verdict about jobs. Pure functions, as the rules about handlers (``rules.py``)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import timedelta

from outboxio.jobs.job import LATE
from outboxio.model.operating.operation import JobRow
from outboxio.operations.overview.facts import ShardFacts
from outboxio.operations.overview.values import Finding
from outboxio.operations.overview.wording import brief, of, past, spoken

DOES_NOT_END = timedelta(seconds=10)
"""A run may last its timeout and 30 s. After 10 further seconds, any process with the job has looked at the row."""


def late_jobs(facts: ShardFacts) -> list[JobRow]:
    """The jobs that have been due for more than a minute, and that no process runs."""
    return [
        job
        for job in facts.jobs
        if (job.paused_date is None or job.ordered_date is not None)
        and facts.age(job.due_date) > LATE.total_seconds()
        and not (job.state == "RUNNING" and _is_alive(facts, job.instance))
    ]


def job_late(facts: ShardFacts) -> Iterator[Finding]:
    """A job has been due for more than a minute, and no process runs the job."""
    if not any(instance.is_alive for instance in facts.instances):
        return  # a fault is told once: no process works
    for job in late_jobs(facts):
        due = spoken(facts.age(job.due_date))
        sentence = f"Job `{job.name}` is late: the job has been due for {due}, and no process runs the job."
        if job.state == "RUNNING":
            sentence = (
                f"Job `{job.name}` is late: process {job.instance} ended during the run, and no process took over."
            )
        yield _finding(facts, job, "job_late", sentence, "outboxio instances")


def job_failing(facts: ShardFacts) -> Iterator[Finding]:
    """The last run of a job has failed, and is not tried again."""
    late = late_jobs(facts)
    for job in facts.jobs:
        if has_failed(job) and job.paused_date is None and job not in late and job.finished_date is not None:
            error = "" if not job.error else f": {brief(job.error.partition(chr(10))[0])}"
            after = "" if job.state == "RUNNING" else f", after {of(job.attempts, 'attempt')}"
            ended = past(facts.age(job.finished_date))
            sentence = f"Job `{job.name}` ended {job.result} {ended}{after}{error}."
            yield _finding(facts, job, "job_failing", sentence, f"outboxio jobs --run {shlex.quote(job.name)}")


def job_stuck(facts: ShardFacts) -> Iterator[Finding]:
    """The run of a job goes on after its cancellation."""
    for job in facts.jobs:
        over = job.state == "RUNNING" and facts.age(job.due_date) > DOES_NOT_END.total_seconds()
        if over and _is_alive(facts, job.instance) and job.started_date is not None:
            began = past(facts.age(job.started_date))
            what = f"the run began {began}, and goes on after its cancellation"
            sentence = f"Job `{job.name}` does not end in process {job.instance}: {what}."
            yield _finding(facts, job, "job_stuck", sentence, "outboxio instances")


def has_failed(job: JobRow) -> bool:
    """True if the last run that ended was not a success, and no retry of that run is due or goes on."""
    is_retried = job.state == "RETRYING" or (job.state == "RUNNING" and job.attempts > 1)
    return job.result not in (None, "SUCCEEDED") and not is_retried


def _is_alive(facts: ShardFacts, instance: str) -> bool:
    return any(one.instance == instance and one.is_alive for one in facts.instances)


def _finding(facts: ShardFacts, job: JobRow, rule: str, sentence: str, remedy: str) -> Finding:
    return Finding(rule=rule, level="degraded", sentence=sentence, remedy=remedy, shard=facts.name, job=job.name)
