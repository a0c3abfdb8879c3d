"""``outboxio worker``, and signal handling for commands that run until a signal arrives."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Annotated, Any

import typer
from msgspec.structs import asdict, astuple

from outboxio import __version__
from outboxio.cli.internals import (
    Tally,
    admin_of,
    clock_of,
    databases,
    handlers,
    handlers_to_run,
    is_live,
    run_only,
    schedules,
)
from outboxio.cli.logs import Reporter
from outboxio.cli.options import Options
from outboxio.cli.output import Exit
from outboxio.cli.target import TargetError
from outboxio.handlers.handler import Handler
from outboxio.health.pages import serve_health
from outboxio.health.systemd import ServiceManager
from outboxio.model.operating.groups import Filter
from outboxio.outbox import Drained, Outbox
from outboxio.storage.protocols import counts_of, slots_of
from outboxio.support.duration import format_duration

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signalled() -> Generator[asyncio.Event]:
    """Return an event that the first signal sets.

    Uses Python's signal handlers and not the event loop's, so that a second signal ends the process even while a
    handler blocks the event loop, which is when people signal twice (decision 25).
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def caught(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, caught) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- ``outboxio worker``: runs the handlers of your application in a separate process -------------


class Duties(Options, frozen=True):
    """The work that a worker does."""

    handlers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Run only these handlers: comma-separated names, as in receipt,ledger. "
            "The events of all other handlers wait for other processes.",
            show_default=False,
        ),
    ] = None
    fanout: Annotated[bool, typer.Option("--fanout/--no-fanout", help="Turn events into notifications.")] = True
    handling: Annotated[bool, typer.Option("--handling/--no-handling", help="Run handlers.")] = True
    drain: Annotated[
        bool, typer.Option("--drain", help="Do the due work and exit; with 1 if due work or retries are left.")
    ] = False
    validate: Annotated[
        bool, typer.Option("--validate", help="Load your code, check settings, databases and tables, and exit.")
    ] = False
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="With --drain: how long to wait for another process, as in 30s.",
            show_default=False,
        ),
    ] = None

    @property
    def only(self) -> tuple[str, ...]:
        """The names of the handlers to run; empty for all handlers.

        Raises :class:`TargetError` for an empty name.
        """
        if self.handlers is None:
            return ()
        names = tuple(dict.fromkeys(name.strip() for name in self.handlers.split(",")))
        if not all(names):
            expected = "comma-separated handler names, as in receipt,ledger"
            raise TargetError(f"--handlers {self.handlers!r}: expected {expected}")
        return names


def restrict(outbox: Outbox, duties: Duties) -> None:
    """Restrict the outbox to the handlers that the duties name."""
    if duties.only:
        run_only(outbox, duties.only)


def warn_of_ignored(outbox: Outbox, settings: Mapping[str, Any], reporter: Reporter) -> None:
    """Warn about settings in the environment or ``pyproject.toml`` that the application's code does not read."""
    for name, value in settings.items():
        if getattr(outbox.settings, name) != value:
            reporter.warning(
                "setting %s of the environment or pyproject.toml is ignored: an outbox without settings= reads the "
                'environment, and one with settings=Settings.load("pyproject.toml") reads both', name,
            )  # fmt: skip


async def validate(outbox: Outbox, duties: Duties, reporter: Reporter) -> Exit:
    """Check what a worker needs: settings, databases, tables and handlers. Nothing runs."""
    _introduce(outbox, duties, reporter)
    await outbox.check()
    reporter.info("valid: the databases are reachable, and all tables, columns and indexes exist")
    return Exit.OK


async def work(outbox: Outbox, duties: Duties, reporter: Reporter, host: str, port: int | None) -> Exit:
    """Run until a signal arrives, then shut down gracefully. A second signal ends the process immediately.

    The health pages respond, and the systemd watchdog is fed, from before the start until after the last handler.
    """
    manager = ServiceManager()
    with signalled() as stop:
        _introduce(outbox, duties, reporter)
        began = time.monotonic()
        async with (
            _served(outbox, host, port, reporter),
            manager.watched(partial(is_live, outbox)),
            outbox.running(fanout=duties.fanout, handling=duties.handling),
        ):
            tally = Tally(outbox)
            manager.notify("READY=1")
            await stop.wait()
            manager.notify("STOPPING=1")
            patience = format_duration(outbox.settings.shutdown_timeout)
            reporter.info(
                "stopping: running handlers have %s to finish; send the signal again to exit immediately", patience
            )
    _sum_up(tally.total(), time.monotonic() - began, reporter)
    return Exit.OK


