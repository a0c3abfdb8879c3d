"""Spans around handlers: ``process`` and ``on_dead``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal

from msgspec import Struct
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind

from outboxio.integrations.opentelemetry import names
from outboxio.integrations.opentelemetry.names import PARENT, Carrying, has_span, span_context_in
from outboxio.integrations.opentelemetry.work import Attributes, SpannedCall
from outboxio.model.notification import DYING, PENDING, Notification
from outboxio.support.clock import Clock
from outboxio.telemetry.protocol import Call, CalledHandler, HandlingTelemetry, headers_in

Propagation = Literal["auto", "link", "parent", "none"]

MOST_LINKS = 128  # of a batch; SDKs drop more than that


class Choices(Struct, frozen=True):
    """Your application's options for the spans of handlers."""

    propagation: Propagation
    child_within: timedelta
    trace_unsampled: bool


class SpannedHandling(HandlingTelemetry):
    """Creates the spans of a shard's handlers."""

    def __init__(
        self,
        tracer: trace.Tracer,
        carrying: Carrying,
        choices: Choices,
        place: Attributes,
        clock: Clock,
        *,
        inline: bool,
    ) -> None:
        """``place``: the attributes that all spans of the shard have. ``inline``: calls run inside a current span."""
        self._tracer = tracer
        self._carrying = carrying
        self._choices = choices
        self._place = place
        self._clock = clock
        self._is_inline = inline
        self._takes_all = choices.trace_unsampled
        self.only_sampled = not (choices.trace_unsampled or inline)

    def begin(self) -> None:
        """Leave the span around ``running()``; otherwise it would become the parent of all actions of handlers."""
        contexts.attach(Context())

    def call(self, handler: CalledHandler, row: Notification) -> Call | None:
        if not handler.options.trace or (self.only_sampled and not row.may_be_sampled) or not row.has_context:
            return None
        remote = self._remote_of(row)
        around = span_context_in(None) if self._is_inline else trace.INVALID_SPAN_CONTEXT
        if not (self._takes_all or around.trace_flags.sampled or span_context_in(remote).trace_flags.sampled):
            return None
        if row.state == DYING:
            return self._hook_call(handler, row, remote)
        parent, links = self._relation(row, remote, contexts.get_current() if around.is_valid else None)
        span = self._tracer.start_span(
            names.process(row.event_type), context=parent, kind=SpanKind.CONSUMER, links=links,
            attributes=self._attributes_of(handler, row),
        )  # fmt: skip
        return SpannedCall(span, parent)

    def batch_call(self, handler: CalledHandler, rows: Sequence[Notification]) -> Call | None:
        if not handler.options.trace:
            return None
        links = list(self._links(rows))
        if not links and not self._takes_all:
            return None
        destination = names.destination_of((row.event_type for row in rows), self._namespace)
        attributes = self._attributes(handler, destination) | {names.BATCH_COUNT: len(rows)}
        span = self._tracer.start_span(
            names.process(destination), context=Context(), kind=SpanKind.CONSUMER, links=links, attributes=attributes
        )
        return SpannedCall(span, Context())

    def _hook_call(self, handler: CalledHandler, row: Notification, remote: Context) -> Call:
        attributes = self._place | {names.HANDLER: handler.name, names.MESSAGE_ID: str(row.event_id)}
        span = self._tracer.start_span(
            names.on_dead(handler.name), context=Context(), links=_link_to(remote), attributes=attributes
        )
        return SpannedCall(span, Context(), is_hook=True)

    def _relation(self, row: Notification, remote: Context, around: Context | None) -> tuple[Context, Sequence[Link]]:
        """Return the parent of a ``process`` span, and its links."""
        if around is not None:
            return around, _link_to(remote) if self._choices.propagation != "none" else ()
        match self._choices.propagation:
            case "none":
                return Context(), ()
            case "link":
                return Context(), _link_to(remote)
            case "parent":
                return remote, ()
            case "auto":
                is_child = row.state == PENDING and not row.attempts and self._is_recent(row)
                return (remote, ()) if is_child else (Context(), _link_to(remote))

    def _is_recent(self, row: Notification) -> bool:
        return self._clock() - row.context.event_date <= self._choices.child_within

    def _links(self, rows: Sequence[Notification]) -> Iterator[Link]:
        """Yield a link to each distinct sampled trace of a batch."""
        if self._choices.propagation == "none":
            return
        seen: set[tuple[int, int]] = set()
        for row in rows:
            if not (row.may_be_sampled and row.has_context):
                continue
            context = span_context_in(self._remote_of(row))
            if context.trace_flags.sampled and (key := (context.trace_id, context.span_id)) not in seen:
                seen.add(key)
                yield Link(context)
                if len(seen) == MOST_LINKS:
                    return

    def _remote_of(self, row: Notification) -> Context:
        headers = headers_in(row.context.headers)
        return self._carrying.read(headers) if PARENT in headers else Context()

    def _attributes_of(self, handler: CalledHandler, row: Notification) -> Attributes:
        attributes = self._attributes(handler, row.event_type)
        attributes[names.MESSAGE_ID] = str(row.event_id)
        attributes[names.ATTEMPT] = row.attempts + 1
        if (correlation := row.context.correlation_id) is not None:
            attributes[names.CONVERSATION_ID] = correlation
        return attributes

    def _attributes(self, handler: CalledHandler, destination: str) -> Attributes:
        return self._place | {
            names.MESSAGING_SYSTEM: names.SYSTEM,
            names.OPERATION_NAME: "process",
            names.OPERATION_TYPE: "process",
            names.DESTINATION: destination,
            names.SUBSCRIPTION: handler.name,
            names.DELIVERY: str(handler.options.delivery),
        }

    @property
    def _namespace(self) -> str:
        return str(self._place[names.NAMESPACE])


def _link_to(remote: Context) -> Sequence[Link]:
    return [Link(span_context_in(remote))] if has_span(remote) else ()
