"""Resting rows: rows of a version of an event that is newer than the code of this process.

After a deployment was rolled back there may be rows that only the newer code can read. Such a row waits, like a row
without a handler, and uses no attempt: its ``next_retry_at`` becomes a moment in the year 9999, which no row has
otherwise, so no read of due rows meets the row again. The last digits of the moment are the version. A process that
takes the lock of a slot makes due the resting rows of the slot that its code can read, and rows that are past the
retention, which then expire.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from outboxio.errors import InvalidEvent
from outboxio.handlers.handler import Handler, HandlerRegistry
from outboxio.model.event import version_of
from outboxio.model.notification import DYING, FIRST_DEFERRED, State
from outboxio.model.outcome import Outcome, describe
from outboxio.model.payloads.classes import LARGEST_VERSION, NewerVersion, version_in
from outboxio.runs.run import Run
from outboxio.support.clock import ShardClock, as_micros
from outboxio.support.log import log_of

logger = log_of(__name__)


def rest_of(version: int) -> datetime:
    """The ``next_retry_at`` of a resting row of this version."""
    return FIRST_DEFERRED + timedelta(microseconds=version)


def readable_version(handlers: HandlerRegistry, handler: Handler) -> int:
    """The newest version that the classes of a handler have. A raw handler, or one of a topic, may read any version."""
    if handler.topic is not None or handler.options.raw:
        return LARGEST_VERSION
    return max(map(version_of, handler.accepts()), default=1)


def is_newer(handlers: HandlerRegistry, handler: Handler, event_type: str, headers: msgspec.Raw | None) -> bool:
    """True if the class here has an older version than an event with these headers."""
    if headers is None or handler.options.raw:
        return False
    cls = handlers.event_class(handler, event_type)
    return cls is not None and version_in(headers) > version_of(cls)


class NewerRows:
    """Finds rows of newer versions among the due rows, and puts them to rest."""

    def __init__(self, handlers: HandlerRegistry, clock: ShardClock) -> None:
        self._handlers = handlers
        self._clock = clock
        self._told: set[tuple[str, str, int]] = set()

    def rest(self, run: Run) -> Outcome | None:
        """The outcome that puts a row to rest; ``None`` for a row that may run.

        A row that is past the retention may run: it expires then. So may a verdict, whose hook is tried again.
        """
        row, handler = run.notification, run.queue.handler
        if row.state == DYING or handler.options.raw or not row.has_context:
            return None
        try:
            cls = self._handlers.event_class(handler, row.event_type)
            stored, known = row.version, LARGEST_VERSION if cls is None else version_of(cls)
        except InvalidEvent:  # the row fails with this error when it is decoded
            return None
        now = self._clock()
        if stored <= known or run.queue.spec.is_too_old(row, as_micros(now)):
            return None
        self._tell((handler.name, row.event_type, stored), known)
        error = NewerVersion(f"event {row.event_type} of version {stored}", f"the class here has version {known}")
        entry = describe(error, now, row.attempts)
        return Outcome(row.id, run.lease, State(row.state), row.attempts, rest_of(stored), entry)

    def _tell(self, kind: tuple[str, str, int], known: int) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(
                "handler %r has events %s of version %d, and the class here has version %d: the events wait for a "
                "process with the newer class, and expire by retention", *kind, known,
                handler=kind[0], event_type=kind[1], version=kind[2],
            )  # fmt: skip
