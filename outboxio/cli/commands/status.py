"""``outboxio status``: how much there is in each state, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from outboxio.cli.answer import Exit, exit_code, in_words, line, say, say_error, say_json
from outboxio.cli.commands import glance
from outboxio.cli.commands.partitions import unowned_with_due_rows
from outboxio.cli.inside import admin_of, databases
from outboxio.errors import OutboxError
from outboxio.operations.partitions.owners import HandlerPartitions, in_ranges
from outboxio.operations.stranded import Stranded
from outboxio.outbox import Outbox

_MEANINGS = {
    "PENDING": "waits for its handler",
    "FAILED": "waits for its retry",
    "BLOCKED": "waits for its predecessor",
    "DYING": "given up, its hook is still to run",
    "SUCCEEDED": "handled",
    "EXPIRED": "outlived the retention window",
    "DEAD": "given up: look at its errors",
    "SKIPPED": "skipped by an operator",
    "undelivered": "events not fanned out yet, or without any handler",
    "unroutable": "notifications whose handler, or whose version of the event, no process has",
}
_ALARMING = {"DEAD", "EXPIRED", "unroutable"}


class Unowned(Struct, frozen=True):
    """Partitions with due notifications that no process owns."""

    shard: str
    handler_name: str
    partitions: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"no process owns {_partitions(self.partitions)} of handler {self.handler_name!r}, with due notifications: "
            "start a process that has the handler, or look in the log of the running processes"
        )


class Report(Struct):
    """The answers of the shards."""

    counts: dict[str, dict[str, int]]
    errors: dict[str, OutboxError]
    stranded: list[Stranded] = []
    partitions: list[HandlerPartitions] = []
    """The handlers with several partitions."""
    unowned: list[Unowned] = []

    @property
    def total(self) -> dict[str, int]:
        names = {name: None for counts in self.counts.values() for name in counts}
        return {name: sum(counts.get(name, 0) for counts in self.counts.values()) for name in names}


async def status(outbox: Outbox, fail_on: Sequence[str] = (), *, as_json: bool) -> Exit:
    """The overview, and the exact counts of each shard. An unreachable shard does not hide the counts of the rest.

    ``fail_on``: rules and levels of findings for which the answer is no.
    """
    glance.refuse_unknown_rules(fail_on)
    report, overview = await _ask_all(outbox), await admin_of(outbox).overview()
    for error in report.errors.values():
        say_error(in_words(error))
    if as_json:
        errors = {shard: in_words(error) for shard, error in report.errors.items()}
        answer = {"namespace": outbox.namespace, "total": report.total, "shards": report.counts, "errors": errors}
        owners = [
            {"shard": one.shard, "handler_name": one.handler_name, "number": one.number, "owners": _owners(one)}
            for one in report.partitions
        ]
        more = {"stranded": report.stranded, "partitions": owners, "unowned": report.unowned, "overview": overview}
        say_json(answer | more)
    elif report.counts:
        say("", glance.shown(overview), "", _table(outbox.namespace, report), "")
        if report.partitions:
            say(_table_of_owners(report), "")
        for unowned in report.unowned:
            say(line(("NO", "bold red"), f"  {unowned.shard}: {unowned}"))
        for stranded in report.stranded:
            say(line(("NO", "bold red"), f"  {stranded.shard}: {stranded}"))
    no = Exit.NO if glance.fails(overview, fail_on) else Exit.FINE
    return max(map(exit_code, report.errors.values()), default=no)


async def _ask_all(outbox: Outbox) -> Report:
    report = Report({}, {})
    for shard, database in databases(outbox).items():
        try:
            await database.schema.check()
            report.counts[shard] = await outbox.admin.counts(shard=shard)
            report.stranded += await outbox.admin.stranded(shard=shard)
            await _ask_partitions(outbox, shard, report)
        except OutboxError as error:
            report.errors[shard] = error
    return report


async def _ask_partitions(outbox: Outbox, shard: str, report: Report) -> None:
    """Ask for the owners of the handlers with several partitions."""
    for one in await outbox.admin.partitions(shard=shard):
        if one.active > 1:
            report.partitions.append(one)
            if unowned := await unowned_with_due_rows(outbox, one):
                report.unowned.append(Unowned(shard, one.handler_name, unowned))


def _owners(one: HandlerPartitions) -> dict[str, int]:
    """How many partitions each process owns."""
    return {owner: len(partitions) for owner, partitions in one.by_owner.items() if owner is not None}


def _table_of_owners(report: Report) -> Table:
    """For each handler with several partitions, the number of partitions of each process."""
    several = len(report.counts) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("handler", overflow="fold")
    table.add_column("process", overflow="fold")
    table.add_column("partitions", justify="right")
    for one in sorted(report.partitions, key=lambda one: (one.handler_name, one.shard)):
        name = line((one.handler_name, "bold"), f" on {one.shard}" if several else "")
        for owner, number in sorted(_owners(one).items()):
            table.add_row(name, line(owner), str(number))
            name = Text("")
        if free := len(one.by_owner.get(None, ())):
            table.add_row(name, Text("no process", "bold yellow"), str(free))
        table.add_section()
    return table


def _partitions(numbers: tuple[int, ...]) -> str:
    return f"partition{'s' * (len(numbers) > 1)} {in_ranges(numbers)}"


def _table(namespace: str, report: Report) -> Table:
    columns: Sequence[tuple[str, Mapping[str, int]]] = list(report.counts.items())
    if len(columns) > 1:
        columns = [*columns, ("all", report.total)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column(line((namespace, "bold")))
    for shard, _ in columns:
        table.add_column(line(shard), justify="right")
    table.add_column("")
    for name in report.total:
        if name == "undelivered":
            table.add_section()
        numbers = [_number(name, counts.get(name, 0)) for _, counts in columns]
        table.add_row(line(name), *numbers, Text(_MEANINGS.get(name, ""), "dim"))
    return table


def _number(name: str, number: int) -> Text:
    if number == 0:
        return Text("0", "dim")
    return Text(f"{number:,}", "bold red" if name in _ALARMING else "bold")
