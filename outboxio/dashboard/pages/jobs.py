"""All jobs, by name: the last run, the next moment, and what an operator may order."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS
from outboxio.dashboard.pages.handlers import links_of, overview_for
from outboxio.dashboard.view import View
from outboxio.model.operating.job import JobRow
from outboxio.operations.overview.values import Finding


class JobsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    jobs: list[JobRow]
    findings: tuple[Finding, ...]
    """What is wrong with jobs."""
    read_date: datetime


async def jobs(asked: Asked) -> View:
    """The jobs, those with a finding first."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    overview = await overview_for(asked)
    findings = tuple(finding for finding in overview.findings if finding.job is not None)
    wrong = {finding.job for finding in findings}
    found = await asked.admin.jobs()
    if not asked.access.may("payloads"):
        found = [replace(job, error=_type_of(job)) for job in found]
    facts = JobsFacts(
        jobs=sorted(found, key=lambda job: (job.name not in wrong, job.name)),
        findings=findings,
        read_date=overview.read_date,
    )
    return View(
        template="jobs.html", title="Jobs", facts=facts,
        shown={"links": links_of(facts.findings, asked), "wrong": wrong},
    )  # fmt: skip


def _type_of(job: JobRow) -> str | None:
    """The error without its message, which may quote a payload. The text of an interruption is outboxio's own."""
    return job.error if job.error is None or job.result == "INTERRUPTED" else job.error.partition(":")[0]
