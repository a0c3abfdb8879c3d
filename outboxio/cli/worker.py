"""``outboxio worker``: runs the handlers of an application in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from outboxio import __version__
from outboxio.cli.answer import Exit, indented, say_aside, say_error
from outboxio.cli.inside import Tally, databases, handlers
from outboxio.duration import format_duration
from outboxio.event import type_name
from outboxio.handler import Handler
from outboxio.outbox import Drained, Outbox

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Duties(Struct, frozen=True):
    """What the worker is to do."""

    fanout: bool = True
    handling: bool = True


async def work(outbox: Outbox, duties: Duties) -> Exit:
    """Run until a signal comes, then leave gracefully. A second signal ends the process as if nobody had caught it."""
    with _signalled() as stop:
        _introduce(outbox, duties)
        began = time.monotonic()
        async with outbox.running(fanout=duties.fanout, handling=duties.handling):
            tally = Tally(outbox)
            await stop.wait()
            patience = format_duration(outbox.settings.shutdown_timeout)
            say_aside(f"stopping: running handlers have {patience} to finish; signal again to leave at once")
    _sum_up(tally.total(), time.monotonic() - began)
    return Exit.FINE


async def drain(outbox: Outbox, timeout: str | None) -> Exit:
    """Do what is due, once. The answer is no if something is left that failed and waits for its retry."""
    _introduce(outbox, Duties())
    began = time.monotonic()
    _sum_up(await outbox.drain(timeout), time.monotonic() - began)
    counts = await outbox.admin.counts()
    left = counts["PENDING"] + counts["FAILED"]
    if left:
        say_error(f"not all is done: {left} left, waiting for a retry, a delay, or a process that has the handler")
    return Exit.NO if left else Exit.FINE


def log_to_stderr(level: str) -> None:
    """Unless the application has set up logging already: then only the level of outboxio's own log is set."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    logging.getLogger("outboxio").setLevel(level.upper())


@contextmanager
def _signalled() -> Generator[asyncio.Event]:
    """An event that the first signal sets.

    A handler of Python's own and not of the event loop: it also hears the second signal when a handler of the user's
    blocks the loop, which is when people signal twice.
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


# --- in words ------------------------------------------------------------------------------------


def _introduce(outbox: Outbox, duties: Duties) -> None:
    does = " and ".join(["fans out"] * duties.fanout + ["runs handlers"] * _handles(outbox, duties))
    say_aside(f"outboxio {__version__} {does or 'does nothing'} for namespace [bold]{outbox.namespace}[/]")
    say_aside(indented(_equipment(outbox, duties)))
    if _handles(outbox, duties) and not handlers(outbox):
        say_aside("[yellow]no handlers are registered: import the modules that register them where the outbox is[/]")


def _handles(outbox: Outbox, duties: Duties) -> bool:
    return duties.handling and outbox.settings.handling_enabled


def _equipment(outbox: Outbox, duties: Duties) -> Table:
    table = Table.grid(padding=(0, 2))
    for shard, database in databases(outbox).items():
        table.add_row("shard", Text(shard, "cyan"), database.dialect)
    for handler in handlers(outbox) if _handles(outbox, duties) else ():
        table.add_row("handler", Text(handler.name, "cyan"), _subject(handler))
    return table


def _subject(handler: Handler) -> str:
    """What a handler is for, and which other names it answers to."""
    wants = f"topic {handler.topic}" if handler.topic is not None else ", ".join(map(type_name, handler.event_types))
    return f"{wants} (also found as {', '.join(sorted(handler.aliases))})" if handler.aliases else wants


def _sum_up(done: Drained, seconds: float) -> None:
    say_aside(
        f"done in {format_duration(timedelta(seconds=round(seconds, 1)))}: fanned out {done.fanned_out}, "
        f"succeeded {done.succeeded}, failed {done.failed}, expired {done.expired}, dead {done.dead}"
    )
