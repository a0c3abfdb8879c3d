"""The protocols behind what operators see and order: search for notifications, probes, operations, reports.

Every read is bounded: no statement reads all the rows that retention keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal, Protocol
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Place, Search
from outboxio.model.operating.operation import Operation

SILENT_REPORTS = 3
"""A process counts as alive until so many of its reports are missing."""


class FoundRows(Struct, frozen=True):
    """A page of matching notifications."""

    rows: Sequence[NotificationRecord]
    next: Place | None
    """The place after which to go on; ``None`` after the last match. A page may have few rows and a place: the read
    ended at its bound."""


class Counted(Struct, frozen=True):
    """A bounded count."""

    number: int
    is_complete: bool
    """False if there are more matches, or there may be."""


class LastError(Struct, frozen=True):
    """The last error of a matching notification."""

    id: UUID
    event_id: UUID
    handler_name: str
    updated_date: datetime
    type: str
    message: str


class FoundErrors(Struct, frozen=True):
    """The last errors of the newest matches. A match without a last error is left out."""

    rows: Sequence[LastError]
    next: Place | None
    """The place after which further matches may be; ``None`` if all matches were read."""


class BulkOrder(Struct, frozen=True):
    """A bulk order, as the worker carries the order out."""

    kind: Literal["retry", "skip"]
    operation: UUID
    worker: str
    """The process that carries the order out."""
    search: Search


class Piece(Struct, frozen=True):
    """The result of a piece of a bulk order."""

    matched: int
    done: int
    refused: int
    next: Place | None
    """The place after which the next piece begins; ``None`` after the last piece."""
    is_ours: bool = True
    """False if the operation is not RUNNING any longer, has a different worker, or is to be stopped. Then nothing was
    changed."""


class SearchRepository(Protocol):
    """Matching notifications, newest first, along the index that fits the search (decision 43).

    The walks, each with its own order:

    - ``dead``: only DEAD and EXPIRED rows are wanted. By the date of the end, newest first.
    - ``waiting``: only PENDING, FAILED and DYING rows. By due date, latest first.
    - ``blocked``: only BLOCKED rows. By handler name, ordering key and sequence.
    - ``events``: the events of a correlation id or of an action id are known, at most 5,000. Newest event first.
    - ``all``: everything else, along the unique key (event_id, handler_name), newest event first. Ids of events are in
      the order of time.

    A search of several states takes several walks, one after the other. A row that does not change is in exactly one
    page. ``most``: a read ends after about as many rows, matching or not; the page then has a place and may have few
    rows. ``None``: after as many rows as a database reads within 50 ms.
    """

    async def find(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: Place | None = None,
        *,
        most: int | None = None,
        documents: bool = True,
    ) -> FoundRows:
        """Up to ``limit`` matches after a place. The place is from a page of the same search.

        ``documents``: see ``EventSearch``.
        """
        ...

    async def place_of(self, namespace: str, search: Search, id: UUID) -> Place | None:
        """The place of a notification in the walk of the search.

        ``None`` for an unknown id, and for a row in a state that the walk does not have, or no longer has.
        """
        ...

    async def count(self, namespace: str, search: Search, most: int, *, reads: int | None = None) -> Counted:
        """The number of matches, up to ``most``; about ``reads`` rows are read, matching or not.

        ``None``: as many rows as a database reads within 50 ms.
        """
        ...

    async def last_errors(self, namespace: str, search: Search, limit: int, *, most: int | None = None) -> FoundErrors:
        """The last errors of the newest ``limit`` matches, in the order of :meth:`find`."""
        ...

    async def change_piece(
        self, namespace: str, order: BulkOrder, after: Place | None, limit: int, now: datetime
    ) -> Piece:
        """Retry or skip up to ``limit`` matches after a place, and write the new place into ``operations``.

        A row that SKIP does not change, because the row is SUCCEEDED or SKIPPED, is refused. A row that does not match
        any longer is left.

        Both happen in a single transaction, in which the row of the operation is locked: the row must be RUNNING, with
        the worker of the order and without an order to stop. The search of a bulk order has ``until``, so a changed
        row, whose ``updated_date`` is not before ``until``, never matches again. The transaction also adds to
        ``matched``, ``done`` and ``refused``, and sets ``updated_date``.
        """
        ...


class DueFigures(Struct, frozen=True):
    """The unfinished notifications of a stored handler name. Both numbers are counted up to a bound."""

    handler_name: str
    due: int
    """PENDING, FAILED and DYING rows that are due now."""
    waiting: int
    """PENDING, FAILED and DYING rows that are due later: delayed, scheduled, or waiting for a retry."""
    oldest_due: datetime | None
    """The earliest due date of a row that is due now."""


class DeferredFigures(Struct, frozen=True):
    """The notifications of a stored handler name that wait for code with a newer version of an event."""

    handler_name: str
    event_type: str
    version: int
    number: int


class DeadFigures(Struct, frozen=True):
    """The DEAD and EXPIRED notifications of a stored handler name, counted up to a bound."""

    handler_name: str
    number: int
    recent: int
    """The number of rows that ended after a given moment."""
    newest: datetime | None


class ParkedKey(Struct, frozen=True):
    """An ordering key that a DEAD or EXPIRED notification parks."""

    handler_name: str
    """The stored handler name of the notification that parks the key."""
    ordering_key: str
    id: UUID
    """The notification that parks the key."""
    event_id: UUID
    since: datetime
    """The moment at which the notification ended."""
    blocked: int
    """The BLOCKED rows behind, counted up to a bound."""


class HandlerMinute(Struct, frozen=True, kw_only=True):
    """The runs of a handler within a minute in one process, or in several."""

    handler_name: str
    minute_date: datetime
    succeeded: int
    failed: int
    dead: int
    expired: int
    skipped: int
    duration_us: int
    durations: tuple[int, ...]
    lags: tuple[int, ...]


class InstanceReport(Struct, frozen=True, kw_only=True):
    """A row of ``instance_reports``: a process in ``running()``, by its own report."""

    instance: str
    """The name of the process in ``leases``."""
    version: str
    started_date: datetime
    last_seen_date: datetime
    delay_seconds: int
    report: msgspec.Raw
    """A JSON object."""

    def is_alive(self, now: datetime) -> bool:
        """True until three reports are missing. This is the only rule by which a process counts as alive."""
        return now - self.last_seen_date < SILENT_REPORTS * timedelta(seconds=max(1, self.delay_seconds))


class Taken(Struct, frozen=True):
    """An operation that this process carries out from now on."""

    operation: Operation
    reached: Place | None
    """The place after the last piece that was done."""
