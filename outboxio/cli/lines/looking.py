"""Commands that only look."""

from __future__ import annotations

from typing import Annotated

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.commands import describe as describe_command
from outboxio.cli.commands import health as health_command
from outboxio.cli.commands import status as status_command
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.target import opened

PANEL = "Looking"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    example = "status --database postgresql://localhost/app --namespace wallets"
    command(app, example=example, rich_help_panel=PANEL)(status)
    command(app, example="health --port 8080 --live", rich_help_panel=PANEL)(health)
    command(app, example="describe app.main:outbox", rich_help_panel=PANEL)(describe)


def status(common: Common, target: Target = None) -> None:
    """Count notifications by state, waiting events, and notifications without a handler.

    For handlers with several partitions, say how many partitions each process owns.
    """

    async def work() -> Exit:
        async with opened(common.of_namespace(target)) as outbox:
            return await status_command.status(outbox, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


class Probe(Options, frozen=True):
    """The question to a worker."""

    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            show_default=False,
            help="Ask the worker with --health-port on this port. Your application is not imported.",
        ),
    ] = None
    host: Annotated[str, typer.Option(metavar="HOST", help="With --port: the address of the worker.")] = "127.0.0.1"
    live: Annotated[bool, typer.Option("--live", help="With --port: has the worker to be restarted?")] = False
    ready: Annotated[bool, typer.Option("--ready", help="With --port: does the worker work?")] = False
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Exit with 3 if the answer takes longer.")] = "5s"
    max_age: Annotated[
        str | None,
        typer.Option(metavar="DURATION", show_default=False, help="1 if due work has waited for longer, as in 60s."),
    ] = None


def health(common: Common, probe: Probe, target: Target = None) -> None:
    """Say if a worker, or the outbox in a database, is well. Exits with 0 for ok and degraded, 1 for down.

    With --port a running worker is asked. Otherwise the database is asked.
    """

    async def work() -> Exit:
        question = health_command.question_of(
            live=probe.live, ready=probe.ready, max_age=probe.max_age, timeout=probe.timeout, port=probe.port
        )
        if probe.port is not None:
            health_command.refuse_target(target, common.database)
            return await health_command.ask_worker(probe.host, probe.port, question, as_json=common.json)
        async with opened(common.of_namespace(target)) as outbox:
            return await health_command.ask_database(outbox, question, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def describe(common: Common, target: Target = None) -> None:
    """Show the handlers of your code: their events, options and aliases, and the settings. Asks no database.

    Names the event types that no handler of the outbox wants.
    """

    async def work() -> Exit:
        async with opened(common.named(target)) as outbox:
            return describe_command.describe(outbox, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)
