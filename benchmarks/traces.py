"""Measure the cost of traces for a drain: ``python -m benchmarks.traces --only sqlite --events 20000 --rounds 3``.

The same committed events are fanned out and handled by an empty handler, alternating between no telemetry,
OpenTelemetry with 1 % of the events in a sampled trace, and OpenTelemetry with all events in one. The SDK is the real
one, with a batch processor and an exporter that drops the spans. The CPU time is that of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.databases import as_they_come, choose
from benchmarks.meter import metered
from benchmarks.ours import commit_events, require, settled, subscribe
from benchmarks.task import Figures, Task
from benchmarks.workload import NAMESPACE, run
from outboxio import Outbox
from outboxio.integrations.opentelemetry import OpenTelemetry
from tests.kit.app import Look
from tests.kit.servers import DIALECTS

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
SETTINGS = {"no telemetry": None, "1 % sampled": 100, "100 % sampled": 1}
"""Setting: one event out of this many is in a sampled trace; None means no telemetry."""


class Dropping(SpanExporter):
    """Counts and drops the spans."""

    spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


async def drain(task: Task, one_of: int | None) -> Figures:
    """Drain the events. Return the figures, with the number of spans."""
    exporter, provider = Dropping(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    telemetry = None if one_of is None else OpenTelemetry(provider)
    async with Outbox(task.url, namespace=NAMESPACE, telemetry=telemetry) as outbox:
        await outbox.migrate()
        await commit_events(task, task["events"], 1)
        await trace_events(task, one_of)
        subscribe(outbox, 1, 1)
        async with metered(task.url, task.dialect) as meter:
            await meter.start()
            async with outbox.running():
                await settled(outbox, task["events"])
                meter.stop()
        await require(outbox, SUCCEEDED=task["events"], undelivered=0)
    provider.shutdown()
    return meter.per(task["events"]) | {"spans": exporter.spans}


async def trace_events(task: Task, one_of: int | None) -> None:
    """Give each event the headers of a request with a trace, also without telemetry."""
    table, every = Look(task.url).table("events"), one_of or 100
    flags = f"CASE WHEN sequence % {every} = 0 THEN '01' ELSE '00' END"
    header = f"concat('{{\"traceparent\":\"00-{TRACE}-', {flags}, '\"}}')"
    if task.dialect == "sqlite":
        header = f"'{{\"traceparent\":\"00-{TRACE}-' || {flags} || '\"}}'"
    cast = "::jsonb" if task.dialect == "postgres" else ""
    await run(task.url, f"UPDATE {table} SET headers = ({header}){cast}")
    if task.dialect == "postgres":
        await run(task.url, f"VACUUM ANALYZE {table}")


def measure(server: Any, dialect: str, events: int, rounds: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name, one_of in SETTINGS.items():
            with TemporaryDirectory() as directory, DIALECTS[dialect].fresh_database(server, Path(directory)) as url:
                task = Task("drain", name, dialect, url, {"events": events})
                found[name].append(asyncio.run(drain(task, one_of)))
    return found


def shown(found: dict[str, list[Figures]]) -> str:
    lines = ["| setting | events/s | relative to no telemetry | CPU us per event | spans |", "|---|---|---|---|---|"]
    base = median(figures["rate"] for figures in found["no telemetry"])
    for name, runs in found.items():
        rate, cpu = (median(figures[key] for figures in runs) for key in ("rate", "cpu_us"))
        lines.append(f"| {name} | {rate:,.0f} | {rate / base:.2f} | {cpu:.1f} | {runs[-1]['spans']:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="a dialect, or a version named as in the tests", default="sqlite")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    as_they_come()
    for slot, servers in choose(None, options.only, os.environ):
        try:
            server = servers.take(slot)
            found = measure(server, slot.dialect, options.events, options.rounds)
            print(f"{slot.id}\n\n{shown(found)}\n")
        finally:
            servers.close()


if __name__ == "__main__":
    main()
