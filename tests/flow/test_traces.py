"""A trace that starts in a request continues in a worker process, through three handlers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outboxio import Outbox
from tests.flow.trace_worker import FAILS_ONCE
from tests.kit.orders import PlaceOrder
from tests.kit.processes import Worker
from tests.kit.traces import Traces, id_of, trace_of

pytestmark = pytest.mark.above_statements

StartProgram = Callable[..., Awaitable[Worker]]


async def test_a_worker_continues_the_requests_trace_and_links_a_retry(
    database_url: str, start_program: StartProgram, tmp_path: Path
) -> None:
    traces, file = Traces(), tmp_path / "spans.jsonl"
    async with Outbox(database_url, namespace="app", telemetry=traces.telemetry()) as outbox:
        await outbox.migrate()
        worker = await start_program("tests.flow.trace_worker", database=database_url, spans=str(file))
        await worker.until("running")
        for order in (1, FAILS_ONCE):
            with traces.tracer.start_as_current_span("POST /orders"):
                await outbox.execute(PlaceOrder(order))
            await worker.until("notified", order=order)
        await worker.leave()

    there = [json.loads(line) for line in file.read_text().splitlines()]
    assert {span["resource"]["attributes"]["service.name"] for span in there} == {"worker"}
    good, bad = (trace_of(request) for request in traces.named("POST /orders"))
    sent = {trace_of(span): hexed(id_of(span)) for span in traces.named("send Placed")}

    # The request, three handlers and the events between them are one trace, each span the child of the previous span.
    steps = [f"{operation} {event}" for event in ("Placed", "Paid", "Shipped") for operation in ("send", "process")][1:]
    chain = [one(there, name, good) for name in steps]
    assert [span["parent_id"] for span in chain] == [sent[good], *(id_in(span) for span in chain[:-1])]

    # The retry begins a trace with a link to the first trace, and the third handler belongs to the trace of the retry.
    failed = one(there, "process Paid", bad)
    (again,) = [
        span for span in there if span["name"] == "process Paid" and span["attributes"]["outboxio.attempt"] == 2
    ]
    assert failed["attributes"]["outboxio.outcome"] == "retry"
    assert again["parent_id"] is None
    assert [link["context"] for link in again["links"]] == [one(there, "send Paid", bad)["context"]]
    new = int(again["context"]["trace_id"], 16)
    assert one(there, "send Shipped", new)["parent_id"] == id_in(again)
    assert one(there, "process Shipped", new)["parent_id"] == id_in(one(there, "send Shipped", new))
    assert new not in (good, bad)


def one(spans: list[dict[str, Any]], name: str, trace: int) -> dict[str, Any]:
    """The only span of a trace with this name."""
    (span,) = [s for s in spans if s["name"] == name and s["context"]["trace_id"] == hexed(trace, 32)]
    return span


def hexed(number: int, digits: int = 16) -> str:
    return f"0x{number:0{digits}x}"


def id_in(span: dict[str, Any]) -> Any:
    return span["context"]["span_id"]
