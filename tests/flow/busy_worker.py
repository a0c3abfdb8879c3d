"""An application that is always busy: it executes actions and handles their events through every fault.

``python -m tests.flow.busy_worker '{...}'``: on SIGTERM it stops executing, waits until everything is handled, and
leaves. It reports like ``worker.py``: ``running``; ``executed``, or ``refused`` with the error, each with the number
and its start time; ``handled``; ``health`` ten times a second, with the memory in MB and the delay of the event loop;
``left``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from outboxio import EventEnvelope, Outbox, Settings
from tests.flow.worker import report, stop_on_sigterm
from tests.kit import opened_by
from tests.kit.app import Emit, MoneyDeposited

STATM = Path("/proc/self/statm")
TASKS = 4
PAUSE = 0.1  # seconds between two actions of a task
HEALTH = 0.1  # seconds between two reports of it

numbers = count()


def memory() -> float:
    """The resident memory of this process in MB; 0 if unavailable."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if STATM.exists() else 0.0


async def execute(outbox: Outbox, stop: asyncio.Event) -> None:
    while not stop.is_set():
        number, begun = next(numbers), time.monotonic()
        try:
            await outbox.executor.execute(Emit((number,)))
            report("executed", number=number, begun=begun)
        except Exception as error:
            report("refused", number=number, begun=begun, error=type(error).__name__, message=str(error))
        await asyncio.sleep(PAUSE)


async def watch_health(stop: asyncio.Event) -> None:
    while not stop.is_set():
        begun = time.monotonic()
        await asyncio.sleep(HEALTH)
        report("health", late=time.monotonic() - begun - HEALTH, memory=memory())


async def main(config: dict[str, Any]) -> None:
    stop = stop_on_sigterm()
    settings = Settings.load(config["settings"], environ=None)
    async with Outbox(config["database"], namespace="app", settings=settings) as outbox:

        @outbox.handler(MoneyDeposited, name="receipt")
        async def receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await asyncio.sleep(0.01)
            report("handled", number=int(envelope.event.amount), attempt=envelope.attempt)

        async with outbox.running():
            report("running")
            async with asyncio.TaskGroup() as group:
                group.create_task(watch_health(stop))
                for _ in range(TASKS):
                    group.create_task(execute(outbox, stop))
            await outbox.drain()
    report("left")


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # the database is stopped on purpose
    opened_by.use()
    asyncio.run(main(json.loads(sys.argv[1])))
