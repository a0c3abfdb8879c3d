"""The names of spans and attributes, and the conversion between a row's headers and OpenTelemetry contexts.

The conventions for messaging are in development, and constants for names in development are not stable in Python. So
the names are literals, and follow the version of the conventions in :data:`SCHEMA_URL`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """Reads and writes the headers of a trace, with the baggage only if your application requests it."""

    def __init__(self, *, baggage: bool) -> None:
        self._has_baggage = baggage
        self.headers = (*OWN_HEADERS, BAGGAGE) if baggage else OWN_HEADERS

    def read(self, headers: Mapping[str, Any]) -> Context:
        """Return the context that the headers describe. Without a valid ``traceparent`` it has no span."""
        texts = {name: value for name, value in headers.items() if name in self.headers and isinstance(value, str)}
        context = _trace.extract(texts, Context())
        return _baggage.extract(texts, context) if self._has_baggage else context

    def write(self, context: Context | None = None) -> dict[str, str]:
        """Return the headers for a context, or for the current context; empty without a valid span."""
        headers: dict[str, str] = {}
        _trace.inject(headers, context)
        if self._has_baggage and headers:
            _baggage.inject(headers, context)
        return headers


def span_context_in(context: Context | None) -> trace.SpanContext:
    """Return the span in a context, or in the current context. It may be invalid."""
    return trace.get_current_span(context).get_span_context()


def has_span(context: Context | None = None) -> bool:
    """True if the context, or the current context, has a span."""
    return span_context_in(context).is_valid


INSTRUMENTATION = "outboxio"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM = "outboxio"

# From the conventions.
MESSAGING_SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
SUBSCRIPTION = "messaging.destination.subscription.name"
MESSAGE_ID = "messaging.message.id"
CONVERSATION_ID = "messaging.message.conversation_id"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"

# Specific to outboxio.
NAMESPACE = "outboxio.namespace"
SHARD = "outboxio.shard"
ACTION = "outboxio.action"
ATTEMPTS = "outboxio.attempts"
ATTEMPT = "outboxio.attempt"
DELIVERY = "outboxio.delivery"
OUTCOME = "outboxio.outcome"
RETRY_AT = "outboxio.retry_at"
HANDLER = "outboxio.handler"
ROWS = "outboxio.rows"
JOB = "outboxio.job"
SCHEDULED_AT = "outboxio.scheduled_at"

# Values of OUTCOME, for actions and for runs.
COMMITTED, JOINED, DUPLICATE, REFUSED, UNKNOWN = "committed", "joined", "duplicate", "refused", "unknown"
SUCCEEDED, RETRY, DEAD, EXPIRED, CUT_SHORT = "succeeded", "retry", "dead", "expired", "cut_short"
FAILED = "failed"  # in inbox.consume, where the sender or a later outcome decides about a retry


def execute(action_name: str) -> str:
    return f"execute {action_name}"


def send(destination: str) -> str:
    return f"send {destination}"


def process(destination: str) -> str:
    return f"process {destination}"


def on_dead(handler_name: str) -> str:
    return f"on_dead {handler_name}"


def job(job_name: str) -> str:
    return f"job {job_name}"


def destination_of(event_types: Iterable[str], namespace: str) -> str:
    """Return the event type, or the namespace if there are several types."""
    distinct = set(event_types)
    return distinct.pop() if len(distinct) == 1 else namespace
