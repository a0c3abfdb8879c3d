"""``outboxio jobs``: the jobs of a service, and the orders about a job."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import astuple

from outboxio.cli.answer import Exit, ask, line, moment, say, say_json
from outboxio.cli.commands.operations import Manner
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import admin_of
from outboxio.operations.declared import DECLARED
from outboxio.operations.jobs import holders_of
from outboxio.outbox import Outbox

_DOES = {
    "pause_job": "start no run of {}, in any process",
    "unpause_job": "end the pause of {}",
    "run_job_now": "run {} now",
    "remove_job": "remove the row of {}, with its counts and its pause",
}


class Given(Struct, frozen=True, kw_only=True):
    """The orders on the command line, each with the name of a job."""

    pause: str | None = None
    unpause: str | None = None
    run: str | None = None
    remove: str | None = None

    @property
    def orders(self) -> Sequence[tuple[str, str]]:
        """The kind of each order, and the name of the job."""
        return [(kind, name) for kind, name in zip(_DOES, astuple(self), strict=True) if name is not None]


async def jobs(outbox: Outbox, given: Given, manner: Manner) -> Exit:
    """Carry out the orders, and print the jobs as they are then."""
    admin = admin_of(outbox)
    if manner.dry_run:
        for _, name in given.orders:
            await admin.job(name)
        told = " and ".join(_DOES[kind].format(name) for kind, name in given.orders)
        return manner.said(f"jobs would {told or 'change nothing'}")
    if given.remove is not None and not ask(f"{_DOES['remove_job'].format(given.remove)}?", yes=manner.yes):
        return Exit.NO
    for kind, name in given.orders:
        await DECLARED[kind].run(admin, {"name": name}, manner.reason)
    found = await admin.jobs()
    if manner.as_json:
        say_json(found)
        return Exit.FINE
    if not found:
        say(line(("no job has run or waits: jobs appear when a process with jobs enters running()", "dim")))
        return Exit.FINE
    holders = holders_of(found, await admin.locks(), (await admin.overview()).instances)
    failed, held_by = Column("failed", right=True), Column("held by", spare=1)
    shown = Rows("job", "schedule", "state", "next (UTC)", "last result", failed, held_by)
    for job in found:
        state = "PAUSED" if job.paused_date is not None and job.state != "RUNNING" else job.state
        told = (job.error or "").partition("\n")[0]
        shown.add(
            line((job.name, "bold")), line(job.schedule), line(state), moment(job.next_date), line(job.result or ""),
            f"{job.failed:,}", line(holders.get(job.name, "no process")), below=line((told, "dim")),
        )  # fmt: skip
    say(shown)
    return Exit.FINE
