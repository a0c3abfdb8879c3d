"""The trace of a row: from headers to OpenTelemetry's context, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_trace, _baggage = TraceContextTextMapPropagator(), W3CBaggagePropagator()

PARENT = "traceparent"
OWN_HEADERS = ("traceparent", "tracestate")
BAGGAGE = "baggage"


class Carrying:
    """Reads and writes the headers of a trace, with the baggage only if the application asks for baggage."""

    def __init__(self, *, baggage: bool) -> None:
        self._has_baggage = baggage
        self.headers = (*OWN_HEADERS, BAGGAGE) if baggage else OWN_HEADERS

    def read(self, headers: Mapping[str, Any]) -> Context:
        """The context that the headers describe. Without a valid ``traceparent`` the context has no span."""
        texts = {name: value for name, value in headers.items() if name in self.headers and isinstance(value, str)}
        context = _trace.extract(texts, Context())
        return _baggage.extract(texts, context) if self._has_baggage else context

    def write(self, context: Context | None = None) -> dict[str, str]:
        """The headers for a context, or for the current context; empty without a valid span."""
        headers: dict[str, str] = {}
        _trace.inject(headers, context)
        if self._has_baggage and headers:
            _baggage.inject(headers, context)
        return headers


def span_context_in(context: Context | None) -> trace.SpanContext:
    """The span in a context, or in the current context. The result may be invalid."""
    return trace.get_current_span(context).get_span_context()


def has_span(context: Context | None = None) -> bool:
    """True if the context, or the current context, has a span."""
    return span_context_in(context).is_valid
