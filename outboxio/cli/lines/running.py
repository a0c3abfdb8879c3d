"""Commands that run for a while: ``worker``, ``dashboard``, ``demo``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.commands import dashboard as dashboard_command
from outboxio.cli.commands import watch as watch_command
from outboxio.cli.commands import worker as worker_command
from outboxio.cli.commands.dashboard import Serving, Shell, print_script
from outboxio.cli.commands.dashboard import demo as tell_demo
from outboxio.cli.commands.worker import Duties
from outboxio.cli.lines.tables import whole
from outboxio.cli.logs import LogFormat, Teller, set_up
from outboxio.cli.options import Common, Options, Target, command
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
    """Where the worker answers probes."""

    health_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            parser=whole(0, 65535),
            show_default=False,
            help="Answer /live, /ready, /health and /metrics over HTTP on this port.",
        ),
    ] = None
    health_host: Annotated[
        str,
        typer.Option(metavar="HOST", help="With --health-port: the address; 0.0.0.0 for probes from outside."),
    ] = "127.0.0.1"


class Log(Options, frozen=True):
    """The log of the worker."""

    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            metavar="LEVEL",
            help="Level of outboxio's log, debug, info, warning or error: info, unless your application sets a level.",
            show_default=False,
        ),
    ] = None
    log_format: Annotated[
        LogFormat, typer.Option(metavar="FORMAT", help="How the log is written to stderr: text or json.")
    ] = LogFormat.TEXT
    log_setup: Annotated[
        bool,
        typer.Option(
            "--log-setup/--no-log-setup",
            help="Send the log to stderr, unless your application sets up logging when it is imported.",
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
    """Fan out and run handlers until SIGINT or SIGTERM comes.

    Then no new run is started, and running handlers have the setting shutdown_timeout to finish.
    A second signal ends the process at once; interrupted handlers run again later.
    """

    tellers = list[Teller]()

    def set_up_log() -> Teller:
        tellers.append(set_up(log.log_level, log.log_format, leave_alone=not log.log_setup))
        return tellers[0]

    def report(text: str, error: Exception) -> None:
        (tellers[0] if tellers else set_up_log()).fail("%s", text, error_type=type_name(error))

    async def work() -> Exit:
        _refuse_what_is_nothing(does, pages)
        found = named([] if target is None else [target], None, None)
        if found.words:
            raise TargetError(f"{found.words[0]!r} names no outbox: expected module:outbox, as in app.main:outbox")
        if found.url is not None:
            raise TargetError("a worker needs the handlers of your code: name an outbox (module:outbox), no database")
        given = configured()
        async with opened(found) as outbox:
            # After the import, because the application may set up logging when imported.
            tell = set_up_log()
            worker_command.warn_of_ignored(outbox, given, tell)
            worker_command.take_on(outbox, does)
            if does.validate:
                return await worker_command.validate(outbox, does, tell)
            if does.drain:
                return await worker_command.drain(outbox, does, tell)
            return await worker_command.work(outbox, does, tell, pages.health_host, pages.health_port)

    answer(work, verbose=log.verbose, report=report)


def watch(
    common: Common,
    webhook: Annotated[
        str,
        typer.Option(
            metavar="URL", envvar="OUTBOXIO_WEBHOOK", show_envvar=False, show_default=False,
            help="Where to post, as JSON with a text (Slack, Mattermost). Default: $OUTBOXIO_WEBHOOK.",
        ),
    ],
    target: Target = None,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="The time between two evaluations, 1s to 5m.")
    ] = "15s",
    once: Annotated[
        bool, typer.Option("--once", help="Evaluate once, and exit like [cyan]outboxio doctor[/]: for cron.")
    ] = False,
) -> None:  # fmt: skip
    """Post each finding to a webhook, once when it appears and once when it ends, until SIGINT or SIGTERM comes.

    Runs apart from your workers, so it reports also that none of them runs. Several may run: one posts.
    """

    async def work() -> Exit:
        seconds = parse_duration(every, key="--every").total_seconds()
        if not 1 <= seconds <= 300:
            raise TargetError(f"--every {every}: expected a duration from 1s to 5m")
        async with opened(common.of_namespace(target)) as outbox:
            return await watch_command.watch(outbox, webhook, seconds, once=once, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def dashboard(serving: Serving, common: Common, target: Target = None) -> None:
    """Serve the dashboard for a browser, until SIGINT or SIGTERM comes.

    The pages show the database: the handlers need not run here, and a database URL is enough.
    """

    async def work() -> Exit:
        dashboard_command.refuse_open(serving)
        async with opened(common.of_namespace(target)) as outbox:
            return await dashboard_command.serve(outbox, serving, as_json=common.json)

    answer(work, as_json=common.json, verbose=common.verbose)


def demo(
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where to run, on [cyan]postgresql://[/], [cyan]mysql://[/], [cyan]mariadb://[/] or "
            "[cyan]sqlite:///file.db[/]: its tables and rows are removed again. "
            "Without it, in a temporary SQLite file.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False,
) -> None:
    """Show a small wallet service at work, step by step, and prove that the balances add up."""
    answer(lambda: tell_demo(database), verbose=verbose)


def _refuse_what_is_nothing(does: Duties, pages: HealthPages) -> None:
    if does.only and not does.handling:
        raise TargetError("--handlers names handlers to run, and --no-handling runs none: give one of the two")
    if does.validate and does.drain:
        raise TargetError("--validate runs nothing, and --drain runs handlers: give one of the two")
    if not (does.fanout or does.handling):
        raise TargetError("--no-fanout and --no-handling together leave nothing to do")
    if does.drain and not (does.fanout and does.handling):
        raise TargetError("--drain fans out and handles; it goes with neither --no-fanout nor --no-handling")
    if does.drain and pages.health_port is not None:
        raise TargetError("--health-port is for a worker that goes on; --drain ends, and its exit code tells how")
    if does.timeout is not None and not does.drain:
        raise TargetError("--timeout goes with --drain only")


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")],
) -> None:
    """Print the script with which a shell completes commands and options."""
    print_script(shell)
