"""``outboxio migrate``, ``outboxio check`` and ``outboxio alembic-revision``: the tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from outboxio.cli.internals import databases, handlers
from outboxio.cli.output import Exit, echo, echo_json, error_text, exit_code, indented, line
from outboxio.errors import OutboxError, RightsMissing, SchemaMissing
from outboxio.operations.partitions.upkeep import advice_on_partitions
from outboxio.outbox import Outbox
from outboxio.storage.protocols import Database
from outboxio.storage.schema import sql_files, sql_folder


async def migrate(outbox: Outbox, *, contract: bool, as_json: bool) -> Exit:
    """Bring the tables of every shard up to date, and list the applied and the pending files by shard."""
    applied = await outbox.migrate(contract=contract)
    pending = {shard: await database.schema.pending() for shard, database in databases(outbox).items()}
    if as_json:
        echo_json({"applied": applied, "pending": pending})
        return Exit.OK
    for shard, database in databases(outbox).items():
        text = f"applied {', '.join(applied[shard])}" if applied[shard] else "was up to date"
        echo(line(("ok", "green"), f"  {shard}: {text}"))
        _print_pending(shard, pending[shard], uses_alembic=await database.schema.uses_alembic())
    return Exit.OK


async def adopt(outbox: Outbox, *, dry_run: bool, as_json: bool) -> Exit:
    """Take over the tables of Ekbatan in every shard, or only print the statements."""
    statements = await outbox.adopt(dry_run=dry_run)
    if as_json:
        echo_json({"would run" if dry_run else "ran": statements})
        return Exit.OK
    for shard, listed in statements.items():
        if not listed:
            echo(line(("ok", "green"), f"  {shard}: the tables already belong to outboxio"))
        elif dry_run:
            echo(line(("WARN", "yellow"), f"  {shard}: would run {len(listed)} statements, then the later files:"))
            sys.stdout.write("".join(f"{statement};\n" for statement in listed))
        else:
            echo(line(("ok", "green"), f"  {shard}: took over the tables of Ekbatan, and applied the later files"))
    return Exit.OK


def print_files(dialect: str) -> Exit:
    """Print the SQL files of a dialect, in order."""
    for file in sql_files(dialect):
        sys.stdout.write(f"-- {file.name}\n\n{file.text}\n")
    return Exit.OK


async def plan(outbox: Outbox, *, contract: bool, as_json: bool) -> Exit:
    """Print the files that ``migrate`` would apply, without changing anything."""
    findings = [await _check_shard(outbox, shard, database) for shard, database in databases(outbox).items()]
    for finding in findings:
        if finding.error is not None and not finding.missing:
            raise finding.error
    pending = {
        shard: await database.schema.pending() if contract else () for shard, database in databases(outbox).items()
    }
    planned = {
        finding.shard: list(dict.fromkeys(
            file.rpartition("/")[2] for file in (*finding.files, *pending[finding.shard])
        ))
        for finding in findings
    }  # fmt: skip
    if as_json:
        echo_json({"would apply": planned})
        return Exit.OK
    for shard, files in planned.items():
        text = f"would apply {', '.join(files)}" if files else "is up to date"
        echo(line(("ok" if not files else "WARN", "green" if not files else "yellow"), f"  {shard}: {text}"))
    return Exit.OK


def _print_pending(shard: str, files: Sequence[str], *, uses_alembic: bool) -> None:
    if files:
        command = "alembic-revision" if uses_alembic else "migrate"
        fix = f"run outboxio {command} --contract when no process of an older version is running any more"
        echo(line(("WARN", "yellow"), f"  {shard}: {', '.join(files)} not applied yet: {fix}"))


def write_revision(path: str, *, message: str, revision: str | None, head: str, contract: bool, as_json: bool) -> Exit:
    """Write a revision for the Alembic configuration ``path``, and print the name of the file."""
    from outboxio.integrations import alembic  # Alembic is optional

    written = alembic.write_revision(
        alembic.configuration(path), message=message, revision=revision, head=head, contract=contract
    )
    if as_json:
        echo_json({"written": None if written is None else str(written)})
    elif written is None:
        echo(line(("ok", "green"), "  the revisions are up to date; no revision was written"))
    else:
        echo(line(("ok", "green"), f"  wrote {written}"))
    return Exit.OK


class Finding(Struct, kw_only=True):
    """The result of checking a shard. ``error`` is ``None`` if nothing is wrong."""

    shard: str
    dialect: str
    error: OutboxError | None = None
    pending: Sequence[str] = ()
    """The pending contract files."""
    uses_alembic: bool = False
    advice: Sequence[str] = ()
    """Remarks about partitions, none of them an error."""

    @property
    def missing(self) -> tuple[str, ...]:
        return self.error.missing if isinstance(self.error, SchemaMissing) else ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files that create the missing parts."""
        return self.error.files if isinstance(self.error, SchemaMissing) else ()

    @property
    def statements(self) -> tuple[str, ...]:
        """The statements that create the missing parts, or grant the missing rights."""
        if isinstance(self.error, SchemaMissing):
            return (*self.error.by_hand, *self.error.instead)
        return self.error.statements if isinstance(self.error, RightsMissing) else ()

    @property
    def fixes(self) -> Iterator[tuple[str, str]]:
        """How to fix the error, line by line."""
        if not isinstance(self.error, SchemaMissing):
            return
        for number, statement in enumerate(self.error.by_hand):
            yield "" if number else "  by hand", statement if statement.startswith("--") else f"{statement};"
        if self.error.can_migrate:
            yield "  to apply", ", ".join(self.error.files)
            alembic = "outboxio alembic-revision, then alembic upgrade head"
            yield "  with", alembic if self.error.uses_alembic else "outboxio migrate, or any tool that runs SQL files"
            for statement in self.error.instead:
                yield "  or run", f"{statement};"
        else:
            yield "  as in", ", ".join(self.error.files)

    def as_dict(self) -> dict[str, Any]:
        result = {
            "ok": self.error is None,
            "error": None if self.error is None else error_text(self.error),
            "missing": self.missing,
            "files": self.files,
        }
        more = {"statements": self.statements, "pending": self.pending, "advice": self.advice}
        return result | {name: values for name, values in more.items() if values}


