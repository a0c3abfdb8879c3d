"""Write traces to the file in ``SHOP_TRACES``. ``python -m shop.tracing`` prints the newest trace.

An application exports to a collector instead: ``BatchSpanProcessor(OTLPSpanExporter())``.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from outboxio.integrations.opentelemetry import OpenTelemetry

FILE = os.environ.get("SHOP_TRACES")


def as_line(span: ReadableSpan) -> str:
    return json.dumps(json.loads(span.to_json())) + "\n"


def open_telemetry() -> OpenTelemetry | None:
    """Return the outbox's telemetry. The web application and the worker append their spans to the same file."""
    if FILE is None:
        return None
    provider = TracerProvider()
    file = Path(FILE).open("a")  # noqa: SIM115  # stays open as long as the process runs
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=as_line)))
    return OpenTelemetry(provider)


def cause(span: dict[str, Any]) -> str | None:
    """Return the id of the span that caused this one: its parent, or for a retry the linked span."""
    linked = [link["context"]["span_id"] for link in span["links"]]
    parent: str | None = span["parent_id"] or next(iter(linked), None)
    return parent


def tree(spans: list[dict[str, Any]], above: str | None, indent: str = "") -> Iterator[str]:
    """Yield a line per span, indented below the span that caused it."""
    for span in spans:
        if cause(span) == above:
            attributes = span["attributes"]
            handler = attributes.get("messaging.destination.subscription.name", "")
            yield f"{indent + span['name']:<32} {handler:<18} {attributes.get('outboxio.outcome', '')}".rstrip()
            yield from tree(spans, span["context"]["span_id"], indent + "  ")


def newest_trace() -> str:
    lines = Path(FILE or "traces.jsonl").read_text().splitlines()
    spans = sorted((json.loads(line) for line in lines), key=lambda span: str(span["start_time"]))
    *_, newest = (span for span in spans if cause(span) is None)
    return "\n".join(tree([newest, *(span for span in spans if cause(span) is not None)], None))


if __name__ == "__main__":
    print(newest_trace())