@asynccontextmanager
async def _served(outbox: Outbox, host: str, port: int | None, reporter: Reporter) -> AsyncGenerator[None]:
    if port is None:
        yield
        return
    async with serve_health(outbox, port, host=host) as chosen:
        reporter.info("health pages: http://%s:%d/live, /ready, /health, /metrics", host, chosen)
        yield


async def drain(outbox: Outbox, duties: Duties, reporter: Reporter) -> Exit:
    """Do the due work once. Fails if due work is left, or if a failed run waits for a retry.

    Notifications that are due later do not count as a failure: a later drain handles them.
    """
    _introduce(outbox, duties, reporter)
    began = time.monotonic()
    _sum_up(await outbox.drain(duties.timeout), time.monotonic() - began, reporter)
    left = [await _left(outbox, name) for name in duties.only or (None,)]
    failed, pending = sum(one["failed"] for one in left), sum(one["pending"] for one in left)
    if failed:
        reporter.error("work is left: %d failed notifications wait for a retry", failed, failed=failed)
    due = await _names_with_due_rows(outbox)
    if duties.only:
        due = [name for name in due if name in {each for one in handlers_to_run(outbox) for each in one.names}]
    if due:
        reporter.error(
            "work is left: notifications of %s are due; an operator has paused the handler, or this outbox has no "
            "handler with that name", ", ".join(map(repr, due)),
        )  # fmt: skip
    elif pending:
        reporter.info("scheduled or delayed for later: %d", pending, waiting=pending)
    return Exit.FAILED if failed or due else Exit.OK


async def _left(outbox: Outbox, handler: str | None) -> Mapping[str, int]:
    """Return how many notifications of a handler, or of all handlers, wait after a drain."""
    states = {"failed": ("FAILED", "DYING"), "pending": ("PENDING",)}
    admin = admin_of(outbox)
    if handler is None:
        counts = await admin.counts()
        return {name: sum(counts[state] for state in chosen) for name, chosen in states.items()}
    return {name: await admin.count(Filter(states=chosen, handler=handler)) for name, chosen in states.items()}


async def _names_with_due_rows(outbox: Outbox) -> list[str]:
    """Return the handler names with a due notification on any shard."""
    names = set[str]()
    for shard, database in databases(outbox).items():
        now, counts = clock_of(outbox, shard)(), await counts_of(database, outbox.namespace)
        for name in await database.stored_notifications.unfinished_names(outbox.namespace):
            if await database.stored_notifications.any_due(outbox.namespace, now, slots_of(counts, [name])):
                names.add(name)
    return sorted(names)


# --- reports --------------------------------------------------------------------------------------


def _introduce(outbox: Outbox, duties: Duties, reporter: Reporter) -> None:
    does = " and ".join(["fans out"] * duties.fanout + ["runs handlers"] * _handles(outbox, duties))
    reporter.info(
        "outboxio %s %s for namespace %s", __version__, does or "does nothing", outbox.namespace,
        namespace=outbox.namespace, version=__version__,
    )  # fmt: skip
    reporter.list(_equipment(outbox, duties))
    if _handles(outbox, duties) and not handlers(outbox) and not schedules(outbox):
        reporter.warning("no handlers are registered: import the modules that register them in the outbox's module")


def _handles(outbox: Outbox, duties: Duties) -> bool:
    return duties.handling and outbox.settings.handling_enabled


def _equipment(outbox: Outbox, duties: Duties) -> list[tuple[str, str, str]]:
    """Return kind, name and remark of each shard, handler and job of this worker."""
    shown = [("shard", shard, database.dialect) for shard, database in databases(outbox).items()]
    if _handles(outbox, duties):
        shown += [("handler", handler.name, _subject(handler)) for handler in handlers_to_run(outbox)]
        shown += [("job", name, schedule) for name, schedule in schedules(outbox).items() if not duties.drain]
    return shown


def _subject(handler: Handler) -> str:
    """Return the events of a handler, and the aliases under which notifications may be stored."""
    wants = f"topic {handler.topic}" if handler.topic is not None else ", ".join(handler.event_type_names)
    return f"{wants} (aliases: {', '.join(sorted(handler.aliases))})" if handler.aliases else wants


def _sum_up(done: Drained, seconds: float, reporter: Reporter) -> None:
    reporter.info(
        "done in %s: fanned out %d, succeeded %d, failed %d, expired %d, dead %d",
        format_duration(timedelta(seconds=round(seconds, 1))), *astuple(done),
        seconds=round(seconds, 1), **asdict(done),
    )  # fmt: skip
