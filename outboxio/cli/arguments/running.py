"""Commands that run for a while: ``worker``, ``dashboard``, ``demo``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outboxio.cli.arguments.tables import whole
from outboxio.cli.commands import dashboard as dashboard_command
from outboxio.cli.commands import watch as watch_command
from outboxio.cli.commands import worker as worker_command
from outboxio.cli.commands.dashboard import Serving, Shell, print_script
from outboxio.cli.commands.dashboard import demo as run_demo
from outboxio.cli.commands.worker import Duties
from outboxio.cli.logs import LogFormat, Reporter, set_up
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.output import Exit, run_command
from outboxio.cli.target import TargetError, configured, named, opened
from outboxio.support.duration import parse_duration
from outboxio.support.log import type_name

PANEL = "Running"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class HealthPages(Options, frozen=True):
    """Where the worker serves its health pages."""

    health_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            parser=whole(0, 65535),
            show_default=False,
            help="Serve /live, /ready, /health and /metrics over HTTP on this port.",
        ),
    ] = None
    health_host: Annotated[
        str,
        typer.Option(metavar="HOST", help="With --health-port: address to listen on; 0.0.0.0 for all interfaces."),
    ] = "127.0.0.1"


class Log(Options, frozen=True):
    """The log options of the worker."""

    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            metavar="LEVEL",
            help="Level of outboxio's log: debug, info, warning or error. Default: info, or your application's level.",
            show_default=False,
        ),
    ] = None
    log_format: Annotated[
        LogFormat, typer.Option(metavar="FORMAT", help="Format of the log on stderr: text or json.")
    ] = LogFormat.TEXT
    log_setup: Annotated[
        bool,
        typer.Option(
            "--log-setup/--no-log-setup",
            help="Log to stderr, unless importing your application sets up logging.",
        ),
    ] = True
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, example="worker app.main:outbox --log-level debug", rich_help_panel=PANEL)(worker)
    watch_example = "watch app.main:outbox --webhook https://hooks.slack.com/services/..."
    command(app, example=watch_example, rich_help_panel=PANEL)(watch)
    command(app, example="dashboard app.main:outbox --port 8900", rich_help_panel=PANEL)(dashboard)
    command(app, example="demo --database postgresql://localhost/postgres", rich_help_panel=PANEL)(demo)
    command(app, example="completion bash >> ~/.bashrc", rich_help_panel=PANEL)(completion)


def worker(
    does: Duties,
    pages: HealthPages,
    log: Log,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:OUTBOX]",
            help="Your outbox with its handlers, as in [cyan]app.main:outbox[/], or a callable that returns it. "
            "Default: $OUTBOXIO_TARGET, or [cyan]target[/] in the table [cyan]tool.outboxio[/] of pyproject.toml.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fan out events and run handlers until SIGINT or SIGTERM.

    On a signal, no new runs start, and running handlers have shutdown_timeout to finish.
    A second signal ends the process immediately; interrupted handlers run again later.
    """

    reporters = list[Reporter]()

    def set_up_log() -> Reporter:
        reporters.append(set_up(log.log_level, log.log_format, leave_alone=not log.log_setup))
        return reporters[0]

    def report(text: str, error: Exception) -> None:
        (reporters[0] if reporters else set_up_log()).error("%s", text, error_type=type_name(error))

    async def work() -> Exit:
        _refuse_contradiction(does, pages)
        found = named([] if target is None else [target], None, None)
        if found.arguments:
            raise TargetError(f"{found.arguments[0]!r} is not an outbox: expected module:outbox, as in app.main:outbox")
        if found.url is not None:
            raise TargetError(
                "a worker needs the handlers in your code: name an outbox (module:outbox), not a database"
            )
        settings = configured()
        async with opened(found) as outbox:
            # After the import, which may set up logging.
            reporter = set_up_log()
            worker_command.warn_of_ignored(outbox, settings, reporter)
            worker_command.restrict(outbox, does)
            if does.validate:
                return await worker_command.validate(outbox, does, reporter)
            if does.drain:
                return await worker_command.drain(outbox, does, reporter)
            return await worker_command.work(outbox, does, reporter, pages.health_host, pages.health_port)

    run_command(work, verbose=log.verbose, report=report)


def watch(
    common: Common,
    webhook: Annotated[
        str,
        typer.Option(
            metavar="URL", envvar="OUTBOXIO_WEBHOOK", show_envvar=False, show_default=False,
            help="Webhook that takes JSON with a text (Slack, Mattermost). Default: $OUTBOXIO_WEBHOOK.",
        ),
    ],
    target: Target = None,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="Interval of the evaluations, 1s to 5m.")
    ] = "15s",
    once: Annotated[
        bool, typer.Option("--once", help="Evaluate once, and exit like [cyan]outboxio doctor[/], for cron.")
    ] = False,
) -> None:  # fmt: skip
    """Post findings to a webhook, once when they appear and once when they end, until SIGINT or SIGTERM.

    Runs separately from your workers, so it also reports when no worker runs. If several run, only one posts.
    """

    async def work() -> Exit:
        seconds = parse_duration(every, key="--every").total_seconds()
        if not 1 <= seconds <= 300:
            raise TargetError(f"--every {every}: expected a duration from 1s to 5m")
        async with opened(common.of_namespace(target)) as outbox:
            return await watch_command.watch(outbox, webhook, seconds, once=once, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def dashboard(serving: Serving, common: Common, target: Target = None) -> None:
    """Serve the dashboard until SIGINT or SIGTERM.

    The pages show the database, so no handlers have to run here, and a database URL is enough.
    """

    async def work() -> Exit:
        dashboard_command.refuse_open(serving)
        async with opened(common.of_namespace(target)) as outbox:
            return await dashboard_command.serve(outbox, serving, as_json=common.json)

    run_command(work, as_json=common.json, verbose=common.verbose)


def demo(
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Database to use: [cyan]postgresql://[/], [cyan]mysql://[/], [cyan]mariadb://[/] or "
            "[cyan]sqlite:///file.db[/]. The demo removes its tables and rows at the end. "
            "Default: a temporary SQLite file.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False,
) -> None:
    """Run a small wallet service, step by step, and check that the balances add up."""
    run_command(lambda: run_demo(database), verbose=verbose)


def _refuse_contradiction(does: Duties, pages: HealthPages) -> None:
    if does.only and not does.handling:
        raise TargetError("--handlers and --no-handling exclude each other; use only one of them")
    if does.validate and does.drain:
        raise TargetError("--validate and --drain exclude each other; use only one of them")
    if not (does.fanout or does.handling):
        raise TargetError("--no-fanout with --no-handling leaves nothing to do")
    if does.drain and not (does.fanout and does.handling):
        raise TargetError("--drain fans out and runs handlers; it cannot be used with --no-fanout or --no-handling")
    if does.drain and pages.health_port is not None:
        raise TargetError("--health-port cannot be used with --drain, which ends with an exit code")
    if does.timeout is not None and not does.drain:
        raise TargetError("--timeout requires --drain")


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")],
) -> None:
    """Print the completion script of a shell."""
    print_script(shell)
