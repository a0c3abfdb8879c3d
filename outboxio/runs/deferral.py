"""Deferral of rows whose event version is newer than the code of this process.

After a deployment was rolled back there may be rows that only the newer code can read. Such a row is deferred without
using an attempt: its ``next_retry_at`` is set to a time in the year 9999, which is used for nothing else, so reads of
due rows do not return it. The last digits of that time are the version. A process that acquires the lock of a slot
makes those deferred rows due that its code can read, and those past their retention, which then expire.
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


def deferred_until(version: int) -> datetime:
    """Return the ``next_retry_at`` of a deferred row of this version."""
    return FIRST_DEFERRED + timedelta(microseconds=version)


def readable_version(handlers: HandlerRegistry, handler: Handler) -> int:
    """Return the newest version of the classes of a handler. Raw and topic handlers can read any version."""
    if handler.topic is not None or handler.options.raw:
        return LARGEST_VERSION
    return max(map(version_of, handler.accepts()), default=1)


def is_newer(handlers: HandlerRegistry, handler: Handler, event_type: str, headers: msgspec.Raw | None) -> bool:
    """Return True if an event with these headers is newer than the class in this process."""
    if headers is None or handler.options.raw:
        return False
    cls = handlers.event_class(handler, event_type)
    return cls is not None and version_in(headers) > version_of(cls)


class VersionDeferral:
    """Find due rows of newer event versions, and defer them."""

    def __init__(self, handlers: HandlerRegistry, clock: ShardClock) -> None:
        self._handlers = handlers
        self._clock = clock
        self._logged: set[tuple[str, str, int]] = set()

    def defer(self, run: Run) -> Outcome | None:
        """Return the outcome that defers a row, or ``None`` if the row may run.

        A row past its retention may run, because it then expires, and so may a DYING row, whose hook is retried.
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
        self._log_once((handler.name, row.event_type, stored), known)
        error = NewerVersion(
            f"event {row.event_type} of version {stored}", f"the class in this process has version {known}"
        )
        entry = describe(error, now, row.attempts)
        return Outcome(row.id, run.lease, State(row.state), row.attempts, deferred_until(stored), entry)

    def _log_once(self, kind: tuple[str, str, int], known: int) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "handler %r: deferring %s events of version %d, because the class in this process has version "
                "%d; they wait for a process with the newer class, or expire by retention", *kind, known,
                handler=kind[0], event_type=kind[1], version=kind[2],
            )  # fmt: skip
