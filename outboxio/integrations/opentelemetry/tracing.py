"""The OpenTelemetry integration that your application passes to an outbox.

The span ``send`` covers writing events; the headers of the events hold its context.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import SpanKind, Status, StatusCode

from outboxio.errors import ConfigurationError
from outboxio.integrations.opentelemetry import names
from outboxio.integrations.opentelemetry.handling import Choices, Propagation, SpannedHandling
from outboxio.integrations.opentelemetry.metrics import OutboxMetrics
from outboxio.integrations.opentelemetry.names import PARENT, Carrying, has_span, span_context_in
from outboxio.integrations.opentelemetry.work import Attributes, Spanned, SpannedExecution, SpannedJob
from outboxio.loops.loop import RoundResult
from outboxio.model.emitter import current_origin
from outboxio.model.envelope import current_envelope
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.support.clock import Clock
from outboxio.support.codec import decode_object
from outboxio.support.duration import parse_duration
from outboxio.support.log import type_name
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import (
    SENDING,
    Execution,
    HandlingTelemetry,
    JobCall,
    Round,
    RoundKind,
    Sending,
    Telemetry,
    with_trace,
)

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

_PROPAGATIONS = ("auto", "link", "parent", "none")


class OpenTelemetry(Telemetry):
    """OpenTelemetry spans and metrics, for ``Outbox(telemetry=OpenTelemetry())``.

    ``tracer_provider``: by default the global provider of the process. ``propagation`` determines how the span of a run
    relates to the trace of the event:

    * ``"auto"``: the first attempt is a child if it starts within ``child_within`` (5 minutes) of the event. Any other
      attempt starts a new trace with a link, so a retry neither extends the old trace nor inherits its sampling
      decision.
    * ``"parent"``: every attempt is a child. ``"link"``: every attempt starts a new trace with a link.
    * ``"none"``: every attempt starts a new trace.

    ``baggage=True`` stores the baggage of the trace with each event, for handlers in any process; baggage may contain
    secrets. ``trace_unsampled=True`` also creates spans for events whose trace is missing or not sampled, and leaves
    the decision to the sampler. ``internals=True`` adds spans for rounds of fan-out, settling and retention that did
    something.

    ``metrics=True`` also exports the metrics of docs/reference/metrics.md, to ``meter_provider`` or the global provider
    of the process. Counters and gauges are read at collection. Durations and lags are recorded in histograms, which
    takes 16 us per run; ``histograms=False`` leaves the histograms out.

    Raises :class:`ConfigurationError` for an unknown ``propagation``, and :class:`SettingsError` for an invalid
    ``child_within``.

    Example::

        outbox = Outbox(url, namespace="wallets", telemetry=OpenTelemetry())
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        *,
        propagation: Propagation = "auto",
        baggage: bool = False,
        trace_unsampled: bool = False,
        internals: bool = False,
        child_within: timedelta | float | str = timedelta(minutes=5),
        metrics: bool = False,
        meter_provider: MeterProvider | None = None,
        histograms: bool = True,
    ) -> None:
        if propagation not in _PROPAGATIONS:
            expected = ", ".join(map(repr, _PROPAGATIONS))
            raise ConfigurationError(f"propagation is {briefly(propagation)}; expected one of {expected}")
        within = parse_duration(child_within, key="child_within")
        self._tracer = trace.get_tracer(
            names.INSTRUMENTATION, _version(), tracer_provider=tracer_provider, schema_url=names.SCHEMA_URL
        )
        self._carrying = Carrying(baggage=baggage)
        self._choices = Choices(propagation, within, trace_unsampled)
        self._has_internals = internals
        self._writing = Writing(self._tracer, self._carrying)
        has_metrics = metrics or meter_provider is not None
        self._metrics = OutboxMetrics(meter_provider, histograms=histograms) if has_metrics else None

    def attached(self, outbox: Outbox) -> None:
        if self._metrics is not None:
            self._metrics.add(outbox)

    def executing(
        self, namespace: str, shard: str, action_name: str, headers: Mapping[str, Any] | None, *, joins: bool = False
    ) -> Execution:
        parent = parent_around(headers, self._carrying)
        attributes = _place(namespace, shard) | {names.ACTION: action_name}
        span = self._tracer.start_span(names.execute(action_name), context=parent, attributes=attributes)
        return SpannedExecution(span, parent, joins=joins)

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        return self._writing.sending(shard, action, events)

    def handling(self, namespace: str, shard: str, clock: Clock, *, inline: bool) -> HandlingTelemetry:
        return SpannedHandling(
            self._tracer, self._carrying, self._choices, _place(namespace, shard), clock, inline=inline
        )

    def job(self, namespace: str, shard: str, name: str, scheduled_at: datetime, attempt: int) -> JobCall:
        attributes = _place(namespace, shard) | {
            names.JOB: name,
            names.SCHEDULED_AT: f"{scheduled_at.isoformat(timespec='milliseconds')}Z",
            names.ATTEMPT: attempt,
        }  # fmt: skip
        return SpannedJob(self._tracer.start_span(names.job(name), Context(), SpanKind.INTERNAL, attributes))

    def round(self, kind: RoundKind, run_once: Round, *, namespace: str, shard: str) -> Round:
        if not self._has_internals:
            return run_once
        attributes, start_span = _place(namespace, shard), self._tracer.start_span

        async def spanned() -> RoundResult:
            began = time.time_ns()
            try:
                result = await run_once()
            except Exception as error:
                span = start_span(kind, Context(), SpanKind.INTERNAL, attributes, start_time=began)
                span.set_attribute(names.ERROR_TYPE, type_name(error))
                span.set_status(Status(StatusCode.ERROR))
                span.end()
                raise
            if result.found:
                span = start_span(kind, Context(), SpanKind.INTERNAL, attributes, start_time=began)
                span.set_attribute(names.ROWS, result.found)
                span.end()
            return result

        return spanned


def _place(namespace: str, shard: str) -> Attributes:
    return {names.NAMESPACE: namespace, names.SHARD: shard}


def _version() -> str | None:
    try:
        return version("outboxio")
    except PackageNotFoundError:  # run from a folder, without an installation
        return None


def trace_headers(*, baggage: bool = False) -> dict[str, str]:
    """Return the headers of the current trace, for events that are written by plain SQL or a ``Producer``.

    ``traceparent`` and ``tracestate`` (W3C Trace Context), and ``baggage`` if requested. The result is empty without a
    current span.

    Example::

        producer.record(connection, OrderPaid(order_id), action="PayOrder", headers=trace_headers())
    """
    return Carrying(baggage=baggage).write()


def parent_around(headers: Mapping[str, Any] | None, carrying: Carrying) -> Context | None:
    """Return the parent context of a new span; ``None`` for the current context, if it has a span or no trace is known.

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
    """Creates the spans of written events."""

    def __init__(self, tracer: trace.Tracer, carrying: Carrying) -> None:
        self._tracer = tracer
        self._carrying = carrying

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        """Cover the writing of an action's events. If the trace is not sampled, only the headers are written."""
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
    """Events of a trace that is not sampled: the headers pass this on to handlers."""

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
