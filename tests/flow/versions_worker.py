"""A process of a deployment: it has a version of an event, emits events of this version, and handles events.

``python -m tests.flow.versions_worker '{...}'``: reports JSON lines on standard output, until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import outboxio
from outboxio import Event, EventEnvelope, Outbox

EVENTS = 4


class First(Event, type_name="Paid"):
    number: int


class Second(Event, type_name="Paid", version=2):
    number: int
    currency: str


@outboxio.upcaster(Second, from_version=1)
def with_currency(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "currency": "EUR"}


def report(what: str, **details: Any) -> None:
    os.write(1, f"{json.dumps({'what': what, 'at': time.monotonic(), **details})}\n".encode())


def event_of(version: int, number: int) -> Event:
    return First(number) if version == 1 else Second(number, "USD")


def add_handlers(outbox: Outbox, version: int) -> None:
    cls = First if version == 1 else Second

    @outbox.handler(cls, name="plain")
    async def plain(envelope: EventEnvelope[Any]) -> None:
        report("plain", number=envelope.event.number, attempt=envelope.attempt)

    @outbox.handler(cls, name="ordered", ordered=True, delivery="transactional")
    async def ordered(envelope: EventEnvelope[Any]) -> None:
        report("ordered", number=envelope.event.number, attempt=envelope.attempt)


async def main(config: dict[str, Any]) -> None:
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    outbox, version = Outbox(config["database"], namespace="app"), config["version"]
    add_handlers(outbox, version)
    await outbox.migrate()
    async with outbox.running(handling=config["handles"]):
        report("running")
        await write(outbox, version, config["first"])
        report("written")
        await leave.wait()
    await outbox.close()
    report("left")


async def write(outbox: Outbox, version: int, first: int) -> None:
    for number in range(first, first + EVENTS):
        async with outbox.transaction("Pay") as tx:
            tx.emit(event_of(version, number), ordering_key="k")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
