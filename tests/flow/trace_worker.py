"""A worker process with its own SDK: three handlers, each of which causes the next event, and a file of spans.

``python -m tests.flow.trace_worker '{...}'``: reports JSON lines on standard output, until SIGTERM. Then all spans are
in the file, one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from outboxio import EventEnvelope, Outbox, RetryPolicy
from outboxio.integrations.opentelemetry import OpenTelemetry
from tests.kit.orders import Paid, Placed, Shipped

FAILS_ONCE = 7
"""The order whose second handler fails at the first attempt."""


def report(what: str, **details: Any) -> None:
    os.write(1, f"{json.dumps({'what': what, 'at': time.monotonic(), **details})}\n".encode())


def add_handlers(outbox: Outbox) -> None:
    @outbox.handler(Placed, name="pay")
    async def pay(envelope: EventEnvelope[Placed]) -> None:
        envelope.emit(Paid(envelope.event.order))

    @outbox.handler(Paid, name="ship", delivery="transactional", retry=RetryPolicy(base=0.01, jitter=0))
    async def ship(envelope: EventEnvelope[Paid]) -> None:
        if envelope.event.order == FAILS_ONCE and envelope.attempt == 1:
            raise ValueError("no truck")
        envelope.emit(Shipped(envelope.event.order))

    @outbox.handler(Shipped, name="notify")
    async def notify(envelope: EventEnvelope[Shipped]) -> None:
        report("notified", order=envelope.event.order)


def on_one_line(span: ReadableSpan) -> str:
    return span.to_json(indent=None) + "\n"


async def main(config: dict[str, Any], file: TextIO) -> None:
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    provider = TracerProvider(resource=Resource({"service.name": "worker"}))
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=file, formatter=on_one_line)))
    async with Outbox(config["database"], namespace="app", telemetry=OpenTelemetry(provider)) as outbox:
        add_handlers(outbox)
        async with outbox.running():
            report("running")
            await leave.wait()
    provider.shutdown()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    with Path(arguments["spans"]).open("w") as file:
        asyncio.run(main(arguments, file))
    report("left")
