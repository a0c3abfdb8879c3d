"""Sentry: an issue for each notification that fails permanently, and spans for written events and handler runs.

``sentry_sdk.init(integrations=[OutboxIntegration()])`` covers every outbox of the process, created before or after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from msgspec.structs import replace

from outboxio.errors import ConfigurationError
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.notification import DYING, Notification, State
from outboxio.model.outcome import Outcome
from outboxio.model.redaction import Redact
from outboxio.support.clock import Clock
from outboxio.support.codec import decode_object
from outboxio.support.log import type_name
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import (
    SENDING,
    Call,
    CalledHandler,
    HandlingTelemetry,
    Sending,
    Telemetry,
    headers_in,
    use_in_process,
    with_trace,
)

try:
    import sentry_sdk
    from sentry_sdk.integrations import Integration
    from sentry_sdk.integrations.logging import ignore_logger
    from sentry_sdk.utils import event_from_exception
except ImportError as error:  # pragma: no cover
    raise ConfigurationError("outboxio.integrations.sentry needs the SDK: pip install 'outboxio[sentry]'") from error

ORIGIN = "auto.queue.outboxio"
TRACE, BAGGAGE = "sentry-trace", "baggage"
_OWN_HEADERS = (TRACE, BAGGAGE)
_SENTRYS_BAGGAGE = "sentry-"
_LOGS_FAILURES = "outboxio.runs.failure_classifier"  # every failure logged here is an issue, or will be retried
_MOST_HOOKS = 1000  # notifications with a failed hook that a process remembers


class OutboxIntegration(Integration, Telemetry):
    """Issues and spans in Sentry, for ``sentry_sdk.init(integrations=[OutboxIntegration()])``.

    A notification that becomes DEAD, or EXPIRED after a failure, creates an issue, grouped by handler and error type.
    Retries create no issues; ``issue_at_attempt=3`` also creates one for the third failed attempt.

    ``spans``: create a transaction for each run (``queue.process``) and a span for written events (``queue.publish``),
    if tracing is enabled in Sentry. ``propagate_traces=True`` stores ``sentry-trace`` and ``baggage`` with each event,
    so that a run belongs to the trace of the request.

    Error texts are redacted as configured by ``Outbox(redact=...)``. Sentry's option ``include_local_variables``, on by
    default, shows the local variables of your handlers.

    Raises :class:`ConfigurationError` if ``issue_at_attempt`` is not a positive integer.

    Example::

        sentry_sdk.init(dsn, traces_sample_rate=0.01, integrations=[OutboxIntegration(propagate_traces=True)])
    """

    identifier = "outboxio"

    def __init__(
        self, *, issue_at_attempt: int | None = None, spans: bool = True, propagate_traces: bool = False
    ) -> None:
        attempt: Any = issue_at_attempt  # callers may not be typed
        if attempt is not None and (not isinstance(attempt, int) or isinstance(attempt, bool) or attempt < 1):
            raise ConfigurationError(f"issue_at_attempt is {briefly(attempt)}; expected a whole number from 1, or None")
        self.issue_at_attempt = issue_at_attempt
        self.spans = spans
        self.propagate_traces = propagate_traces
        self._with_failed_hooks: set[UUID] = set()

    @staticmethod
    def setup_once() -> None:
        """Called by the SDK. The client's options are read at every use."""
        use_in_process(_OfProcess())

    def is_first_failure_of_hook(self, notification_id: UUID) -> bool:
        """True if no earlier failure of the notification's hook is known to this process."""
        is_first = notification_id not in self._with_failed_hooks
        if len(self._with_failed_hooks) >= _MOST_HOOKS:
            self._with_failed_hooks.clear()
        self._with_failed_hooks.add(notification_id)
        return is_first

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        types = {event.event_type for event in events if event.event_type is not None}
        if not types or not (self.propagate_traces or self.spans):
            return SENDING
        has_span = self.spans and _makes_spans() and sentry_sdk.get_current_span() is not None
        if not (has_span or self.propagate_traces):
            return SENDING
        destination = types.pop() if len(types) == 1 else action.namespace
        data: dict[str, Any] = {"messaging.destination.name": destination, "messaging.system": "outboxio"}
        if len(events) == 1:
            data["messaging.message.id"] = str(events[0].id)
        else:
            data["messaging.batch.message_count"] = len(events)
        return _Publish(destination, data, has_span=has_span, propagates=self.propagate_traces)

    def handling(self, namespace: str, shard: str, clock: Clock, *, inline: bool) -> HandlingTelemetry | None:
        if not sentry_sdk.get_client().is_active():
            return None
        ignore_logger(_LOGS_FAILURES)
        return _Handling(self, {"outboxio.namespace": namespace, "outboxio.shard": shard}, clock)


