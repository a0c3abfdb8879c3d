"""A process of a deployment: emits and handles events, with whichever version of outboxio is on the path.

``python -m tests.flow.rolling_worker '{...}'``: reports JSON lines on standard output, until SIGTERM. The program uses
only features of the previous version of outboxio.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import outboxio
from outboxio import Action, Event, EventEnvelope, Outbox, Transaction

KEYS = 6
"""The ordering keys of a process."""
PAUSE = 0.02
"""Seconds between two events."""


class Counted(Event):
    key: str
    number: int


class Count(Action):
    key: str
    number: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Counted(self.key, self.number), model_id=self.key, model_type="Counter")


def report(what: str, **details: Any) -> None:
    os.write(1, f"{json.dumps({'what': what, 'at': time.monotonic_ns(), **details})}\n".encode())


class Reporting(logging.Handler):
    """Reports warnings and errors, and drops other records."""

    def emit(self, record: logging.LogRecord) -> None:
        report("log", level=record.levelname, message=record.getMessage())


def add_handlers(outbox: Any, options: dict[str, Any]) -> None:
    """``outbox`` is of either version, and only the newer version supports the options."""

    @outbox.handler(Counted, name="plain", **options)
    async def plain(envelope: EventEnvelope[Counted]) -> None:
        await asyncio.sleep(0.003)
        report("plain", key=envelope.event.key, number=envelope.event.number)

    @outbox.handler(Counted, name="ordered", ordered=True, **options)
    async def ordered(envelope: EventEnvelope[Counted]) -> None:
        began = time.monotonic_ns()
        await asyncio.sleep(0.003)
        report("ordered", key=envelope.event.key, number=envelope.event.number, began=began)


async def produce(outbox: Outbox, name: str, stop: asyncio.Event) -> None:
    """Emit the events of a key one after another, so that their order is known."""
    number = 0
    while not stop.is_set():
        key = f"{name}-{number % KEYS}"
        await outbox.executor.execute(Count(key, number // KEYS + 1))
        report("emitted", key=key, number=number // KEYS + 1)
        number += 1
        await asyncio.sleep(PAUSE)


async def main(config: dict[str, Any]) -> None:
    quiet, leave = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        quiet.set()
        leave.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, quiet.set)
    loop.add_signal_handler(signal.SIGTERM, stop)
    logging.getLogger().addHandler(Reporting(logging.WARNING))
    outbox = Outbox(config["database"], namespace="app")
    add_handlers(outbox, config["options"])
    if config["migrates"]:
        await outbox.migrate()
    async with outbox.running():
        report("running", version=str(Path(outboxio.__file__).parents[1]))
        await produce(outbox, config["name"], quiet)
        report("quiet")
        await leave.wait()
    await outbox.close()
    report("left")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
