"""Envelopes: from the payload of a row to the event that the handler gets.

Claims: how a run in a transaction makes sure that no second run handles the event, at once or later.

Dispatch locks the notification in the handler's transaction (``RowClaim``). ``inbox.consume`` has no notification, and
writes a row of ``consumed_events`` instead (``inbox/inline.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, cast

import msgspec
from msgspec import Struct

from outboxio.errors import InvalidEvent, RetryAfter, Unavailable, Unprocessable, UnreadableRow
from outboxio.handlers.handler import HandlerRegistry
from outboxio.model.envelope import EventEnvelope, HandlerContext, as_bytes
from outboxio.model.event import upcasters_of, version_of
from outboxio.model.notification import DYING, Notification, State
from outboxio.model.outcome import Outcome, verdict_of
from outboxio.model.payloads.classes import Decoder, NewerVersion, decoder_of, upcasting
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.judge import Judge
from outboxio.runs.resting import is_newer
from outboxio.runs.run import Run
from outboxio.statistics.figures import Counters
from outboxio.storage.protocols import Session
from outboxio.support.clock import ShardClock

Envelope = EventEnvelope[Any]

_NOT_OF_THE_PAYLOAD = (Unprocessable, RetryAfter, Unavailable, MemoryError)
"""Errors while an event is decoded that say themselves what follows, or that another attempt need not meet."""
_NULL = (None, msgspec.Raw(b"null"))
_decode_mapping: Callable[[str], Any] = msgspec.json.Decoder(dict).decode
"""For an event on a topic, if no registered class has the event's name."""


class EnvelopeOpener:
    """Makes the envelopes of a shard."""

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
        """A new envelope for a row of a call that is split; an event that no call has changed is not decoded again."""
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
            raise UnreadableRow(run.notification.id, run.notification.flaw_of_context or "")
        self._refuse_newer(run)
        try:
            return self.open(run)
        except Exception:
            return EventEnvelope(cast(Any, None), run.notification, self._context)

    def _refuse_newer(self, run: Run) -> None:
        """Raise :class:`NewerVersion` for an event of a newer version than the class here."""
        row = run.notification
        headers = row.context.headers if row.may_have_version else None
        if is_newer(self._handlers, run.queue.handler, row.event_type, headers):
            raise NewerVersion(f"event {row.event_type} of version {row.version}", "the class here is older")

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
            return decode  # dispatch puts rows of newer versions to rest
        return upcasting(event_type, decode, notification.version, version, upcasters_of(cls))


def _as_bytes(payload: Any) -> bytes:
    if payload in _NULL:
        raise ValueError("NULL")
    return as_bytes(payload)


STARTABLE = (State.PENDING, State.FAILED)
"""The states in which a notification can be claimed for the handler."""


class TakenByAnother(Exception):
    """A second process works on the event, or has settled the event: this run has no outcome."""


class WorkResult(Struct, frozen=True):
    """The end of the work in a transaction: the new state of all rows but the failed rows."""

    state: State
    attempts_more: int
    failed: Mapping[Run, BaseException] = {}


class Claim(Protocol):
    """Claims the events of a run in a transaction, and answers for a run that fails."""

    async def take(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        """Claim in an open transaction; the envelopes that are claimed. :class:`TakenByAnother` if there are none."""
        ...

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        """Write in the same transaction that the claimed rows are done."""
        ...

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        """The outcome of a run that raised ``error``, judged by ``cause``; ``None`` if the run has no outcome."""
        ...


class RowClaim:
    """Locks the notifications of a run. A row that a second process has locked or settled is left out and counted."""

    def __init__(self, judge: Judge, counters: Counters, clock: ShardClock) -> None:
        self._judge = judge
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
            run.verdict = verdict_of(errors[run.notification.id])
        return claimed

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        def attempts(row: Run) -> int:
            return row.notification.attempts + ended.attempts_more

        rows = sorted((row for row in claimed if row not in ended.failed), key=attempts)
        for number, some in groupby(rows, key=attempts):
            await session.finish(sorted(row.notification.id for row in some), ended.state, number, self._clock())

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        return None if cause is None else self._judge(run, cause)


_encode = msgspec.json.Encoder().encode


class DecodedEvents:
    """Events that need not be decoded again, because the handler has not changed the events.

    To decode ten thousand events anew for each of fourteen halvings takes longer than all the rest, and the garbage
    keeps the event loop waiting. But a call that failed may have changed lists and mappings in an event, and the next
    call must not see the change. Encoding an event shows a change, and leaves no garbage.
    """

    def __init__(self) -> None:
        self._events: dict[Run, tuple[Any, int]] = {}

    def keep(self, run: Run, event: Any) -> None:
        """Keep a row's event in the present state."""
        self._events[run] = event, hash(_encode(event))

    def take(self, run: Run) -> Any:
        """A row's event if the event is known and unchanged, else ``None``."""
        event, before = self._events.get(run, (None, 0))
        if event is None:
            return None
        try:
            is_unchanged = hash(_encode(event)) == before
        except Exception:  # the handler has put a value into the event that cannot be encoded
            is_unchanged = False
        return event if is_unchanged else None
