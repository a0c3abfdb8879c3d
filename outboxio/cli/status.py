"""``outboxio status``: how much there is in each state, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from outboxio.cli.answer import Exit, exit_code, in_words, say, say_error, say_json
from outboxio.cli.inside import databases
from outboxio.errors import OutboxError
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
    "unroutable": "notifications whose handler no process has",
}
_ALARMING = {"DEAD", "EXPIRED", "unroutable"}


class Report(Struct):
    """What each shard answered."""

    counts: dict[str, dict[str, int]]
    errors: dict[str, OutboxError]

    @property
    def total(self) -> dict[str, int]:
        names = {name: None for counts in self.counts.values() for name in counts}
        return {name: sum(counts.get(name, 0) for counts in self.counts.values()) for name in names}


async def status(outbox: Outbox, *, as_json: bool) -> Exit:
    """Count, shard by shard: one that is down does not hide the others."""
    report = await _ask_all(outbox)
    for error in report.errors.values():
        say_error(in_words(error))
    if as_json:
        errors = {shard: in_words(error) for shard, error in report.errors.items()}
        say_json({"namespace": outbox.namespace, "total": report.total, "shards": report.counts, "errors": errors})
    elif report.counts:
        say("", _table(outbox.namespace, report), "")
    return max(map(exit_code, report.errors.values()), default=Exit.FINE)


async def _ask_all(outbox: Outbox) -> Report:
    report = Report({}, {})
    for shard, database in databases(outbox).items():
        try:
            await database.schema.check()
            report.counts[shard] = await outbox.admin.counts(shard=shard)
        except OutboxError as error:
            report.errors[shard] = error
    return report


def _table(namespace: str, report: Report) -> Table:
    columns: Sequence[tuple[str, Mapping[str, int]]] = list(report.counts.items())
    if len(columns) > 1:
        columns = [*columns, ("all", report.total)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column(Text(namespace, "bold"))
    for shard, _ in columns:
        table.add_column(shard, justify="right")
    table.add_column("")
    for name in report.total:
        if name == "undelivered":
            table.add_section()
        numbers = [_number(name, counts.get(name, 0)) for _, counts in columns]
        table.add_row(name, *numbers, Text(_MEANINGS.get(name, ""), "dim"))
    return table


def _number(name: str, number: int) -> Text:
    if number == 0:
        return Text("0", "dim")
    return Text(f"{number:,}", "bold red" if name in _ALARMING else "bold")
