"""Commands that change something for all processes."""

from __future__ import annotations

from typing import Annotated

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.commands import partitions as partitions_command
from outboxio.cli.options import Common, command
from outboxio.cli.target import opened

PANEL = "Changing"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, example="partitions app.main:outbox score 16", rich_help_panel=PANEL)(partitions)


def partitions(
    common: Common,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] [NAME [NUMBER]]",
            help="Your outbox or a database URL, as for all commands; the name of a handler, or else all handlers; "
            "and the number of partitions to set, 1 to 64.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show which process owns which partition, or set the number of partitions of a handler for all processes.

    The number may grow and shrink while everything runs. No process is restarted.
    """

    async def work() -> Exit:
        found = common.of_namespace(words, most=2)
        request = partitions_command.request_of(found.words)
        async with opened(found) as outbox:
            return await partitions_command.partitions(outbox, request, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)
