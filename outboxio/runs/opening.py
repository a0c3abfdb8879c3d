"""Decode the payload of a row into the envelope for the handler, and claim the row in a transaction.

A claim ensures that no second run handles the same event, at the same time or later.

Dispatch locks the notification in the handler's transaction (``RowClaimer``). ``inbox.consume`` has no notification,
and writes a row of ``consumed_events`` instead (``inbox/inline.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, cast

import msgspec
from msgspec import Struct

from outboxio.errors import InvalidEvent, MalformedRow, RetryAfter, Unavailable, Unprocessable
from outboxio.handlers.handler import HandlerRegistry
from outboxio.model.envelope import EventEnvelope, HandlerContext, as_bytes
from outboxio.model.event import upcasters_of, version_of
from outboxio.model.notification import DYING, Notification, State
from outboxio.model.outcome import Outcome, final_outcome_of
from outboxio.model.payloads.classes import Decoder, NewerVersion, decoder_of, upcasting
from outboxio.runs.deferral import is_newer
from outboxio.runs.failure_classifier import FailureClassifier
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import Run
from outboxio.statistics.figures import Counters
from outboxio.storage.protocols import Session
from outboxio.support.clock import ShardClock

Envelope = EventEnvelope[Any]

_NOT_OF_THE_PAYLOAD = (Unprocessable, RetryAfter, Unavailable, MemoryError)
"""Errors during decoding that decide the outcome themselves, or that another attempt may not meet."""
_NULL = (None, msgspec.Raw(b"null"))
_decode_mapping: Callable[[str], Any] = msgspec.json.Decoder(dict[str, Any]).decode
"""For an event on a topic whose name belongs to no registered class."""


class EnvelopeOpener:
    """Create the envelopes of a shard."""

    def __init__(self, handlers: HandlerRegistry, context: HandlerContext) -> None:
        self._handlers = handlers
        self._context = context
        self._of_class: dict[type, Decoder] = {}

    def open(self, run: Run) -> Envelope:
        """Decode the event. If that fails, only this row fails."""
        row, decoders = run.notification, run.queue.decoders
        try:
            decode = decoders.get(row.event_type) or self._decoder(run.queue, row)
            return EventEnvelope(decode(row.payload), row, self._context)
        except Exception as error:
            run.is_undecodable = not issubclass(type(error), _NOT_OF_THE_PAYLOAD)
            if row.payload in _NULL:
                raise InvalidEvent(f"event {row.event_type}", "its payload is NULL") from error
            raise

    def open_again(self, run: Run, decoded: DecodedEvents) -> Envelope:
        """Create a new envelope for a row of a split batch. An unchanged event is not decoded again."""
        event = decoded.take(run)
        if event is not None:
            return EventEnvelope(event, run.notification, self._context)
        envelope = self.open(run)
        if not run.queue.handler.options.raw:  # bytes cannot be changed, and cost nothing to make again
            decoded.keep(run, envelope.event)
        return envelope

    def open_dead(self, run: Run) -> Envelope:
        """For hooks: an event that cannot be decoded is ``None``.

        Raises for a row without a readable context, and for an event of a newer version: that hook is tried again.
        """
        if not run.notification.has_context:
            raise MalformedRow(run.notification.id, run.notification.flaw_of_context or "")
        self._refuse_newer(run)
        try:
            return self.open(run)
        except Exception:
            return EventEnvelope(cast(Any, None), run.notification, self._context)

    def _refuse_newer(self, run: Run) -> None:
        """Raise :class:`NewerVersion` for an event of a newer version than the class in this process."""
        row = run.notification
        headers = row.context.headers if row.may_have_version else None
        if is_newer(self._handlers, run.queue.handler, row.event_type, headers):
            raise NewerVersion(f"event {row.event_type} of version {row.version}", "the class in this process is older")

    def _decoder(self, queue: HandlerQueue, notification: Notification) -> Decoder:
        """The decoder of a row. The queue keeps the decoders of classes that have had a single version.

        Names on a topic are unlimited, so decoders of names are not kept.
        """
        handler, event_type = queue.handler, notification.event_type
        if handler.options.raw:
            return _as_bytes
        cls = self._handlers.event_class(handler, event_type)
        if cls is None:
            if handler.topic is not None:
                return _decode_mapping
            raise InvalidEvent(
                f"event type {event_type!r}", f"no event class of handler {handler.name!r} has this name"
            )
        version = version_of(cls)
        decode = self._of_class.get(cls)
        if decode is None:
            decode = self._of_class[cls] = decoder_of(cls)
        if version == 1:
            queue.decoders[event_type] = decode
            return decode  # dispatch defers rows of newer versions
        return upcasting(event_type, decode, notification.version, version, upcasters_of(cls))


def _as_bytes(payload: Any) -> bytes:
    if payload in _NULL:
        raise ValueError("NULL")
    return as_bytes(payload)


STARTABLE = (State.PENDING, State.FAILED)
"""The states in which a notification can be claimed for the handler."""


class TakenByAnother(Exception):
    """Another process is working on the event or has settled it, so this run has no outcome."""


class WorkResult(Struct, frozen=True):
    """The result of the work in a transaction: the new state of all rows except the failed ones."""

    state: State
    attempts_more: int
    failed: Mapping[Run, BaseException] = {}


class Claimer(Protocol):
    """Claim the events of a run in a transaction, and provide the outcome of a failed run."""

    async def take(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        """Claim in an open transaction; the envelopes that are claimed. :class:`TakenByAnother` if there are none."""
        ...

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        """Write the outcome of the claimed rows in the same transaction."""
        ...

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        """Return the outcome of a run that raised ``error`` because of ``cause``; ``None`` if it has no outcome."""
        ...


class RowClaimer:
    """Lock the notifications of a run. Rows that another process has locked or settled are skipped and counted."""

    def __init__(self, classifier: FailureClassifier, counters: Counters, clock: ShardClock) -> None:
        self._classifier = classifier
        self._counters = counters
        self._clock = clock

    async def take(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        errors = await session.claim(sorted(row.notification.id for row in envelopes), states)
        claimed = {row: envelope for row, envelope in envelopes.items() if row.notification.id in errors}
        if not claimed:
            raise TakenByAnother
        self._counters.refused += len(envelopes) - len(claimed)
        if states == (DYING,):
            run.final_outcome = final_outcome_of(errors[run.notification.id])
        return claimed

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        def attempts(row: Run) -> int:
            return row.notification.attempts + ended.attempts_more

        rows = sorted((row for row in claimed if row not in ended.failed), key=attempts)
        for number, some in groupby(rows, key=attempts):
            await session.finish(sorted(row.notification.id for row in some), ended.state, number, self._clock())

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        return None if cause is None else self._classifier(run, cause)


_encode = msgspec.json.Encoder().encode


class DecodedEvents:
    """Decoded events that can be reused, because the handler has not modified them.

    Decoding ten thousand events again for each of fourteen halvings takes longer than everything else, and collecting
    the garbage blocks the event loop. But a failed call may have modified lists and mappings of an event, and the next
    call must not see that. Encoding an event reveals a modification, and leaves no garbage.
    """

    def __init__(self) -> None:
        self._events: dict[Run, tuple[Any, int]] = {}

    def keep(self, run: Run, event: Any) -> None:
        """Keep the event of a row in its current state."""
        self._events[run] = event, hash(_encode(event))

    def take(self, run: Run) -> Any:
        """Return the event of a row if it is known and unchanged, else ``None``."""
        event, before = self._events.get(run, (None, 0))
        if event is None:
            return None
        try:
            is_unchanged = hash(_encode(event)) == before
        except Exception:  # the handler has put a value into the event that cannot be encoded
            is_unchanged = False
        return event if is_unchanged else None
