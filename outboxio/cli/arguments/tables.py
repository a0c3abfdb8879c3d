"""Parsers of numbers, and the commands for the tables: ``migrate``, ``check``, ``alembic-revision``."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Annotated, Literal

import typer

from outboxio.cli.commands import schema
from outboxio.cli.options import Common, Target, command
from outboxio.cli.output import Exit, run_command
from outboxio.cli.target import opened
from outboxio.support.text import briefly

_LONGEST = 30  # characters


def whole(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a parser of whole numbers."""
    expected = f"a whole number, {least} or more" if most == 2**63 - 1 else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        plain = str(text).strip()
        if not (plain.isascii() and plain.isdigit() and len(plain) <= _LONGEST and least <= int(plain) <= most):
            raise typer.BadParameter(f"{briefly(text)}; expected {expected}")
        return int(plain)

    return parse


def seconds(least: float) -> Callable[[str], float]:
    """Return a parser of numbers of seconds."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not (isfinite(number) and number >= least):
            raise typer.BadParameter(f"{briefly(text)}; expected a number of seconds, {least:g} or more")
        return number

    return parse


# --- commands for the tables: ``migrate``, ``check``, ``alembic-revision`` ------------------------


PANEL = "Schema"

Dialect = Literal["postgres", "mysql", "mariadb", "sqlite"]
Contract = Annotated[
    bool,
    typer.Option("--contract", help="Also drop what only older versions use; none of them may still be running."),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, example="migrate app.main:outbox", rich_help_panel=PANEL)(migrate)
    command(app, example="check --database postgresql://localhost/app", rich_help_panel=PANEL)(check)
    command(app, "alembic-revision", example="alembic-revision --config alembic.ini", rich_help_panel=PANEL)(
        alembic_revision
    )


def migrate(
    common: Common,
    target: Target = None,
    contract: Contract = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files that would be applied.")] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Take over the tables of Ekbatan first.")] = False,
    sql: Annotated[
        Dialect | None,
        typer.Option(
            metavar="DIALECT",
            help="Print the SQL files of postgres, mysql, mariadb or sqlite. Reads no database.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Create the tables, or bring them up to date.

    Safe to run at every deployment, and from several machines at once. Your own tables are never touched.
    """

    async def work() -> Exit:
        if sql is not None:
            return schema.print_files(sql)
        if adopt:
            async with opened(common.named(target)) as outbox:
                return await schema.adopt(outbox, dry_run=dry_run, as_json=common.json)
        if dry_run:
            async with opened(common.named(target)) as outbox:
                return await schema.plan(outbox, contract=contract, as_json=common.json)
        async with opened(common.named(target)) as outbox:
            return await schema.migrate(outbox, contract=contract, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def check(common: Common, target: Target = None) -> None:
    """Check settings, connections, tables, columns and indexes.

    Lists what is missing and the files that create it. Changes nothing.
    """

    async def work() -> Exit:
        async with opened(common.named(target)) as outbox:
            return await schema.check(outbox, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def alembic_revision(
    config: Annotated[str, typer.Option(metavar="FILE", help="Alembic configuration file.")] = "alembic.ini",
    message: Annotated[
        str, typer.Option("--message", "-m", metavar="TEXT", help="Message of the revision.")
    ] = "outboxio tables",
    rev_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Id of the revision; random by default.", show_default=False)
    ] = None,
    head: Annotated[str, typer.Option(metavar="REVISION", help="Parent revision.")] = "head",
    contract: Contract = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False,
) -> None:
    """Write an Alembic revision that creates the tables, or brings them up to date.

    The revision applies the files of the installed outboxio that no earlier revision applies.
    """

    async def work() -> Exit:
        return schema.write_revision(
            config, message=message, revision=rev_id, head=head, contract=contract, as_json=json
        )

    run_command(work, as_json=json, verbose=verbose)
