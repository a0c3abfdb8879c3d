"""``outboxio migrate`` and ``outboxio check``: the tables."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from outboxio.cli.answer import Exit, exit_code, in_words, indented, say, say_json
from outboxio.cli.inside import databases
from outboxio.errors import OutboxError, SchemaMissing
from outboxio.outbox import Outbox
from outboxio.storage.protocols import Database
from outboxio.storage.schema import sql_folder


async def migrate(outbox: Outbox, *, as_json: bool) -> Exit:
    """Bring the tables of every shard up to date, and say what was applied where."""
    applied = await outbox.migrate()
    if as_json:
        say_json({"applied": applied})
        return Exit.FINE
    for shard, files in applied.items():
        text = f"applied {', '.join(files)}" if files else "was up to date"
        say(f"[green]ok[/]  {shard}: {text}")
    return Exit.FINE


class Finding(Struct, kw_only=True):
    """What is wrong with one shard; nothing, if ``error`` is None."""

    shard: str
    dialect: str
    error: OutboxError | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        return self.error.missing if isinstance(self.error, SchemaMissing) else ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files that bring what is missing."""
        return self.error.files if isinstance(self.error, SchemaMissing) else ()

    def as_dict(self) -> dict[str, Any]:
        message = None if self.error is None else in_words(self.error)
        return {"ok": self.error is None, "error": message, "missing": self.missing, "files": self.files}


async def check(outbox: Outbox, *, as_json: bool) -> Exit:
    """Look at every shard, and say that all is well, or for each what is not."""
    findings = [await _look_at(shard, database) for shard, database in databases(outbox).items()]
    wrong = [finding.error for finding in findings if finding.error is not None]
    if not wrong:
        await outbox.check()  # what can only be seen from all shards together
    if as_json:
        say_json({"ok": not wrong, "shards": {finding.shard: finding.as_dict() for finding in findings}})
    else:
        for finding in findings:
            _tell(finding)
    return max(map(exit_code, wrong), default=Exit.FINE)


async def _look_at(shard: str, database: Database) -> Finding:
    try:
        await database.schema.check()
    except OutboxError as error:
        return Finding(shard=shard, dialect=database.dialect, error=error)
    return Finding(shard=shard, dialect=database.dialect)


def _tell(finding: Finding) -> None:
    if finding.error is None:
        say(f"[green]ok[/]  {finding.shard}: reachable, and every table, column and index is there")
    elif not finding.missing:
        say(f"[bold red]NO[/]  {in_words(finding.error)}")
    else:
        say(f"[bold red]NO[/]  {finding.shard}: {len(finding.missing)} missing", indented(_remedy(finding)))


def _remedy(finding: Finding) -> Table:
    """What is missing, and what brings it."""
    table = Table.grid(padding=(0, 2))
    table.add_row("  missing", Text(", ".join(finding.missing)))
    table.add_row("  to apply", Text(", ".join(finding.files)))
    table.add_row("  with", Text("outboxio migrate, or any tool that runs SQL files"))
    table.add_row("  files in", Text(str(sql_folder(finding.dialect))))
    return table
