"""SIGINT and SIGTERM for commands that go on until a signal comes."""

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
from outboxio.cli.answer import Exit
from outboxio.cli.inside import (
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
from outboxio.cli.logs import Teller
from outboxio.cli.options import Options
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
    """An event that the first signal sets.

    The signal handler is Python's and not the event loop's, so that a second signal ends the process even while a
    handler of the application blocks the loop: that is when people signal twice (decision 25).
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


# --- ``outboxio worker``: runs the handlers of an application in a separate process ---------------


class Duties(Options, frozen=True):
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
    def only(self) -> tuple[str, ...]:
        """The names of the only handlers to run; empty for all handlers.

        Raises :class:`TargetError` for names that cannot be read.
        """
        if self.handlers is None:
            return ()
        names = tuple(dict.fromkeys(name.strip() for name in self.handlers.split(",")))
        if not all(names):
            wanted = "names of handlers with commas, as in receipt,ledger"
            raise TargetError(f"--handlers {self.handlers!r}: expected {wanted}")
        return names


def take_on(outbox: Outbox, duties: Duties) -> None:
    """Restrict the outbox to the handlers that the duties name."""
    if duties.only:
        run_only(outbox, duties.only)


def warn_of_ignored(outbox: Outbox, given: Mapping[str, Any], tell: Teller) -> None:
    """Warn of settings in the environment or ``pyproject.toml`` that the application's code does not apply."""
    for name, value in given.items():
        if getattr(outbox.settings, name) != value:
            tell.warn(
                "setting %s of the environment or pyproject.toml is ignored: an outbox without settings= reads the "
                'environment, and one with settings=Settings.load("pyproject.toml") reads both', name,
            )  # fmt: skip


async def validate(outbox: Outbox, duties: Duties, tell: Teller) -> Exit:
    """Check what a worker needs: the settings, the databases, the tables and the handlers. Then nothing runs."""
    _introduce(outbox, duties, tell)
    await outbox.check()
    tell.say("valid: the databases answer, and every table, column and index is there")
    return Exit.FINE


async def work(outbox: Outbox, duties: Duties, tell: Teller, host: str, port: int | None) -> Exit:
    """Run until a signal comes, then leave gracefully. A second signal ends the process at once.

    The health pages answer, and the watchdog of systemd is fed, from before the start until after the last handler.
    """
    manager = ServiceManager()
    with signalled() as stop:
        _introduce(outbox, duties, tell)
        began = time.monotonic()
        async with (
            _served(outbox, host, port, tell),
            manager.watched(partial(is_live, outbox)),
            outbox.running(fanout=duties.fanout, handling=duties.handling),
        ):
            tally = Tally(outbox)
            manager.tell("READY=1")
            await stop.wait()
            manager.tell("STOPPING=1")
            patience = format_duration(outbox.settings.shutdown_timeout)
            tell.say("stopping: running handlers have %s to finish; signal again to leave at once", patience)
    _sum_up(tally.total(), time.monotonic() - began, tell)
    return Exit.FINE


@asynccontextmanager
async def _served(outbox: Outbox, host: str, port: int | None, tell: Teller) -> AsyncGenerator[None]:
    if port is None:
        yield
        return
    async with serve_health(outbox, port, host=host) as chosen:
        tell.say("health pages: http://%s:%d/live, /ready, /health, /metrics", host, chosen)
        yield


async def drain(outbox: Outbox, duties: Duties, tell: Teller) -> Exit:
    """Do the due work, once. The answer is no if due work is left, or a failed run waits for a retry.

    Notifications that wait for a later moment are no reason for a no: a call after that moment runs the handlers.
    """
    _introduce(outbox, duties, tell)
    began = time.monotonic()
    _sum_up(await outbox.drain(duties.timeout), time.monotonic() - began, tell)
    left = [await _left(outbox, name) for name in duties.only or (None,)]
    failed, pending = sum(one["failed"] for one in left), sum(one["pending"] for one in left)
    if failed:
        tell.fail("not all is done: %d left that failed, waiting for a retry", failed, failed=failed)
    due = await _names_with_due_rows(outbox)
    if duties.only:
        due = [name for name in due if name in {each for one in handlers_to_run(outbox) for each in one.names}]
    if due:
        tell.fail(
            "not all is done: notifications of %s are due and left: an operator paused the handler, or this outbox has "
            "no handler of that name", ", ".join(map(repr, due)),
        )  # fmt: skip
    elif pending:
        tell.say("left for a later moment, by a schedule or a delay: %d", pending, waiting=pending)
    return Exit.NO if failed or due else Exit.FINE


async def _left(outbox: Outbox, handler: str | None) -> Mapping[str, int]:
    """How many notifications of a handler, or of all handlers, wait after a drain."""
    states = {"failed": ("FAILED", "DYING"), "pending": ("PENDING",)}
    admin = admin_of(outbox)
    if handler is None:
        counts = await admin.counts()
        return {name: sum(counts[state] for state in chosen) for name, chosen in states.items()}
    return {name: await admin.count(Filter(states=chosen, handler=handler)) for name, chosen in states.items()}


async def _names_with_due_rows(outbox: Outbox) -> list[str]:
    """The handler names of which a notification is due now, on any shard."""
    names = set[str]()
    for shard, database in databases(outbox).items():
        now, counts = clock_of(outbox, shard)(), await counts_of(database, outbox.namespace)
        for name in await database.stored_notifications.unfinished_names(outbox.namespace):
            if await database.stored_notifications.any_due(outbox.namespace, now, slots_of(counts, [name])):
                names.add(name)
    return sorted(names)


# --- in words ------------------------------------------------------------------------------------


def _introduce(outbox: Outbox, duties: Duties, tell: Teller) -> None:
    does = " and ".join(["fans out"] * duties.fanout + ["runs handlers"] * _handles(outbox, duties))
    tell.say(
        "outboxio %s %s for namespace %s", __version__, does or "does nothing", outbox.namespace,
        namespace=outbox.namespace, version=__version__,
    )  # fmt: skip
    tell.list(_equipment(outbox, duties))
    if _handles(outbox, duties) and not handlers(outbox) and not schedules(outbox):
        tell.warn("no handlers are registered: import the modules that register them where the outbox is")


def _handles(outbox: Outbox, duties: Duties) -> bool:
    return duties.handling and outbox.settings.handling_enabled


def _equipment(outbox: Outbox, duties: Duties) -> list[tuple[str, str, str]]:
    """Kind, name and remark of each shard, handler and job of this worker."""
    shown = [("shard", shard, database.dialect) for shard, database in databases(outbox).items()]
    if _handles(outbox, duties):
        shown += [("handler", handler.name, _subject(handler)) for handler in handlers_to_run(outbox)]
        shown += [("job", name, schedule) for name, schedule in schedules(outbox).items() if not duties.drain]
    return shown


def _subject(handler: Handler) -> str:
    """The events of a handler, and the aliases under which notifications may be stored."""
    wants = f"topic {handler.topic}" if handler.topic is not None else ", ".join(handler.wanted_names)
    return f"{wants} (also found as {', '.join(sorted(handler.aliases))})" if handler.aliases else wants


def _sum_up(done: Drained, seconds: float, tell: Teller) -> None:
    tell.say(
        "done in %s: fanned out %d, succeeded %d, failed %d, expired %d, dead %d",
        format_duration(timedelta(seconds=round(seconds, 1))), *astuple(done),
        seconds=round(seconds, 1), **asdict(done),
    )  # fmt: skip
