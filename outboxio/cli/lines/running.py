"""Commands that run for a while: ``worker``, ``dashboard``, ``demo``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.commands import dashboard as dashboard_command
from outboxio.cli.commands import worker as worker_command
from outboxio.cli.commands.completion import Shell, print_script
from outboxio.cli.commands.demo import demo as tell_demo
from outboxio.cli.logs import LogFormat, set_up
from outboxio.cli.numbers import whole
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.target import TargetError, named, opened

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

    @property
    def address(self) -> worker_command.Address | None:
        return None if self.health_port is None else worker_command.Address(self.health_host, self.health_port)


class ServedAt(Options, frozen=True):
    """Where the dashboard listens, and for whom."""

    host: Annotated[
        str, typer.Option(metavar="HOST", help="The address to listen on. An address of the network needs --auth-env.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="The port; 0 for a free port.")] = 8900
    auth_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The environment variable with the password that browsers send.", show_default=False
        ),
    ] = None
    user: Annotated[str, typer.Option(metavar="USER", help="With --auth-env: the user of the password.")] = "ops"
    read_only: Annotated[bool, typer.Option("--read-only", help="Leave out everything that changes rows.")] = False

    @property
    def serving(self) -> dashboard_command.Serving:
        return dashboard_command.Serving(self.host, self.port, self.auth_env, self.user, self.read_only)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    command(app, example="worker app.main:outbox --log-level debug", rich_help_panel=PANEL)(worker)
    command(app, example="dashboard app.main:outbox --port 8900", rich_help_panel=PANEL)(dashboard)
    command(app, example="demo --database postgresql://localhost/postgres", rich_help_panel=PANEL)(demo)
    command(app, example="completion bash >> ~/.bashrc", rich_help_panel=PANEL)(completion)


def worker(
    pages: HealthPages,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:OUTBOX]",
            help="Your outbox with its handlers, as in [cyan]app.main:outbox[/], or a callable that returns it. "
            "Default: $OUTBOXIO_TARGET, or [cyan]target[/] in the table [cyan]tool.outboxio[/] of pyproject.toml.",
            show_default=False,
        ),
    ] = None,
    fanout: Annotated[bool, typer.Option("--fanout/--no-fanout", help="Turn events into notifications.")] = True,
    handling: Annotated[bool, typer.Option("--handling/--no-handling", help="Run handlers.")] = True,
    drain: Annotated[
        bool, typer.Option("--drain", help="Do what is due, and end; 1 if due work or a retry is left.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="With --drain: wait so long for another process, as in 30s.")
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="Level of outboxio's log: info, unless your application sets a level.", show_default=False),
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="How the log is written to stderr.")] = LogFormat.TEXT,
    log_setup: Annotated[
        bool,
        typer.Option(
            "--log-setup/--no-log-setup",
            help="Send the log to stderr, unless your application sets up logging when it is imported.",
        ),
    ] = True,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False,
) -> None:
    """Fan out and run handlers until SIGINT or SIGTERM comes.

    Then no new run is started, and running handlers have the setting shutdown_timeout to finish.
    A second signal ends the process at once; interrupted handlers run again later.
    """

    async def work() -> Exit:
        duties = worker_command.Duties(fanout=fanout, handling=handling)
        _refuse_what_is_nothing(duties, pages, drain=drain, timeout=timeout)
        found = named([] if target is None else [target], None, None)
        if found.words:
            raise TargetError(f"{found.words[0]!r} names no outbox: expected module:outbox, as in app.main:outbox")
        if found.url is not None:
            raise TargetError("a worker needs the handlers of your code: name an outbox (module:outbox), no database")
        async with opened(found) as outbox:
            # After the import, because the application may set up logging when imported.
            tell = set_up(log_level, log_format, leave_alone=not log_setup)
            if drain:
                return await worker_command.drain(outbox, timeout, tell)
            return await worker_command.work(outbox, duties, tell, pages.address)

    answer(work, verbose=verbose)


def dashboard(served: ServedAt, common: Common, target: Target = None) -> None:
    """Serve the dashboard for a browser, until SIGINT or SIGTERM comes.

    The pages show the database: the handlers need not run here, and a database URL is enough.
    """

    async def work() -> Exit:
        dashboard_command.refuse_open(served.serving)
        async with opened(common.of_namespace(target)) as outbox:
            return await dashboard_command.serve(outbox, served.serving, as_json=common.json)

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


def _refuse_what_is_nothing(
    duties: worker_command.Duties, pages: HealthPages, *, drain: bool, timeout: str | None
) -> None:
    if not (duties.fanout or duties.handling):
        raise TargetError("--no-fanout and --no-handling together leave nothing to do")
    if drain and not (duties.fanout and duties.handling):
        raise TargetError("--drain fans out and handles; it goes with neither --no-fanout nor --no-handling")
    if drain and pages.address is not None:
        raise TargetError("--health-port is for a worker that goes on; --drain ends, and its exit code tells how")
    if timeout is not None and not drain:
        raise TargetError("--timeout goes with --drain only")


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")],
) -> None:
    """Print the script with which a shell completes commands and options."""
    print_script(shell)
