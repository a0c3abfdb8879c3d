"""Commands that only read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from msgspec.structs import replace

from outboxio.cli.arguments.tables import seconds, whole
from outboxio.cli.commands import catalogue, cluster, glance, notifications, rows
from outboxio.cli.commands import describe as describe_command
from outboxio.cli.commands import jobs as jobs_command
from outboxio.cli.commands import status as status_command
from outboxio.cli.commands.catalogue import Catalogue
from outboxio.cli.commands.operations import OutputFormat
from outboxio.cli.filter_options import FilterOptions, parse_id
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.output import Exit, run_command
from outboxio.cli.target import Named, TargetError, opened

PANEL = "Inspecting"

_AND_ID = "[TARGET] ID"

Work: TypeAlias = Coroutine[Any, Any, Exit]

Limit = Annotated[int, typer.Option(metavar="N", parser=whole(1), help="Maximum number of rows.")]
After = Annotated[
    str | None,
    typer.Option(metavar="CURSOR", help="Continue after a page: the cursor that it printed.", show_default=False),
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


def _run(
    common: Common, target: str | None, command: Callable[..., Work], *arguments: object, **options: object
) -> None:
    """Open the outbox, and run a command on it."""

    async def work() -> Exit:
        async with opened(common.of_namespace(target)) as outbox:
            return await command(outbox, *arguments, **options, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def status(
    common: Common,
    target: Target = None,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", parser=seconds(0.5), help="Refresh the overview at this interval.", show_default=False
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Exit with 1 if one of these rules has a finding: comma-separated names, as in "
            "handler_behind,new_dead; degraded and down match all findings of a level.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the overall status, and count notifications by state.

    Shows the findings, the handlers (worst first), the processes, and the exact counts.
    """
    if watch is not None:
        _run(common, target, glance.watch, watch)
    else:
        _run(common, target, status_command.status, fail_on.split(",") if fail_on else [])


def doctor(common: Common, target: Target = None) -> None:
    """List what is wrong, each with the command to fix it. Exits with 1 if anything is wrong."""
    _run(common, target, glance.doctor)


