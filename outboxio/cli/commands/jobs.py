"""``outboxio jobs``: the jobs of a service, and the operations on a job."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import astuple

from outboxio.cli.commands.operations import OutputFormat
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.internals import admin_of
from outboxio.cli.output import Exit, confirm, echo, echo_json, line, timestamp
from outboxio.operations.declared import DECLARED
from outboxio.operations.jobs import holders_of
from outboxio.outbox import Outbox

_EFFECTS = {
    "pause_job": "pause {} in all processes",
    "unpause_job": "resume {}",
    "run_job_now": "run {} now",
    "remove_job": "remove the row of {}, with its counts and its pause",
}


class JobOperations(Struct, frozen=True, kw_only=True):
    """The requested operations, each with the name of a job."""

    pause: str | None = None
    unpause: str | None = None
    run: str | None = None
    remove: str | None = None

    @property
    def operations(self) -> Sequence[tuple[str, str]]:
        """The kind of each operation, and the name of the job."""
        return [(kind, name) for kind, name in zip(_EFFECTS, astuple(self), strict=True) if name is not None]


async def jobs(outbox: Outbox, requested: JobOperations, output: OutputFormat) -> Exit:
    """Run the operations, and print the jobs afterwards."""
    admin = admin_of(outbox)
    if output.dry_run:
        for _, name in requested.operations:
            await admin.job(name)
        effects = " and ".join(_EFFECTS[kind].format(name) for kind, name in requested.operations)
        return output.printed(f"would {effects or 'change nothing'}")
    if requested.remove is not None and not confirm(
        f"{_EFFECTS['remove_job'].format(requested.remove)}?", yes=output.yes
    ):
        return Exit.FAILED
    for kind, name in requested.operations:
        await DECLARED[kind].run(admin, {"name": name}, output.reason)
    found = await admin.jobs()
    if output.as_json:
        echo_json(found)
        return Exit.OK
    if not found:
        echo(line(("no jobs yet: jobs appear when a process that has them enters running()", "dim")))
        return Exit.OK
    holders = holders_of(found, await admin.locks(), (await admin.overview()).instances)
    failed, held_by = Column("failed", right=True), Column("held by", spare=1)
    shown = Rows("job", "schedule", "state", "next (UTC)", "last result", failed, held_by)
    for job in found:
        state = "PAUSED" if job.paused_date is not None and job.state != "RUNNING" else job.state
        error = (job.error or "").partition("\n")[0]
        shown.add(
            line((job.name, "bold")), line(job.schedule), line(state), timestamp(job.next_date), line(job.result or ""),
            f"{job.failed:,}", line(holders.get(job.name, "no process")), below=line((error, "dim")),
        )  # fmt: skip
    echo(shown)
    return Exit.OK
