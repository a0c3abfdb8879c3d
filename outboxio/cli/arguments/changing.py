"""Commands that change rows or settings for all processes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from outboxio.cli.commands import cluster, emitting
from outboxio.cli.commands import operations as commands
from outboxio.cli.commands.operations import OutputFormat
from outboxio.cli.filter_options import FilterOptions, parse_id, time_option
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.output import Exit, run_command
from outboxio.cli.target import TargetError, opened
from outboxio.operations.declared import DECLARED
from outboxio.outbox import Outbox

Work: TypeAlias = Coroutine[Any, Any, Exit]

PANEL = "Operations"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for function, example in {
        retry: "retry --state DEAD --handler receipt --reason 'the mail server is back'",
        skip: "skip 0198c0de-0000-7000-8000-000000000000",
        cancel: "cancel 0198c0de-0000-7000-8000-000000000000 --reason 'it waits for a dead server'",
        resume: "resume ledger account-7",
        replay: "replay search-index --since 2026-01-31",
        backfill: "backfill search-index --since 30d --type MoneyDeposited",
        pause: "pause receipt --reason 'the mail server is down'",
        unpause: "unpause receipt",
        purge: "purge --yes",
        unsubscribe: "unsubscribe old-report",
        stop: "stop 0198c0de-0000-7000-8000-000000000000",
        emit: 'emit app.main:outbox MoneyDeposited \'{"wallet_id": "7", "amount": "1.00"}\'',
        partitions: "partitions app.main:outbox score 16",
    }.items():
        command(app, example=example, rich_help_panel=PANEL)(function)


def _argument(metavar: str, description: str) -> Any:
    text = f"Your outbox, as for all commands; {description}."
    return typer.Argument(metavar=metavar, help=text, show_default=False)


Ids = Annotated[list[str] | None, _argument("[TARGET] [ID]...", "the ids of notifications")]
HandlerName = Annotated[list[str] | None, _argument("[TARGET] HANDLER", "the name of a handler")]


class Bulk(Options, frozen=True):
    """An operation on all notifications that match."""

    all: Annotated[bool, typer.Option("--all", help="Change all that match, even more than 10,000.")] = False
    background: Annotated[
        bool, typer.Option("--background", help="Let the running processes do the work, and do not wait.")
    ] = False


def retry(common: Common, filters: FilterOptions, bulk: Bulk, output: OutputFormat, arguments: Ids = None) -> None:
    """Make notifications due now, with all attempts available again. Without --state: DEAD, EXPIRED and FAILED."""
    _change("retry", common, filters, bulk, output, arguments)


def skip(common: Common, filters: FilterOptions, bulk: Bulk, output: OutputFormat, arguments: Ids = None) -> None:
    """Mark notifications as SKIPPED, which also resumes parked keys. Succeeded notifications are left unchanged."""
    _change("skip", common, filters, bulk, output, arguments)


def _change(
    kind: str, common: Common, filters: FilterOptions, bulk: Bulk, output: OutputFormat, arguments: list[str] | None
) -> None:
    async def work() -> Exit:
        named = common.of_namespace(arguments, limit=10_000)
        selection = commands.Selection([parse_id(text) for text in named.arguments], filters, bulk.all, bulk.background)
        async with opened(named) as outbox:
            return await commands.change(outbox, kind, selection, output.with_json(common))

    run_command(work, as_json=common.json, verbose=common.verbose)


def _operate(
    common: Common,
    arguments: str | list[str] | None,
    needed: Sequence[str],
    operation: Callable[[Outbox, Sequence[str]], Work],
) -> None:
    """Open the outbox, and run an operation that takes arguments after the target."""

    async def work() -> Exit:
        named = common.of_namespace(arguments, limit=len(needed))
        if len(named.arguments) < len(needed):
            raise TargetError(
                f"missing argument {needed[len(named.arguments)]}: expected {' '.join(needed)} after the target"
            )
        async with opened(named) as outbox:
            return await operation(outbox, named.arguments)

    run_command(work, as_json=common.json, verbose=common.verbose)


def cancel(
    common: Common,
    output: OutputFormat,
    arguments: Annotated[list[str] | None, _argument("[TARGET] ID", "the id of a notification")] = None,
) -> None:
    """Cancel the running attempt of a notification. It counts as failed, and the retry policy applies."""
    _run("cancel", common, output, arguments)


def resume(
    common: Common,
    output: OutputFormat,
    arguments: Annotated[
        list[str] | None, _argument("[TARGET] HANDLER KEY", "the name of an ordered handler and a parked key")
    ] = None,
) -> None:
    """Resume a parked key by skipping the dead letter that parks it. To run the dead letter again, use retry."""
    _run("resume", common, output, arguments)


def replay(
    common: Common,
    output: OutputFormat,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Events emitted since this time: a date, or an age (2h, 3d).")
    ],
    arguments: HandlerName = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Events emitted before this time.", show_default=False)
    ] = None,
) -> None:
    """Run a handler again for events that it has already finished."""
    _run("replay", common, output, arguments, {"since": since, "until": until})


def backfill(
    common: Common,
    output: OutputFormat,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Events emitted since this time: a date, or an age (2h, 3d).")
    ],
    arguments: HandlerName = None,
    type: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Only this event type; may be repeated.", show_default=False),
    ] = None,
) -> None:
    """Deliver to a handler the events that were fanned out before it existed."""
    _run("backfill", common, output, arguments, {"since": since}, types=type or None)


def pause(common: Common, output: OutputFormat, arguments: HandlerName = None) -> None:
    """Pause a handler in all processes until unpause. Its events wait; none are lost."""
    _run("pause", common, output, arguments)


def unpause(common: Common, output: OutputFormat, arguments: HandlerName = None) -> None:
    """Resume a paused handler."""
    _run("unpause", common, output, arguments)


def purge(common: Common, output: OutputFormat, arguments: Target = None) -> None:
    """Remove old rows now. Running processes also do this continuously, in small steps."""
    _run("purge", common, output, arguments)


def unsubscribe(common: Common, output: OutputFormat, arguments: HandlerName = None) -> None:
    """Remove a handler that no longer exists. You have to type its name to confirm."""
    _run("unsubscribe", common, output, arguments)


def stop(
    common: Common,
    output: OutputFormat,
    arguments: Annotated[list[str] | None, _argument("[TARGET] ID", "the id of an operation")] = None,
) -> None:
    """Stop a running operation. Notifications that it has changed stay changed."""
    _run("stop", common, output, arguments)


def _run(
    kind: str,
    common: Common,
    output: OutputFormat,
    arguments: str | list[str] | None,
    times: Mapping[str, str | None] | None = None,
    **options: object,
) -> None:
    """Run a declared operation. ``times``: the unparsed values of options that are times."""
    needed = [field.upper() for field in DECLARED[kind].arguments.values()]

    def operation(outbox: Outbox, found: Sequence[str]) -> Work:
        parsed = [parse_id(text) if name == "ID" else text for name, text in zip(needed, found, strict=True)]
        values: dict[str, object] = {**dict(zip(DECLARED[kind].arguments, parsed, strict=True)), **options}
        values |= {name: time_option(text, f"--{name}") for name, text in (times or {}).items() if text is not None}
        return commands.run(outbox, kind, values, output.with_json(common))

    _operate(common, arguments, needed, operation)


def emit(
    common: Common,
    output: OutputFormat,
    arguments: Annotated[
        list[str] | None, _argument("[TARGET] TYPE JSON", "an event type of your code and its fields as a JSON object")
    ] = None,
    action: Annotated[str, typer.Option(metavar="NAME", help="Name of the recorded action.")] = "EmitByHand",
) -> None:
    """Record an event by hand, validated by its class in your code."""

    def operation(outbox: Outbox, values: Sequence[str]) -> Work:
        return emitting.emit(outbox, values[0], values[1], action, output.with_json(common))

    _operate(common, arguments, ["TYPE", "JSON"], operation)


def partitions(
    common: Common,
    output: OutputFormat,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] [NAME [NUMBER]]",
            help="Your outbox or a database URL, as for all commands; a handler name (default: all handlers); "
            "and the number of partitions to set, 1 to 64, or auto to let outboxio choose.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show which process owns which partition, or set a handler's number of partitions for all processes.

    The number can be changed at any time, without restarting a process.
    """

    async def work() -> Exit:
        found = common.of_namespace(arguments, limit=2)
        request = cluster.request_of(found.arguments)
        async with opened(found) as outbox:
            return await cluster.partitions(outbox, request, output.with_json(common))

    run_command(work, as_json=common.json, verbose=common.verbose)