async def check(outbox: Outbox, *, as_json: bool) -> Exit:
    """Check every shard, and print the findings."""
    findings = [await _check_shard(outbox, shard, database) for shard, database in databases(outbox).items()]
    wrong = [finding.error for finding in findings if finding.error is not None]
    if not wrong:
        await outbox.check()  # finds shards with the same database
    if as_json:
        echo_json({"ok": not wrong, "shards": {finding.shard: finding.as_dict() for finding in findings}})
    else:
        for finding in findings:
            _print_finding(finding)
    return max(map(exit_code, wrong), default=Exit.OK)


async def _check_shard(outbox: Outbox, shard: str, database: Database) -> Finding:
    try:
        await database.schema.check()
    except OutboxError as error:
        return Finding(shard=shard, dialect=database.dialect, error=error)
    pending = await database.schema.pending()
    advice = await advice_on_partitions(database, outbox.namespace, handlers(outbox))
    alembic = bool(pending) and await database.schema.uses_alembic()
    return Finding(shard=shard, dialect=database.dialect, pending=pending, uses_alembic=alembic, advice=advice)


def _print_finding(finding: Finding) -> None:
    if finding.error is None:
        echo(line(("ok", "green"), f"  {finding.shard}: reachable; all tables, columns and indexes exist"))
        _print_pending(finding.shard, finding.pending, uses_alembic=finding.uses_alembic)
        for sentence in finding.advice:
            echo(line(("WARN", "yellow"), f"  {finding.shard}: {sentence}"))
    elif not finding.missing:
        echo(line(("FAIL", "bold red"), f"  {error_text(finding.error)}"))
    else:
        echo(
            line(("FAIL", "bold red"), f"  {finding.shard}: {len(finding.missing)} missing"),
            indented(_fix_table(finding)),
        )


def _fix_table(finding: Finding) -> Table:
    """Return a table of what is missing and how to fix it."""
    table = Table.grid(padding=(0, 2))
    table.add_row("  missing", line(", ".join(finding.missing)))
    for what, text in finding.fixes:
        table.add_row(what, line(text))
    table.add_row("  files in", Text(str(sql_folder(finding.dialect))))
    return table
