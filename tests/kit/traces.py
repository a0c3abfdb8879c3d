"""Spans of a real SDK, kept in memory, and functions that query them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from outboxio.integrations.opentelemetry import OpenTelemetry


class Traces:
    """A separate SDK with the finished spans."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("a test")

    def telemetry(self, **options: Any) -> OpenTelemetry:
        return OpenTelemetry(self.provider, **options)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def forget(self) -> None:
        self._exporter.clear()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> int | None:
    """The id of the parent span."""
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    return context_of(span).span_id


def trace_of(span: ReadableSpan) -> int:
    return context_of(span).trace_id


def context_of(span: ReadableSpan) -> trace.SpanContext:
    assert span.context is not None
    return span.context


def links_of(span: ReadableSpan) -> list[int]:
    """The ids of the linked spans."""
    return [link.context.span_id for link in span.links]


def header_of(span: ReadableSpan) -> str:
    """The ``traceparent`` of a span."""
    context = context_of(span)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
