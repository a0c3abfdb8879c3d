"""Commands that only look."""

from __future__ import annotations

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.commands import describe as describe_command
from outboxio.cli.commands import status as status_command
from outboxio.cli.options import Common, Target, command
from outboxio.cli.target import opened

PANEL = "Looking"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    example = "status --database postgresql://localhost/app --namespace wallets"
    command(app, example=example, rich_help_panel=PANEL)(status)
    command(app, example="describe app.main:outbox", rich_help_panel=PANEL)(describe)


def status(common: Common, target: Target = None) -> None:
    """Count notifications by state, waiting events, and notifications without a handler.

    For handlers with several partitions, say how many partitions each process owns.
    """

    async def work() -> Exit:
        async with opened(common.of_namespace(target)) as outbox:
            return await status_command.status(outbox, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def describe(common: Common, target: Target = None) -> None:
    """Show the handlers of your code: their events, options and aliases, and the settings. Asks no database.

    Names the event types that no handler of the outbox wants.
    """

    async def work() -> Exit:
        async with opened(common.named(target)) as outbox:
            return describe_command.describe(outbox, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)
