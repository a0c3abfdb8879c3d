"""``outboxio jobs``: the jobs of a service, and the orders about a job."""

from __future__ import annotations

from outboxio.cli.answer import Exit, line, say, say_json
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import admin_of
from outboxio.cli.shown import moment
from outboxio.outbox import Outbox


async def jobs(
    outbox: Outbox, pause: str | None, unpause: str | None, run: str | None, remove: str | None, *, as_json: bool
) -> Exit:
    """Carry out the orders, and print the jobs as they are then."""
    admin = admin_of(outbox)
    if pause is not None:
        await admin.pause_job(pause)
    if unpause is not None:
        await admin.unpause_job(unpause)
    if run is not None:
        await admin.run_job_now(run)
    if remove is not None:
        await admin.remove_job(remove)
    found = await admin.jobs()
    if as_json:
        say_json(found)
        return Exit.FINE
    if not found:
        say(line(("no job has run or waits: jobs appear when a process with jobs enters running()", "dim")))
        return Exit.FINE
    shown = Rows("job", "schedule", "state", "next (UTC)", "last result", Column("failed", right=True))
    for job in found:
        state = "PAUSED" if job.paused_date is not None and job.state != "RUNNING" else job.state
        told = (job.error or "").partition("\n")[0]
        shown.add(
            line((job.name, "bold")), line(job.schedule), line(state), moment(job.next_date), line(job.result or ""),
            f"{job.failed:,}", below=line((told, "dim")),
        )  # fmt: skip
    say(shown)
    return Exit.FINE