class _OfProcess(Telemetry):
    """The integration of the current client, for outboxes without their own integration."""

    def yields_to(self, given: Telemetry) -> bool:
        return isinstance(given, OutboxIntegration)

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        integration = _current()
        return SENDING if integration is None else integration.sending(shard, action, events)

    def handling(self, namespace: str, shard: str, clock: Clock, *, inline: bool) -> HandlingTelemetry | None:
        integration = _current()
        return None if integration is None else integration.handling(namespace, shard, clock, inline=inline)


class _Publish(Sending):
    """``queue.publish``: events are written."""

    def __init__(self, destination: str, data: Mapping[str, Any], *, has_span: bool, propagates: bool) -> None:
        self._stack = ExitStack()
        self._span = sentry_sdk.start_span(op="queue.publish", name=destination, origin=ORIGIN) if has_span else None
        self._data = data
        self._propagates = propagates

    def __enter__(self) -> Self:
        if self._span is not None:
            span = self._stack.enter_context(self._span)
            for name, value in self._data.items():
                span.set_data(name, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def marked(self, action: ActionRecord) -> ActionRecord:
        if not self._propagates:
            return action
        headers = dict(sentry_sdk.get_current_scope().iter_trace_propagation_headers(span=self._span))
        if not headers:
            return action
        if BAGGAGE in headers and action.headers is not None:
            others = _other_items(decode_object(action.headers.encode()).get(BAGGAGE))
            headers[BAGGAGE] = ",".join([*others, headers[BAGGAGE]])
        return replace(action, headers=with_trace(action.headers, headers, _OWN_HEADERS))


class _Handling(HandlingTelemetry):
    """Issues and spans of a shard's handlers."""

    def __init__(self, options: OutboxIntegration, place: Mapping[str, str], clock: Clock) -> None:
        self._options = options
        self._place = place
        self._clock = clock
        self._has_spans = options.spans and _makes_spans()

    def call(self, handler: CalledHandler, row: Notification) -> Call | None:
        if not (self._has_spans and handler.options.trace and row.has_context):
            return None
        headers = {name: value for name, value in headers_in(row.context.headers).items() if name in _OWN_HEADERS}
        if str(headers.get(TRACE, "")).endswith("-0"):
            return None  # the trace is not sampled
        latency = (self._clock() - row.context.event_date).total_seconds() * 1000
        data = self._data(row.event_type) | {
            "messaging.message.id": str(row.event_id),
            "messaging.message.retry.count": row.attempts,
            "messaging.message.receive.latency": latency,
        }
        return _Process(_name_of(handler, row), headers, data)

    def batch_call(self, handler: CalledHandler, rows: Sequence[Notification]) -> Call | None:
        if not (self._has_spans and handler.options.trace):
            return None
        types = {row.event_type for row in rows}
        destination = types.pop() if len(types) == 1 else self._place["outboxio.namespace"]
        data = self._data(destination) | {"messaging.batch.message_count": len(rows)}
        return _Process(handler.name, {}, data)

    def failed(
        self, handler: CalledHandler, row: Notification, error: BaseException, outcome: Outcome, redact: Redact
    ) -> None:
        if not self._is_issue(row, outcome):
            return
        client = sentry_sdk.get_client()
        event, hint = event_from_exception(
            error, client_options=client.options, mechanism={"type": "outboxio", "handled": False}
        )
        for value in event.get("exception", {}).get("values", ()):
            if isinstance(value.get("value"), str):
                value["value"] = redact(value["value"])
        name = _name_of(handler, row)
        event["fingerprint"] = ["outboxio", name, type_name(error)]
        event["transaction"] = name
        event["tags"] = {
            **self._place, "outboxio.handler": handler.name, "outboxio.event_type": row.event_type,
            "outboxio.state": str(outcome.state),
        }  # fmt: skip
        event["contexts"] = {"outboxio": _facts_of(row)}
        sentry_sdk.capture_event(event, hint=hint)

    def _is_issue(self, row: Notification, outcome: Outcome) -> bool:
        """True for a permanent failure, for the configured attempt, and for the first failure of a hook."""
        if row.state == DYING:
            return self._options.is_first_failure_of_hook(row.id) or outcome.state is State.DEAD
        if outcome.state is not State.FAILED:
            return True
        return outcome.attempts == self._options.issue_at_attempt != row.attempts

    def _data(self, destination: str) -> dict[str, Any]:
        return {"messaging.system": "outboxio", "messaging.destination.name": destination}


class _Process(Call):
    """``queue.process``: a run, as a transaction with a span of the queue."""

    def __init__(self, name: str, headers: dict[str, Any], data: Mapping[str, Any]) -> None:
        self._stack = ExitStack()
        self._name = name
        self._headers = headers
        self._data = data
        self._status = "ok"
        self._has_ended = False

    def __enter__(self) -> Self:
        scope = self._stack.enter_context(sentry_sdk.isolation_scope())
        scope.clear_breadcrumbs()
        transaction = sentry_sdk.continue_trace(
            self._headers, op="queue.task.outboxio", name=self._name, source="task", origin=ORIGIN
        )
        self._transaction = self._stack.enter_context(sentry_sdk.start_transaction(transaction))
        self._span = self._stack.enter_context(
            sentry_sdk.start_span(op="queue.process", name=self._name, origin=ORIGIN)
        )
        for name, value in self._data.items():
            self._span.set_data(name, value)
        return self

    def ended(self, outcome: Outcome | None) -> None:
        self._has_ended = True
        if outcome is None:
            self._status = "aborted" if self._status == "ok" else self._status
        elif outcome.state is not State.SUCCEEDED:
            self._status = "internal_error"

    def raised(self, error: BaseException) -> None:
        self._has_ended, self._status = True, "internal_error"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = self._status if self._has_ended else "aborted"
        self._span.set_status(status)
        self._transaction.set_status(status)
        self._stack.__exit__(kind, error, trace)


def _current() -> OutboxIntegration | None:
    return sentry_sdk.get_client().get_integration(OutboxIntegration)


def _makes_spans() -> bool:
    """True if tracing with transactions is enabled; streamed spans have a different interface."""
    options: Mapping[str, Any] = sentry_sdk.get_client().options
    if options.get("traces_sample_rate") is None and options.get("traces_sampler") is None:
        return False
    experiments: Mapping[str, Any] = options.get("_experiments") or {}
    return "stream" not in (options.get("trace_lifecycle"), experiments.get("trace_lifecycle"))


def _name_of(handler: CalledHandler, row: Notification) -> str:
    return f"on_dead {handler.name}" if row.state == DYING else handler.name


def _facts_of(row: Notification) -> dict[str, Any]:
    """Return the context of an issue, without the payload."""
    facts: dict[str, Any] = {"notification_id": str(row.id), "attempt": row.attempts + 1}
    if row.has_context:
        context = row.context
        facts |= {
            "event_id": str(context.event_id),
            "action": context.action_name,
            "correlation_id": context.correlation_id,
        }
    return facts


def _other_items(baggage: object) -> list[str]:
    """Return the baggage items that are not Sentry's."""
    if not isinstance(baggage, str):
        return []
    items = [item.strip() for item in baggage.split(",")]
    return [item for item in items if item and not item.startswith(_SENTRYS_BAGGAGE)]
