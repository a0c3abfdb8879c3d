"""One process of an application, for tests that need several of them.

``python -m tests.flow.worker '{...}'``: runs the handlers that its argument describes, until SIGTERM, and reports what
it does as JSON lines on standard output, each with the moment (``time.monotonic``, one clock for all processes):
``running``, ``taken`` and ``lost`` (a cluster lock), ``call`` and ``done`` (a handler), ``log``, ``left``. A line on
standard input lets the handlers with a gate through; its end means that the test is gone, and so is this.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import aiomysql

from outboxio import EventEnvelope, Outbox, Settings, Unprocessable
from outboxio.dispatcher import Dispatcher
from outboxio.names import LockName
from outboxio.outcome import Lease, Outcome
from outboxio.shard import ShardWork
from tests.app import MoneyDeposited, WalletOpened
from tests.mysql import SCHEMES, scheme_of


def report(what: str, **details: Any) -> None:
    line = json.dumps({"what": what, "at": time.monotonic(), **details})
    os.write(1, f"{line}\n".encode())


class Reporting(logging.Handler):
    """Reports warnings and errors; the rest is nobody's business."""

    def emit(self, record: logging.LogRecord) -> None:
        report("log", level=record.levelname, message=record.getMessage())


def report_locks() -> None:
    taken, lost = ShardWork.lock_taken, ShardWork.lock_lost

    def lock_taken(self: ShardWork, name: LockName, lease: Lease) -> None:
        report("taken", lock=name.lease, term=lease.term)
        taken(self, name, lease)

    def lock_lost(self: ShardWork, name: LockName) -> None:
        report("lost", lock=name.lease)
        lost(self, name)

    ShardWork.lock_taken, ShardWork.lock_lost = lock_taken, lock_lost  # type: ignore[method-assign]


def freeze_in_settlement(database: str) -> None:
    """Stop this process in the middle of the transaction that writes an outcome together with events."""
    (freeze_in_mysql if scheme_of(database) in SCHEMES else freeze_in_postgres)()


def freeze_in_mysql() -> None:
    """Before COMMIT, as the driver would send it."""
    send = aiomysql.Connection._execute_command
    has_events = False

    async def freeze(self: aiomysql.Connection, command: int, sql: str | bytes | bytearray) -> None:
        nonlocal has_events
        statement = sql if isinstance(sql, str) else sql.decode()
        # Nothing else in this process writes events.
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

    def freeze(status: str) -> int:  # what is asked between the settlement and COMMIT
        notifications.row_count = row_count
        report("freezing")
        os.kill(os.getpid(), signal.SIGSTOP)
        return row_count(status)

    notifications.row_count = freeze


def die_with_outcome(number: int) -> None:
    """End this process the moment so many handlers have ended, and before any outcome is written."""
    add, left = Dispatcher._add, number

    def add_or_die(self: Dispatcher, outcome: Outcome) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, outcome)

    Dispatcher._add = add_or_die  # type: ignore[method-assign]


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
    concurrency: int | None = None,
    delivery: str = "at_least_once",
) -> None:
    @outbox.handler(MoneyDeposited, name=name, aliases=aliases, concurrency=concurrency, delivery=delivery)
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        amount = int(envelope.event.amount)
        report("call", handler=name, amount=amount, attempt=envelope.attempt)
        if gated:
            await gate.wait()
        await asyncio.sleep(sleep)
        if amount in fails_on:
            raise ValueError(f"{name} refuses {amount}")
        if amount in refuses:
            raise Unprocessable(f"{name} will never take {amount}")
        if emits:
            envelope.emit(WalletOpened(envelope.event.wallet_id))
        report("done", handler=name, amount=amount)


def stop_when_told(heard: Callable[[], object] = lambda: None) -> asyncio.Event:
    """What SIGTERM sets. A line on the standard input is ``heard``; its end, the test's, is the end of this process."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        if not os.read(0, 1024):
            os._exit(2)
        heard()

    loop.add_reader(0, read)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def main(told: dict[str, Any]) -> None:
    gate = asyncio.Event()
    stop = stop_when_told(gate.set)
    settings = Settings.load(told["settings"], environ=None)
    async with Outbox(told["database"], namespace="app", settings=settings) as outbox:
        for handler in told["handlers"]:
            add_handler(outbox, gate, **handler)
        async with outbox.running(**told["roles"]):
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
    asyncio.run(main(arguments))
