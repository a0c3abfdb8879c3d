"""``outboxio jobs``: the jobs of a service, and the orders about a job."""

from __future__ import annotations

from msgspec import Struct

from outboxio.cli.answer import Exit, ask, line, moment, say, say_json
from outboxio.cli.commands.operations import Manner
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import admin_of
from outboxio.operations.admin import Admin
from outboxio.outbox import Outbox


class Given(Struct, frozen=True, kw_only=True):
    """The orders on the command line, each with the name of a job."""

    pause: str | None = None
    unpause: str | None = None
    run: str | None = None
    remove: str | None = None

    def told(self) -> dict[str, str]:
        """What each order does, by the name of the job."""
        words = {
            self.pause: "start no run of {}, in any process",
            self.unpause: "end the pause of {}",
            self.run: "run {} now",
            self.remove: "remove the row of {}, with its counts and its pause",
        }
        return {name: does.format(name) for name, does in words.items() if name is not None}


async def jobs(outbox: Outbox, given: Given, manner: Manner) -> Exit:
    """Carry out the orders, and print the jobs as they are then."""
    admin = admin_of(outbox)
    if manner.dry_run:
        for name in given.told():
            await admin.job(name)
        return manner.said(f"jobs would {' and '.join(given.told().values()) or 'change nothing'}")
    if given.remove is not None and not ask(f"{given.told()[given.remove]}?", yes=manner.yes):
        return Exit.NO
    await _carry_out(admin, given, manner.reason)
    found = await admin.jobs()
    if manner.as_json:
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


async def _carry_out(admin: Admin, given: Given, reason: str | None) -> None:
    if given.pause is not None:
        await admin.pause_job(given.pause, reason=reason)
    if given.unpause is not None:
        await admin.unpause_job(given.unpause, reason=reason)
    if given.run is not None:
        await admin.run_job_now(given.run, reason=reason)
    if given.remove is not None:
        await admin.remove_job(given.remove, reason=reason)
