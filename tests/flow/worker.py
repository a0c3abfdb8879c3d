"""A process of an application, for tests that need several processes.

``python -m tests.flow.worker '{...}'``: runs the handlers described by its argument until SIGTERM, and reports its work
as JSON lines on standard output, each with the time (``time.monotonic``, one clock for all processes): ``running``,
``taken`` and ``lost`` (a cluster lock), ``call`` and ``done`` (a handler), ``log``, ``left``. A line on standard input
releases the handlers with a gate; its end means that the test has ended, and ends this process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import aiomysql

from outboxio import EventEnvelope, Outbox, Settings, Unprocessable
from outboxio.model.outcome import Outcome
from tests.kit import opened_by
from tests.kit.app import MoneyDeposited, WalletOpened
from tests.kit.inside import report_lock_changes, report_outcomes
from tests.kit.mysql import SCHEMES, scheme_of
from tests.kit.server_actions import actions_on


def report(what: str, **details: Any) -> None:
    line = json.dumps({"what": what, "at": time.monotonic(), **details})
    os.write(1, f"{line}\n".encode())


class Reporting(logging.Handler):
    """Reports warnings and errors, and drops other records."""

    def emit(self, record: logging.LogRecord) -> None:
        report("log", level=record.levelname, message=record.getMessage())


def report_locks() -> None:
    report_lock_changes(
        taken=lambda name, lease: report("taken", lock=name.lease, term=lease.term),
        lost=lambda name: report("lost", lock=name.lease),
    )


def freeze_in_settlement(database: str) -> None:
    """Stop this process during the transaction that writes an outcome with events."""
    (freeze_in_mysql if scheme_of(database) in SCHEMES else freeze_in_postgres)()


def freeze_in_mysql() -> None:
    """Before COMMIT, as the driver would send it."""
    send = aiomysql.Connection._execute_command
    has_events = False

    async def freeze(self: aiomysql.Connection, command: int, sql: str | bytes | bytearray) -> None:
        nonlocal has_events
        statement = sql if isinstance(sql, str) else sql.decode()
        # No other code in this process writes events.
        has_events = has_events or "INSERT INTO eventlog.events" in statement
        if has_events and statement.startswith("COMMIT"):
            aiomysql.Connection._execute_command = send
            report("freezing")
            os.kill(os.getpid(), signal.SIGSTOP)
        await send(self, command, sql)

    aiomysql.Connection._execute_command = freeze


def freeze_in_postgres() -> None:
    from outboxio.storage.postgres import notifications

    row_count = notifications.row_count

    def freeze(status: str) -> int:  # the query between the settlement and COMMIT
        notifications.row_count = row_count
        report("freezing")
        os.kill(os.getpid(), signal.SIGSTOP)
        return row_count(status)

    notifications.row_count = freeze


def die_with_outcome(number: int) -> None:
    """End this process once this many handlers have finished, before any outcome is written."""
    left = number

    def die_in_time(_: Outcome) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    report_outcomes(die_in_time)


def add_handler(
    outbox: Outbox,
    gate: asyncio.Event,
    *,
    name: str,
    aliases: tuple[str, ...] = (),
    gated: bool = False,
    sleep: float = 0,
    fails_on: tuple[int, ...] = (),
    refuses: tuple[int, ...] = (),
    emits: bool = False,
    blocks: float = 0,
    holds_after: int | None = None,
    **options: Any,
) -> None:
    """Add a handler that reports; ``options`` are options of ``outbox.handler``.

    ``holds_after``: the number of runs after which each further run waits until this process leaves, so that a test
    that kills or stops the process always finds work in progress.
    """
    numbers = itertools.count(1)

    @outbox.handler(MoneyDeposited, name=name, aliases=aliases, **options)
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        amount = int(envelope.event.amount)
        key = envelope.ordering_key or ""
        report("call", handler=name, amount=amount, attempt=envelope.attempt, key=key)
        time.sleep(blocks)  # noqa: ASYNC251  # the block is the point
        if gated:
            await gate.wait()
        await asyncio.sleep(sleep)
        if holds_after is not None and next(numbers) > holds_after:
            await envelope.stopping.wait()
        if amount in fails_on:
            raise ValueError(f"{name} refuses {amount}")
        if amount in refuses:
            raise Unprocessable(f"{name} will never take {amount}")
        if emits:
            envelope.emit(WalletOpened(envelope.event.wallet_id))
        report("done", handler=name, amount=amount)


def stop_on_sigterm(on_line: Callable[[], object] = lambda: None) -> asyncio.Event:
    """Return an event that SIGTERM sets. A line on standard input calls ``on_line``; the end of the input ends this
    process, because then the test has ended.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        if not os.read(0, 1024):
            os._exit(2)
        on_line()

    loop.add_reader(0, read)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def main(config: dict[str, Any]) -> None:
    gate = asyncio.Event()
    stop = stop_on_sigterm(gate.set)
    settings = Settings.load(config["settings"], environ=None)
    async with AsyncExitStack() as stack:
        url = config["database"]
        source = await stack.enter_async_context(actions_on(url).pool()) if config["given_pool"] else url
        outbox = await stack.enter_async_context(Outbox(source, namespace="app", settings=settings))
        for handler in config["handlers"]:
            add_handler(outbox, gate, **handler)
        async with outbox.running(**config["roles"]):
            report("running")
            await stop.wait()
    report("left")


if __name__ == "__main__":
    logging.getLogger("outboxio").addHandler(Reporting(logging.WARNING))
    report_locks()
    arguments = json.loads(sys.argv[1])
    if arguments["freezes_in_settlement"]:
        freeze_in_settlement(arguments["database"])
    if arguments["dies_with_outcome"]:
        die_with_outcome(arguments["dies_with_outcome"])
    opened_by.use()
    asyncio.run(main(arguments))
