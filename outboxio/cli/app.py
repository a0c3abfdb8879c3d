"""The commands and options. The work of a command is in the module with the command's name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outboxio import __version__
from outboxio.cli import health as health_command
from outboxio.cli import partitions as partitions_command
from outboxio.cli import schema
from outboxio.cli import status as status_command
from outboxio.cli import worker as worker_command
from outboxio.cli.answer import Exit, answer
from outboxio.cli.demo import demo as tell_demo
from outboxio.cli.logs import LogFormat, set_up
from outboxio.cli.target import TargetError, opened, refuse_both_or_none
from outboxio.support.text import without_passwords


class Commands(TyperGroup):
    """The commands. A usage error repeats the typed text without passwords."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _passwords_hidden():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _passwords_hidden():
            return super().invoke(ctx)


@contextmanager
def _passwords_hidden() -> Generator[None]:
    try:
        yield
    except Exception as error:
        told: Any = getattr(error, "message", None)  # usage errors of typer and click
        if isinstance(told, str):
            vars(error)["message"] = without_passwords(told)
        raise


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 the answer is no, 2 usage or configuration, 3 a database cannot be reached.",
)


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:OUTBOX",
        help="Your outbox, as in [cyan]app.main:outbox[/], or a callable that returns it. "
        "Modules in the current directory are found.",
        show_default=False,
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A database instead: [cyan]postgresql://host/name[/], [cyan]mysql://host/name[/], "
        "[cyan]mariadb://host/name[/] or [cyan]sqlite:///file.db[/]",
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None, typer.Option(metavar="NAME", help="The namespace in that database.", show_default=False)
]
HealthPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        min=0,
        max=65535,
        show_default=False,
        help="Answer /live, /ready, /health and /metrics over HTTP on this port.",
    ),
]
HealthHost = Annotated[
    str, typer.Option(metavar="HOST", help="With --health-port: the address; 0.0.0.0 for probes from outside.")
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def outboxio(
    version: Annotated[bool, typer.Option("--version", help="Show the version, and exit.", is_eager=True)] = False,
) -> None:
    """The transactional outbox for asyncio: commit rows and events together, handle every event afterwards."""
    if version:
        typer.echo(f"outboxio {__version__}")
        raise typer.Exit


@app.command(epilog="Example: [cyan]outboxio migrate app.main:outbox[/]")
def migrate(
    target: Target = None,
    database: Database = None,
    namespace: Namespace = None,
    contract: Annotated[
        bool,
        typer.Option("--contract", help="Also drop what only older versions use; none of their processes may run."),
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make the tables, or bring them up to date.

    Safe to run at every deployment and from several machines at once. Your own tables are never touched.
    """

    async def work() -> Exit:
        refuse_both_or_none(target, database)
        async with opened(target, database, namespace) as outbox:
            return await schema.migrate(outbox, contract=contract, as_json=json)

    answer(work, as_json=json, verbose=verbose)


@app.command(epilog="Example: [cyan]outboxio check --database postgresql://localhost/app[/]")
def check(
    target: Target = None,
    database: Database = None,
    namespace: Namespace = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check settings, connections, tables, columns and indexes.

    Names the missing parts and the files that bring the parts. Changes nothing.
    """

    async def work() -> Exit:
        refuse_both_or_none(target, database)
        async with opened(target, database, namespace) as outbox:
            return await schema.check(outbox, as_json=json)

    answer(work, as_json=json, verbose=verbose)


@app.command("alembic-revision", epilog="Example: [cyan]outboxio alembic-revision --config alembic.ini[/]")
def alembic_revision(
    config: Annotated[str, typer.Option(metavar="FILE", help="The configuration of Alembic.")] = "alembic.ini",
    message: Annotated[
        str, typer.Option("--message", "-m", metavar="TEXT", help="The message of the revision.")
    ] = "outboxio tables",
    rev_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The id of the revision; random by default.", show_default=False)
    ] = None,
    head: Annotated[str, typer.Option(metavar="REVISION", help="The revision to come after.")] = "head",
    contract: Annotated[
        bool,
        typer.Option("--contract", help="Also drop what only older versions use; none of their processes may run."),
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write an Alembic revision that makes the tables, or brings them up to date.

    The revision applies the files of the installed outboxio, behind the files of earlier revisions.
    """

    async def work() -> Exit:
        return schema.write_revision(
            config, message=message, revision=rev_id, head=head, contract=contract, as_json=json
        )

    answer(work, as_json=json, verbose=verbose)


@app.command(epilog="Example: [cyan]outboxio status --database postgresql://localhost/app --namespace wallets[/]")
def status(
    target: Target = None,
    database: Database = None,
    namespace: Namespace = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Count notifications by state, waiting events, and notifications without a handler.

    For handlers with several partitions, say how many partitions each process owns.
    """

    async def work() -> Exit:
        refuse_both_or_none(target, database)
        _refuse_without_namespace("status counts what is in", database, namespace)
        async with opened(target, database, namespace) as outbox:
            return await status_command.status(outbox, as_json=json)

    answer(work, as_json=json, verbose=verbose)


@app.command(epilog="Example: [cyan]outboxio partitions app.main:outbox score 16[/]")
def partitions(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODULE:OUTBOX] [NAME [NUMBER]]",
            help="Your outbox, unless --database is given; the name of a handler, or else all handlers; "
            "and the number of partitions to set, 1 to 64.",
            show_default=False,
        ),
    ] = None,
    database: Database = None,
    namespace: Namespace = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show which process owns which partition, or set the number of partitions of a handler for all processes.

    The number may grow and shrink while everything runs. No process is restarted.
    """

    async def work() -> Exit:
        request = partitions_command.request_of(words or (), has_database=database is not None)
        refuse_both_or_none(request.target, database)
        _refuse_without_namespace("partitions shows the handlers of", database, namespace)
        async with opened(request.target, database, namespace) as outbox:
            return await partitions_command.partitions(outbox, request, as_json=json)

    answer(work, as_json=json, verbose=verbose)


@app.command(epilog="Example: [cyan]outboxio worker app.main:outbox --log-level debug[/]")
def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OUTBOX",
            help="Your outbox with its handlers, as in [cyan]app.main:outbox[/], or a callable that returns it.",
        ),
    ],
    fanout: Annotated[bool, typer.Option("--fanout/--no-fanout", help="Turn events into notifications.")] = True,
    handling: Annotated[bool, typer.Option("--handling/--no-handling", help="Run handlers.")] = True,
    drain: Annotated[
        bool, typer.Option("--drain", help="Do what is due, and end; 1 if due work or a retry is left.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="With --drain: wait so long for another process, as in 30s."),
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
    health_port: HealthPort = None,
    health_host: HealthHost = "127.0.0.1",
    verbose: Verbose = False,
) -> None:
    """Fan out and run handlers until SIGINT or SIGTERM comes.

    Then no new run is started, and running handlers have the setting shutdown_timeout to finish.
    A second signal ends the process at once; interrupted handlers run again later.
    """

    async def work() -> Exit:
        duties = worker_command.Duties(fanout=fanout, handling=handling)
        _refuse_what_is_nothing(duties, drain=drain, timeout=timeout)
        async with opened(target) as outbox:
            # After the import, because the application may set up logging when imported.
            tell = set_up(log_level, log_format, leave_alone=not log_setup)
            if drain:
                return await worker_command.drain(outbox, timeout, tell)
            pages = None if health_port is None else worker_command.Address(health_host, health_port)
            return await worker_command.work(outbox, duties, tell, pages)

    answer(work, verbose=verbose)


@app.command(epilog="Example: [cyan]outboxio health --port 8080 --live[/]")
def health(
    target: Target = None,
    database: Database = None,
    namespace: Namespace = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            show_default=False,
            help="Ask the worker with --health-port on this port. Your application is not imported.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="With --port: the address of the worker.")] = "127.0.0.1",
    live: Annotated[bool, typer.Option("--live", help="With --port: has the worker to be restarted?")] = False,
    ready: Annotated[bool, typer.Option("--ready", help="With --port: does the worker work?")] = False,
    max_age: Annotated[
        str | None,
        typer.Option(metavar="DURATION", show_default=False, help="1 if due work has waited for longer, as in 60s."),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say if a worker, or the outbox in a database, is well. Answers 0 for ok and degraded, 1 for down.

    With --port the answer comes from the memory of a running worker. Otherwise the database is asked.
    """

    async def work() -> Exit:
        wanted = health_command.question_of(live=live, ready=ready, max_age=max_age, has_port=port is not None)
        if port is not None:
            health_command.refuse_target(target, database)
            return await health_command.ask_worker(host, port, wanted, as_json=json)
        refuse_both_or_none(target, database)
        _refuse_without_namespace("health looks at", database, namespace)
        async with opened(target, database, namespace) as outbox:
            return await health_command.ask_database(outbox, wanted, as_json=json)

    answer(work, as_json=json, verbose=verbose)


@app.command(epilog="Example: [cyan]outboxio demo --database postgresql://localhost/postgres[/]")
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
    verbose: Verbose = False,
) -> None:
    """Show a small wallet service at work, step by step, and prove that the balances add up."""
    answer(lambda: tell_demo(database), verbose=verbose)


def _refuse_without_namespace(shows: str, database: str | None, namespace: str | None) -> None:
    if database is not None and namespace is None:
        raise TargetError(f"{shows} one namespace: give --namespace beside --database")


def _refuse_what_is_nothing(duties: worker_command.Duties, *, drain: bool, timeout: str | None) -> None:
    if not (duties.fanout or duties.handling):
        raise TargetError("--no-fanout and --no-handling together leave nothing to do")
    if drain and not (duties.fanout and duties.handling):
        raise TargetError("--drain fans out and handles; it goes with neither --no-fanout nor --no-handling")
    if timeout is not None and not drain:
        raise TargetError("--timeout goes with --drain only")
