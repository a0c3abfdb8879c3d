"""Filters, which select the notifications of queries and operations, and groups of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from msgspec import Struct

from outboxio.model.notification import State


class Filter(Struct, frozen=True, kw_only=True):
    """Selects the notifications of a list, count, group or operation. All specified fields must match.

    - ``states``: any of these states; empty for all states.
    - ``handler``: the name of a handler, including its aliases.
    - ``event_type``: the name of an event type.
    - ``ordering_key``, ``model_id``, ``correlation_id``: the exact text.
    - ``action``: the name of an action, or the id of a single execution.
    - ``error``: a part of the last error, in the form ``TypeName: message``. ``*`` matches any text.
    - ``since``, ``until``: the time of the last change, from ``since`` (inclusive) to ``until`` (exclusive). For a DEAD
      notification that is when it became DEAD.

    Example::

        from outboxio import Filter

        await outbox.admin.retry(Filter(states=("DEAD",), handler="invoice-pdf", error="ConnectionError: *pdf:8080"))
    """

    states: Sequence[State | str] = ()
    handler: str | None = None
    event_type: str | None = None
    ordering_key: str | None = None
    model_id: str | None = None
    action: str | UUID | None = None
    correlation_id: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class Search(Struct, frozen=True, kw_only=True):
    """A validated filter, as used by database queries. ``None`` and empty sequences match everything."""

    states: tuple[State, ...] = ()
    names: tuple[str, ...] | None = None
    """The stored handler names: the name of a handler, and its aliases."""
    event_types: tuple[str, ...] = ()
    """The stored names of an event type."""
    ordering_key: str | None = None
    model_id: str | None = None
    action_name: str | None = None
    action_id: UUID | None = None
    correlation_id: str | None = None
    error: tuple[str, ...] = ()
    """Texts that appear in the last error, ``TypeName: message``, in this order. The texts do not overlap."""
    since: datetime | None = None
    until: datetime | None = None


class PageCursor(Struct, frozen=True, array_like=True):
    """A position in a list of matching notifications: after the row with these values. Stored as JSON.

    ``scan``: the index scan. ``name``: the handler name within the scan, or the empty string. ``key``: the values of
    the index columns of the row, as text.
    """

    scan: str
    name: str
    key: tuple[str, ...]


# --- groups of failures: the notifications of a handler whose last errors are alike ---------------


_LONGEST = 200  # characters of a message by which errors are compared

#: The parts of a message that differ between errors of the same cause.
_VARYING = re.compile(
    r"""
      [0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}   # a UUID
    | \b0[xX][0-9a-fA-F]+                                     # an address
    | (?<![A-Za-z0-9_])(?:'[^'\n]*'|"[^"\n]*"|`[^`\n]*`)       # a quoted value, not an apostrophe
    | \b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b                # a hash or an id
    | \d+
    """,
    re.VERBOSE,
)
#: The same for a message without a UUID, a hash or an id. A pattern that begins with a set of characters is fast.
_VARYING_SHORT = re.compile(
    r"""
    [\d'"`](?:
      (?<=\b0)[xX][0-9a-fA-F]+
    | (?<=\d)\d*
    | (?<=')(?<![A-Za-z0-9_]')[^'\n]*'
    | (?<=")(?<![A-Za-z0-9_]")[^"\n]*"
    | (?<=`)(?<![A-Za-z0-9_]`)[^`\n]*`
    )
    """,
    re.VERBOSE,
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")  # searched only in a message with "@"
_LONG = re.compile(r"[0-9a-fA-F][0-9a-fA-F]{7}")  # a part of each UUID, hash and id
_LINES = re.compile(r"\s*[\r\n]\s*")  # so that a fingerprint is a single line
_SEVERAL = re.compile(r"\*(?:[\s.,:+-]*\*)+")


def fingerprint(type: str, message: str) -> str:
    """Return what the errors of a group share, in the form ``TypeName: message`` with ``*`` for what differs.

    ``Filter(error=fingerprint(...))`` matches the error.

    Example::

        fingerprint("KeyError", "'ada'")  # "KeyError: *"
        fingerprint("ConnectionError", "pdf:8080 refused attempt 3")  # "ConnectionError: pdf:* refused attempt *"
    """
    message = message.rstrip()
    shared = message[:_LONGEST]
    if "@" in shared:
        shared = _EMAIL.sub("*", shared)
    shared = (_VARYING if _LONG.search(shared) else _VARYING_SHORT).sub("*", shared)
    if "\n" in shared or "\r" in shared:
        shared = _LINES.sub("*", shared)
    if len(message) > _LONGEST:  # the cut may have split a value
        shared = shared.rsplit(maxsplit=1)[0] + "*" if " " in shared else shared + "*"
    return _SEVERAL.sub("*", f"{type}: {shared}").rstrip()


class Group(Struct, frozen=True, kw_only=True):
    """The notifications of a handler whose last errors have the same fingerprint. Dates are naive UTC.

    Example::

        for group in await outbox.admin.groups():
            print(group.count, group.handler_name, group.fingerprint)
            await outbox.admin.retry(group.filter, reason="the PDF service is back")
    """

    handler_name: str
    """The stored name of the handler."""
    fingerprint: str
    """The error, with ``*`` for numbers, ids, e-mail addresses and quoted values."""
    count: int
    """The number of notifications among those that were examined."""
    first_seen: datetime
    """The last change of the oldest notification."""
    last_seen: datetime
    sample: str
    """The last error of the newest notification, in the form ``TypeName: message``."""
    notification_id: UUID
    """The newest notification."""
    event_id: UUID
    filter: Filter
    """Selects all notifications of the group, including those that were not examined."""
    shard: str


T = TypeVar("T")


class Groups(list[T]):
    """The groups, largest first, and the number of notifications that were examined.

    ``str`` describes the scope: ``grouped over the newest 500 of 4,310``.
    """

    def __init__(self, groups: Iterable[T], looked_at: int, of: int) -> None:
        """``looked_at``: the notifications that were grouped. ``of``: a bounded count of all that match."""
        super().__init__(groups)
        self.looked_at = looked_at
        self.of = of

    def __str__(self) -> str:
        if self.looked_at >= self.of:
            return f"grouped over all {self.looked_at:,}"
        return f"grouped over the newest {self.looked_at:,} of {self.of}"


# --- the history of a handler, from the figures that processes report every minute ----------------


class HistoryPoint(Struct, frozen=True, kw_only=True):
    """The runs of a handler within a period. Dates are naive UTC, durations and lags are seconds.

    A percentile is the upper bound of its bucket (``outboxio/statistics/figures.py``): 95 % of the runs took at most
    ``duration_p95``. Infinity stands for more than the largest bound; ``None`` for a period without runs.
    """

    begin: datetime
    succeeded: int
    failed: int
    """Runs that failed and will be retried."""
    dead: int
    expired: int
    skipped: int
    """Notifications that ended without a run, because they are older than the handler's ``since``."""
    duration_mean: float | None
    duration_p50: float | None
    duration_p95: float | None
    duration_p99: float | None
    lag_p50: float | None
    """The lag is the time between a notification's due time and the start of its run."""
    lag_p95: float | None
    lag_p99: float | None

    @property
    def runs(self) -> int:
        """The number of runs that succeeded or failed."""
        return self.succeeded + self.failures

    @property
    def failures(self) -> int:
        """The number of runs that failed, permanently or not."""
        return self.failed + self.dead + self.expired

    @property
    def fail_share(self) -> float | None:
        """The failure rate, 0 to 1; ``None`` without runs."""
        return self.failures / self.runs if self.runs else None


class HandlerHistory(Struct, frozen=True, kw_only=True):
    """The runs of a handler, or of all handlers, over time, on all shards together.

    Example::

        history = await outbox.admin.history("invoice-pdf", within=timedelta(hours=24), step=timedelta(minutes=15))
        print(history.total.runs, history.total.duration_p95)
        for point in history.points:
            print(point.begin, point.succeeded, point.failures)
    """

    handler_name: str | None
    """``None`` for all handlers together."""
    since: datetime
    """The start of the first period."""
    until: datetime
    """The time of the query, which lies in the last period."""
    step: timedelta
    """The length of each period."""
    total: HistoryPoint
    """All periods together."""
    points: tuple[HistoryPoint, ...]
    """Each period, the oldest first."""
