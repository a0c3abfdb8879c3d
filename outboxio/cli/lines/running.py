"""Commands that run for a while: ``worker``, ``dashboard``, ``demo``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outboxio.cli.answer import Exit, answer
from outboxio.cli.commands import dashboard as dashboard_command
from outboxio.cli.commands import worker as worker_command
from outboxio.cli.commands.dashboard import Shell, print_script
from outboxio.cli.commands.dashboard import demo as tell_demo
from outboxio.cli.lines.tables import whole
from outboxio.cli.logs import LogFormat, Teller, set_up
from outboxio.cli.options import Common, Options, Target, command
from outboxio.cli.target import TargetError, configured, named, opened
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


class Work(Options, frozen=True):
    """The work that a worker does."""

    handlers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Run only these handlers: names with commas, as in receipt,ledger. "
            "Other processes have to run the other handlers, whose events wait.",
            show_default=False,
        ),
    ] = None
    fanout: Annotated[bool, typer.Option("--fanout/--no-fanout", help="Turn events into notifications.")] = True
    handling: Annotated[bool, typer.Option("--handling/--no-handling", help="Run handlers.")] = True
    drain: Annotated[
        bool, typer.Option("--drain", help="Do what is due, and end; 1 if due work or a retry is left.")
    ] = False
    validate: Annotated[
        bool, typer.Option("--validate", help="Load your code, check settings, databases and tables, and end.")
    ] = False
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="With --drain: wait so long for another process, as in 30s.", show_default=False
        ),
    ] = None

    @property
    def duties(self) -> worker_command.Duties:
        """The duties. Raises :class:`TargetError` for names that cannot be read."""
        return worker_command.Duties(fanout=self.fanout, handling=self.handling, only=_names(self.handlers))


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
    command(app, example="dashboard app.main:outbox --port 8900", rich_help_panel=PANEL)(dashboard)
    command(app, example="demo --database postgresql://localhost/postgres", rich_help_panel=PANEL)(demo)
    command(app, example="completion bash >> ~/.bashrc", rich_help_panel=PANEL)(completion)


def worker(
    does: Work,
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
        duties = does.duties
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
            worker_command.take_on(outbox, duties)
            if does.validate:
                return await worker_command.validate(outbox, duties, tell)
            if does.drain:
                return await worker_command.drain(outbox, duties, does.timeout, tell)
            return await worker_command.work(outbox, duties, tell, pages.address)

    answer(work, verbose=log.verbose, report=report)


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


def _names(text: str | None) -> tuple[str, ...]:
    """The names in a text with commas."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise TargetError(f"--handlers {text!r}: expected names of handlers with commas, as in receipt,ledger")
    return names


def _refuse_what_is_nothing(does: Work, pages: HealthPages) -> None:
    if does.handlers is not None and not does.handling:
        raise TargetError("--handlers names handlers to run, and --no-handling runs none: give one of the two")
    if does.validate and does.drain:
        raise TargetError("--validate runs nothing, and --drain runs handlers: give one of the two")
    if not (does.fanout or does.handling):
        raise TargetError("--no-fanout and --no-handling together leave nothing to do")
    if does.drain and not (does.fanout and does.handling):
        raise TargetError("--drain fans out and handles; it goes with neither --no-fanout nor --no-handling")
    if does.drain and pages.address is not None:
        raise TargetError("--health-port is for a worker that goes on; --drain ends, and its exit code tells how")
    if does.timeout is not None and not does.drain:
        raise TargetError("--timeout goes with --drain only")


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")],
) -> None:
    """Print the script with which a shell completes commands and options."""
    print_script(shell)
