"""Spans around writing: ``send``, whose context is what the headers of the events hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from outboxio.integrations.opentelemetry import names
from outboxio.integrations.opentelemetry.context import PARENT, Carrying, has_span, span_context_in
from outboxio.integrations.opentelemetry.work import Attributes, Spanned
from outboxio.model.emitter import current_origin
from outboxio.model.envelope import current_envelope
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.support.codec import decode_object
from outboxio.telemetry.protocol import SENDING, Sending, with_trace


def trace_headers(*, baggage: bool = False) -> dict[str, str]:
    """The headers of the current trace, for a writer that outboxio does not know: plain SQL, or a ``Producer``.

    ``traceparent`` and ``tracestate`` (W3C Trace Context), and ``baggage`` if asked for. The result is empty without a
    current span.

    Example::

        producer.record(connection, OrderPaid(order_id), action="PayOrder", headers=trace_headers())
    """
    return Carrying(baggage=baggage).write()


def parent_around(headers: Mapping[str, Any] | None, carrying: Carrying) -> Context | None:
    """The context for a new span: ``None`` for the current context, if the context has a span or nothing is known.

    Without a current span the trace is that of the given headers, of the request, or of the event of the running
    handler: the handler may have no span, because the trace is not sampled.
    """
    if has_span():
        return None
    for known in _known_headers(headers):
        if PARENT in known and has_span(context := carrying.read(known)):
            return context
    return None


def _known_headers(headers: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    given: Any = headers  # callers may not be typed
    known: list[Mapping[str, Any]] = [given] if isinstance(given, Mapping) else []
    envelope = current_envelope.get()
    if envelope is not None:
        known.append(envelope.trace_headers)
    elif (origin := current_origin.get()) is not None:
        known.append(origin.headers)
    return known


class Writing:
    """Makes the spans of written events."""

    def __init__(self, tracer: trace.Tracer, carrying: Carrying) -> None:
        self._tracer = tracer
        self._carrying = carrying

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        """The writing of an action's events. If the trace is not sampled, only the headers are written."""
        types = [event.event_type for event in events if event.event_type is not None]
        if not types:
            return SENDING
        parent = parent_around(
            None if action.headers is None else decode_object(action.headers.encode()), self._carrying
        )
        around = span_context_in(parent)
        if not around.is_valid and current_envelope.get() is not None:
            return SENDING  # the event of the handler has no trace
        if around.is_valid and not around.trace_flags.sampled:
            return _Carried(self._carrying, parent)
        destination = names.destination_of(types, action.namespace)
        attributes: Attributes = {
            names.MESSAGING_SYSTEM: names.SYSTEM,
            names.OPERATION_NAME: "send",
            names.OPERATION_TYPE: "send",
            names.DESTINATION: destination,
            names.NAMESPACE: action.namespace,
            names.SHARD: shard,
            names.ACTION: action.action_name,
        }
        if len(events) > 1:
            attributes[names.BATCH_COUNT] = len(events)
        else:
            attributes[names.MESSAGE_ID] = str(events[0].id)
        if action.correlation_id is not None:
            attributes[names.CONVERSATION_ID] = action.correlation_id
        span = self._tracer.start_span(
            names.send(destination), context=parent, kind=SpanKind.PRODUCER, attributes=attributes
        )
        return _SpannedSending(span, parent, self._carrying)


class _Carried(Sending):
    """Events of a trace that is not sampled: handlers learn that from the headers."""

    def __init__(self, carrying: Carrying, context: Context | None) -> None:
        self._carrying = carrying
        self._headers_of: Context | None = context

    def marked(self, action: ActionRecord) -> ActionRecord:
        return _with(action, self._carrying, self._headers_of)


class _SpannedSending(Spanned, Sending):
    """``send``: the events of an action are written."""

    def __init__(self, span: trace.Span, parent: Context | None, carrying: Carrying) -> None:
        super().__init__(span, parent)
        self._carrying = carrying

    def marked(self, action: ActionRecord) -> ActionRecord:
        return _with(action, self._carrying, self.context)


def _with(action: ActionRecord, carrying: Carrying, context: Context | None) -> ActionRecord:
    trace_headers = carrying.write(context)
    if not trace_headers:
        return action  # without an SDK there is no trace
    return replace(action, headers=with_trace(action.headers, trace_headers, carrying.headers))
