"""Commands that only look."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from msgspec.structs import replace

from outboxio.cli.answer import Exit, answer
from outboxio.cli.choice import Choice, given_id
from outboxio.cli.commands import catalogue, cluster, glance, notifications, rows
from outboxio.cli.commands import describe as describe_command
from outboxio.cli.commands import jobs as jobs_command
from outboxio.cli.commands import status as status_command
from outboxio.cli.commands.catalogue import Catalogue
from outboxio.cli.commands.operations import Manner
from outboxio.cli.lines.tables import seconds, whole
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.target import Named, TargetError, opened

PANEL = "Looking"

_AND_ID = "[TARGET] ID"

Answered: TypeAlias = Coroutine[Any, Any, Exit]

Limit = Annotated[int, typer.Option(metavar="N", parser=whole(1), help="How many rows at most.")]
After = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Go on after a page: the text that the page has printed.", show_default=False),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    status_example = "status --database postgresql://localhost/app --namespace wallets"
    command(app, example=status_example, rich_help_panel=PANEL)(status)
    command(app, example="doctor app.main:outbox", rich_help_panel=PANEL)(doctor)
    command(app, example="handlers receipt", rich_help_panel=PANEL)(handlers)
    command(app, "list", example="list app.main:outbox --state FAILED --handler receipt", rich_help_panel=PANEL)(
        list_notifications
    )
    command(app, example="dead --since 24h", rich_help_panel=PANEL)(dead)
    command(app, example="show 0198c0de-0000-7000-8000-000000000000 --tree", rich_help_panel=PANEL)(show)
    command(app, "list-events", example="list-events --type MoneyDeposited --limit 20", rich_help_panel=PANEL)(
        list_events
    )
    command(app, example="tail --follow --handler receipt", rich_help_panel=PANEL)(tail)
    command(app, example="keys", rich_help_panel=PANEL)(keys)
    command(app, example="instances", rich_help_panel=PANEL)(instances)
    command(app, example="locks", rich_help_panel=PANEL)(locks)
    command(app, example="paused", rich_help_panel=PANEL)(paused)
    command(app, example="jobs --pause close-day", rich_help_panel=PANEL)(jobs)
    command(app, example="operations", rich_help_panel=PANEL)(operations)
    command(app, example="export --handler receipt --output dead.ndjson", rich_help_panel=PANEL)(export)
    command(app, example="health --port 8080 --live", rich_help_panel=PANEL)(health)
    command(app, example="describe app.main:outbox", rich_help_panel=PANEL)(describe)
    command(app, example="events app.main:outbox --check events.lock.json", rich_help_panel=PANEL)(events)


def _look(
    common: Common, target: str | None, command: Callable[..., Answered], *given: object, **options: object
) -> None:
    """Open the outbox, and give the command the outbox, the words of the command line, and the manner of the answer."""

    async def work() -> Exit:
        async with opened(common.of_namespace(target)) as outbox:
            return await command(outbox, *given, **options, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def status(
    common: Common,
    target: Target = None,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", parser=seconds(0.5), help="Show the overview anew so often.", show_default=False
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Exit with 1 if one of these rules finds a fault: names with commas, as in handler_behind,new_dead; "
            "degraded and down stand for all faults of a level.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the state at a glance, and count notifications by state.

    First the faults, in sentences, then the handlers, the worst first, the processes, and the exact counts.
    """
    if watch is not None:
        _look(common, target, glance.watch, watch)
    else:
        _look(common, target, status_command.status, fail_on.split(",") if fail_on else [])


def doctor(common: Common, target: Target = None) -> None:
    """Name each fault, and the command that mends the fault. Exits with 1 if there is a fault."""
    _look(common, target, glance.doctor)