def handlers(
    common: Common,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET] [NAME]",
            help="Your outbox or a database URL, as for all commands; a handler name (default: all handlers).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the handlers, worst first: backlog, dead letters, rates, and the process that holds each handler.

    With a handler name, also show its options, as reported by a process that runs it.
    """

    async def work() -> Exit:
        found = common.of_namespace(arguments, limit=1)
        async with opened(found) as outbox:
            return await glance.handlers(outbox, *found.arguments, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def instances(common: Common, target: Target = None) -> None:
    """Show the running processes: version, roles, event loop lag, runs, stuck runs."""
    _run(common, target, glance.instances)


def locks(common: Common, target: Target = None) -> None:
    """Show which process holds which cluster lock."""
    _run(common, target, glance.locks)


class Probe(Options, frozen=True):
    """The options of a health probe."""

    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            parser=whole(1, 65535),
            show_default=False,
            help="Probe the worker with this --health-port. Your application is not imported.",
        ),
    ] = None
    host: Annotated[str, typer.Option(metavar="HOST", help="With --port: address of the worker.")] = "127.0.0.1"
    live: Annotated[
        bool, typer.Option("--live", help="With --port: check whether the worker is alive, or has to be restarted.")
    ] = False
    ready: Annotated[bool, typer.Option("--ready", help="With --port: check whether the worker is ready.")] = False
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Exit with 3 if the response takes longer.")] = "5s"
    max_age: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", show_default=False, help="Exit with 1 if due work has waited for longer, as in 60s."
        ),
    ] = None


def health(common: Common, probe: Probe, target: Target = None) -> None:
    """Check the health of a worker, or of the outbox in a database. Exits with 0 for ok and degraded, 1 for down.

    With --port, probes a running worker. Otherwise reads the database.
    """

    async def work() -> Exit:
        query = status_command.health_query(
            live=probe.live, ready=probe.ready, max_age=probe.max_age, timeout=probe.timeout, port=probe.port
        )
        if probe.port is not None:
            status_command.refuse_target(target, common.database)
            return await status_command.probe_worker(probe.host, probe.port, query, as_json=common.json)
        async with opened(common.of_namespace(target)) as outbox:
            return await status_command.probe_database(outbox, query, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def describe(common: Common, target: Target = None) -> None:
    """Show the handlers in your code, with their events, options and aliases, and the settings. Reads no database.

    Also lists event types without a handler.
    """

    async def work() -> Exit:
        async with opened(common.named(target)) as outbox:
            return describe_command.describe(outbox, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def list_notifications(
    common: Common, filters: FilterOptions, target: Target = None, limit: Limit = 50, after: After = None
) -> None:
    """List notifications, newest first."""
    _run(common, target, notifications.list_notifications, filters, limit, after)


def dead(
    common: Common,
    filters: FilterOptions,
    target: Target = None,
    by: Annotated[str, typer.Option(metavar="error|handler", help="Group by error, or by handler.")] = "error",
) -> None:
    """Show dead letters grouped by similar errors, each group with the command to retry it.

    Numbers, ids, email addresses and quoted values in an error are ignored.
    """
    _run(common, target, notifications.dead, filters, by)


def show(
    common: Common,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=_AND_ID,
            help="Your outbox, as for all commands; the id of an event or a notification.",
            show_default=False,
        ),
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Also show the events that this event has caused.")] = False,
    payload: Annotated[bool, typer.Option("--payload", help="Also show the payload and the parameters.")] = False,
) -> None:
    """Show an event with its action, its notifications, and their errors."""

    async def work() -> Exit:
        named = common.of_namespace(arguments, limit=1)
        if not named.arguments:
            raise TargetError("missing argument ID: expected the id of an event or a notification")
        id = parse_id(named.arguments[0])
        async with opened(named) as outbox:
            return await rows.show(outbox, id, tree=tree, payload=payload, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def list_events(
    common: Common, filters: FilterOptions, target: Target = None, limit: Limit = 50, after: After = None
) -> None:
    """List stored events, newest first. Filters by state, handler or error apply to notifications, not to events."""
    _run(common, target, notifications.events, filters, limit, after)


def events(options: Catalogue, target: Target = None) -> None:
    """List the event types in your code, with version, handlers and relays. Checks changes against a lock file.

    Reads a database only with --database, and then also lists the actions that emit the events.
    """

    async def work() -> Exit:
        options.refuse_contradiction()
        code = replace(options, database=None, namespace=None).named(target)
        if code.url is not None:
            raise TargetError(
                "event types are read from your code: use module:outbox, as in app.main:outbox; for stored events, use "
                "list-events"
            )
        async with opened(code) as outbox:
            url = None if options.database is None else Named(options.database, options.namespace or outbox.namespace)
            rows = None if url is None else opened(replace(url, needs_rows=True))
            return await catalogue.events(outbox, options, rows, as_json=options.json)

    run_command(work, as_json=options.json, verbose=options.verbose)


def tail(
    common: Common,
    filters: FilterOptions,
    target: Target = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running until interrupted.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", parser=seconds(0.1), help="Polling interval.")] = 1.0,
) -> None:
    """Show notifications as they change, newest change last.

    Starts with up to 200 notifications, or with all changes since --since.
    With --follow, each poll scans all notifications that match the other filters; on a large table, use --state.
    """
    _run(common, target, notifications.tail, filters, every, follow=follow)


def keys(common: Common, target: Target = None) -> None:
    """List the parked keys of ordered handlers, with the commands to resume them."""
    _run(common, target, cluster.keys)


def paused(common: Common, target: Target = None) -> None:
    """List the paused handlers."""
    _run(common, target, cluster.paused)


def _job(help: str) -> Any:
    return typer.Option(metavar="NAME", help=help, show_default=False)


def jobs(
    common: Common,
    output: OutputFormat,
    target: Target = None,
    pause: Annotated[str | None, _job("Pause this job in all processes.")] = None,
    unpause: Annotated[str | None, _job("Resume this job.")] = None,
    run: Annotated[str | None, _job("Run this job now.")] = None,
    remove: Annotated[str | None, _job("Remove a job that no process runs any more.")] = None,
) -> None:
    """List the jobs, with their next scheduled time and the result of the last run."""
    requested = jobs_command.JobOperations(pause=pause, unpause=unpause, run=run, remove=remove)

    async def work() -> Exit:
        async with opened(common.of_namespace(target)) as outbox:
            return await jobs_command.jobs(outbox, requested, output.with_json(common))

    run_command(work, as_json=common.json, verbose=common.verbose)


def operations(common: Common, target: Target = None, limit: Limit = 20, after: After = None) -> None:
    """List operations, newest first: who started them, why, and their progress."""
    _run(common, target, cluster.operations, limit, after)


def export(
    common: Common,
    filters: FilterOptions,
    target: Target = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to create. Default: stdout.", show_default=False),
    ] = None,
) -> None:
    """Write dead letters with their payloads and errors, redacted, as one JSON object per line."""
    _run(common, target, notifications.export, filters, output)
