"""Commands that change rows or settings for all processes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.choice import Choice, given_id, moment
from outboxio.cli.commands import cluster, emitting
from outboxio.cli.commands import operations as commands
from outboxio.cli.commands.operations import Manner
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.target import TargetError, opened
from outboxio.operations.declared import DECLARED
from outboxio.outbox import Outbox

Order: TypeAlias = Coroutine[Any, Any, Exit]

PANEL = "Changing"


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


def _words(metavar: str, rest: str) -> Any:
    return typer.Argument(metavar=metavar, help=f"Your outbox, as for all commands; {rest}.", show_default=False)


Ids = Annotated[list[str] | None, _words("[TARGET] [ID]...", "the ids of notifications")]
HandlerName = Annotated[list[str] | None, _words("[TARGET] HANDLER", "the name of a handler")]


class Bulk(Options, frozen=True):
    """An order for everything that matches."""

    all: Annotated[bool, typer.Option("--all", help="Everything that matches, and not 10,000 at most.")] = False
    background: Annotated[
        bool, typer.Option("--background", help="Leave the work to the running processes; do not wait.")
    ] = False


def retry(common: Common, choice: Choice, bulk: Bulk, manner: Manner, words: Ids = None) -> None:
    """Make notifications due now, with attempts from the start. Without --state: DEAD, EXPIRED and FAILED."""
    _change("retry", common, choice, bulk, manner, words)


def skip(common: Common, choice: Choice, bulk: Bulk, manner: Manner, words: Ids = None) -> None:
    """End notifications as SKIPPED. A parked key goes on. A notification that has succeeded stays."""
    _change("skip", common, choice, bulk, manner, words)


def _change(kind: str, common: Common, choice: Choice, bulk: Bulk, manner: Manner, words: list[str] | None) -> None:
    async def work() -> Exit:
        named = common.of_namespace(words, most=10_000)
        given = commands.Given([given_id(word) for word in named.words], choice, bulk.all, bulk.background)
        async with opened(named) as outbox:
            return await commands.change(outbox, kind, given, manner.with_json(common))

    answer(work, as_json=common.json, verbose=common.verbose)


def _order(
    common: Common,
    words: str | list[str] | None,
    needed: Sequence[str],
    order: Callable[[Outbox, Sequence[str]], Order],
) -> None:
    """Open the outbox, and give an order that takes words behind the target."""

    async def work() -> Exit:
        named = common.of_namespace(words, most=len(needed))
        if len(named.words) < len(needed):
            raise TargetError(f"{needed[len(named.words)]} is missing: expected {' '.join(needed)} behind the target")
        async with opened(named) as outbox:
            return await order(outbox, named.words)

    answer(work, as_json=common.json, verbose=common.verbose)


def cancel(
    common: Common,
    manner: Manner,
    words: Annotated[list[str] | None, _words("[TARGET] ID", "the id of a notification")] = None,
) -> None:
    """Cancel the run of a notification that is in progress. The attempt has failed, and the retry policy applies."""
    _run("cancel", common, manner, words)


def resume(
    common: Common,
    manner: Manner,
    words: Annotated[
        list[str] | None, _words("[TARGET] HANDLER KEY", "the name of an ordered handler, and a parked key")
    ] = None,
) -> None:
    """Let a parked key go on without the dead letter that parks the key. To run the dead letter again, use retry."""
    _run("resume", common, manner, words)


def replay(
    common: Common,
    manner: Manner,
    since: Annotated[str, typer.Option(metavar="MOMENT", help="Events since: a date, or how long ago (2h, 3d).")],
    words: HandlerName = None,
    until: Annotated[str | None, typer.Option(metavar="MOMENT", help="Events before.", show_default=False)] = None,
) -> None:
    """Make a handler run again for events that the handler has finished."""
    _run("replay", common, manner, words, {"since": since, "until": until})


def backfill(
    common: Common,
    manner: Manner,
    since: Annotated[str, typer.Option(metavar="MOMENT", help="Events since: a date, or how long ago (2h, 3d).")],
    words: HandlerName = None,
    type: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Only this event type; may be repeated.", show_default=False),
    ] = None,
) -> None:
    """Give a handler the events that were fanned out before the handler existed."""
    _run("backfill", common, manner, words, {"since": since}, types=type or None)


def pause(common: Common, manner: Manner, words: HandlerName = None) -> None:
    """Start no run of a handler, in any process, until unpause. Events wait, and none is lost."""
    _run("pause", common, manner, words)


def unpause(common: Common, manner: Manner, words: HandlerName = None) -> None:
    """End the pause of a handler."""
    _run("unpause", common, manner, words)


def purge(common: Common, manner: Manner, words: Target = None) -> None:
    """Remove old rows now. Running processes do the same little by little."""
    _run("purge", common, manner, words)


def unsubscribe(common: Common, manner: Manner, words: HandlerName = None) -> None:
    """Forget a handler that is gone for good. You have to type the name."""
    _run("unsubscribe", common, manner, words)


def stop(
    common: Common,
    manner: Manner,
    words: Annotated[list[str] | None, _words("[TARGET] ID", "the id of an operation")] = None,
) -> None:
    """Stop an order that is under way. Notifications that were changed stay changed."""
    _run("stop", common, manner, words)


def _run(
    kind: str,
    common: Common,
    manner: Manner,
    words: str | list[str] | None,
    times: Mapping[str, str | None] | None = None,
    **options: object,
) -> None:
    """Run a declared operation. ``times``: the texts of options that are times."""
    needed = [field.upper() for field in DECLARED[kind].arguments.values()]

    def order(outbox: Outbox, given: Sequence[str]) -> Order:
        words = [given_id(word) if name == "ID" else word for name, word in zip(needed, given, strict=True)]
        values: dict[str, object] = {**dict(zip(DECLARED[kind].arguments, words, strict=True)), **options}
        values |= {name: moment(text, f"--{name}") for name, text in (times or {}).items() if text is not None}
        return commands.run(outbox, kind, values, manner.with_json(common))

    _order(common, words, needed, order)


def emit(
    common: Common,
    manner: Manner,
    words: Annotated[
        list[str] | None, _words("[TARGET] TYPE JSON", "an event type of your code, and its fields as a JSON object")
    ] = None,
    action: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the action that is recorded.")
    ] = "EmitByHand",
) -> None:
    """Record an event by hand. The event is checked by the class of your code."""
    how = manner.with_json(common)

    def order(outbox: Outbox, given: Sequence[str]) -> Order:
        return emitting.emit(outbox, given[0], given[1], action, how)

    _order(common, words, ["TYPE", "JSON"], order)


def partitions(
    common: Common,
    manner: Manner,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] [NAME [NUMBER]]",
            help="Your outbox or a database URL, as for all commands; the name of a handler, or else all handlers; "
            "and the number of partitions to set, 1 to 64, or auto to leave the number to outboxio.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show which process owns which partition, or set the number of partitions of a handler for all processes.

    The number may grow and shrink while everything runs. No process is restarted.
    """

    async def work() -> Exit:
        found = common.of_namespace(words, most=2)
        request = cluster.request_of(found.words)
        async with opened(found) as outbox:
            return await cluster.partitions(outbox, request, manner.with_json(common))

    answer(work, as_json=common.json, verbose=common.verbose)