def handlers(
    common: Common,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] [NAME]",
            help="Your outbox or a database URL, as for all commands; the name of a handler, or else all handlers.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the handlers, the worst first: backlog, dead letters, rates, and the process that holds each handler.

    With the name of a handler, also its options, by the report of a process that runs the handler.
    """

    async def work() -> Exit:
        found = common.of_namespace(words, most=1)
        async with opened(found) as outbox:
            return await glance.handlers(outbox, *found.words, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def instances(common: Common, target: Target = None) -> None:
    """Show the processes that run: version, roles, lag of the event loop, runs, stuck runs."""
    _look(common, target, glance.instances)


def locks(common: Common, target: Target = None) -> None:
    """Show which process holds which cluster lock."""
    _look(common, target, glance.locks)


class Probe(Options, frozen=True):
    """The question to a worker."""

    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            parser=whole(1, 65535),
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
        question = status_command.question_of(
            live=probe.live, ready=probe.ready, max_age=probe.max_age, timeout=probe.timeout, port=probe.port
        )
        if probe.port is not None:
            status_command.refuse_target(target, common.database)
            return await status_command.ask_worker(probe.host, probe.port, question, as_json=common.json)
        async with opened(common.of_namespace(target)) as outbox:
            return await status_command.ask_database(outbox, question, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def describe(common: Common, target: Target = None) -> None:
    """Show the handlers of your code: their events, options and aliases, and the settings. Asks no database.

    Names the event types that no handler of the outbox wants.
    """

    async def work() -> Exit:
        async with opened(common.named(target)) as outbox:
            return describe_command.describe(outbox, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def list_notifications(
    common: Common, choice: Choice, target: Target = None, limit: Limit = 50, after: After = None
) -> None:
    """List notifications, the newest first."""
    _look(common, target, notifications.list_notifications, choice, limit, after)


def dead(
    common: Common,
    choice: Choice,
    target: Target = None,
    by: Annotated[str, typer.Option(metavar="error|handler", help="Group by error, or by handler.")] = "error",
) -> None:
    """Show the dead letters in groups of like errors, each with the command that retries the group.

    Numbers, ids, e-mail addresses and quoted values in an error do not count.
    """
    _look(common, target, notifications.dead, choice, by)


def show(
    common: Common,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=_AND_ID,
            help="Your outbox, as for all commands; the id of an event or of a notification.",
            show_default=False,
        ),
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Also show the events that the event has caused.")] = False,
    payload: Annotated[bool, typer.Option("--payload", help="Also show the payload and the parameters.")] = False,
) -> None:
    """Show an event: the action, the notifications, and the errors of each notification."""

    async def work() -> Exit:
        named = common.of_namespace(words, most=1)
        if not named.words:
            raise TargetError("show needs the id of an event or of a notification")
        id = given_id(named.words[0])
        async with opened(named) as outbox:
            return await rows.show(outbox, id, tree=tree, payload=payload, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def list_events(common: Common, choice: Choice, target: Target = None, limit: Limit = 50, after: After = None) -> None:
    """List stored events, the newest first. States, handlers and errors belong to notifications, and do not count."""
    _look(common, target, notifications.events, choice, limit, after)


def events(given: Catalogue, target: Target = None) -> None:
    """List the event types of your code: version, handlers, relays. Checks changes against a lock file.

    Reads no database without --database, with which it also names the actions that emit the events.
    """

    async def work() -> Exit:
        given.refuse_contradiction()
        code = replace(given, database=None, namespace=None).named(target)
        if code.url is not None:
            raise TargetError("event types are in your code: name it, as in app.main:outbox; rows: list-events")
        async with opened(code) as outbox:
            url = None if given.database is None else Named(given.database, given.namespace or outbox.namespace)
            rows = None if url is None else opened(replace(url, needs_rows=True))
            return await catalogue.events(outbox, given, rows, as_json=given.json)

    answer(work, as_json=given.json, verbose=given.verbose)


def tail(
    common: Common,
    choice: Choice,
    target: Target = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until a signal comes.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", parser=seconds(0.1), help="How often to look.")] = 1.0,
) -> None:
    """Show notifications as they change, the newest change last.

    The first look shows up to 200 notifications, or all that have changed since --since.
    A look of --follow reads all notifications that match but for the date; narrow a large table down with --state.
    """
    _look(common, target, notifications.tail, choice, every, follow=follow)


def keys(common: Common, target: Target = None) -> None:
    """List the parked keys of ordered handlers, with the commands that let a key go on."""
    _look(common, target, cluster.keys)


def paused(common: Common, target: Target = None) -> None:
    """List the paused handlers."""
    _look(common, target, cluster.paused)


def _job(told: str) -> Any:
    return typer.Option(metavar="NAME", help=told, show_default=False)


def jobs(
    common: Common,
    manner: Manner,
    target: Target = None,
    pause: Annotated[str | None, _job("Start no run of this job, in any process.")] = None,
    unpause: Annotated[str | None, _job("End the pause of this job.")] = None,
    run: Annotated[str | None, _job("Run this job now.")] = None,
    remove: Annotated[str | None, _job("Remove the row of this job, which no process has any more.")] = None,
) -> None:
    """List the jobs, each with the next moment and the result of the last run."""
    given = jobs_command.Given(pause=pause, unpause=unpause, run=run, remove=remove)

    async def work() -> Exit:
        async with opened(common.of_namespace(target)) as outbox:
            return await jobs_command.jobs(outbox, given, manner.with_json(common))

    answer(work, as_json=common.json, verbose=common.verbose)


def operations(common: Common, target: Target = None, limit: Limit = 20, after: After = None) -> None:
    """List the orders of operators, the newest first: by whom, why, and how far the order is."""
    _look(common, target, cluster.operations, limit, after)


def export(
    common: Common,
    choice: Choice,
    target: Target = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A new file. Default: stdout.", show_default=False),
    ] = None,
) -> None:
    """Write dead letters with payloads and errors, redacted, one JSON object on each line."""
    _look(common, target, notifications.export, choice, output)
