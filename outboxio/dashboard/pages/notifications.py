"""The list of notifications, and dead letters grouped by error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.lists import (
    ROWS,
    Listed,
    Parameters,
    around_of,
    counts_of,
    in_time,
    requested_filter,
    rows_of,
    total_of,
)
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import Refused, View
from outboxio.model.notification import State
from outboxio.model.operating.groups import Filter, Group, Groups
from outboxio.model.operating.operation import BoundedCount
from outboxio.operations.queries.filters import TO_RETRY, TO_SKIP, query_of
from outboxio.support.codec import made_from


async def notifications(request: PageRequest) -> View:
    """Show the notifications that match the filter."""
    filter = await requested_filter(request)
    page = await request.admin.list(filter, ROWS, request.query.get("after"), documents=False, shard=request.shard)
    states = await counts_of(request, filter)
    facts = Listed(
        filter=query_of(filter), count=total_of(states, filter, len(page)), states=states, rows=rows_of(page, request),
        next=page.next,
    )  # fmt: skip
    around = await around_of(request, filter, page)
    changes = {"retries": _has(filter, TO_RETRY), "skips": _has(filter, TO_SKIP)}
    return View(template="notifications.html", title="Notifications", facts=facts, shown={"around": around, **changes})


def _has(filter: Filter, states: tuple[Any, ...]) -> bool:
    """True if the filter includes one of these states."""
    return not filter.states or any(state in states for state in filter.states)


# --- dead letters: grouped by handler and error, and one by one -----------------------------------


DEAD = (State.DEAD, State.EXPIRED)
DEAD_LETTER_PARAMETERS = (
    "state",
    "handler",
    "error",
    "type",
    "key",
    "model",
    "action",
    "correlation",
    "since",
    "until",
)


class GroupRow(Struct, frozen=True, kw_only=True):
    """Dead letters of a handler with the same error."""

    handler_name: str
    error: str
    """The error, with ``*`` for the parts that differ. Without the right to read payloads, only its class."""
    count: int
    """The number of dead letters, among those that were grouped."""
    first_seen: datetime
    last_seen: datetime
    sample: str | None
    """The newest error; ``None`` without the right to read payloads."""
    event_id: UUID
    """The event of the newest dead letter."""
    filter: Parameters
    """Selects all dead letters of the group; without the right to read payloads, all dead letters of the handler."""


class Grouped(Struct, frozen=True, kw_only=True):
    """The groups, the largest first."""

    groups: list[GroupRow]
    looked_at: int
    """The number of newest dead letters that were grouped."""
    is_all: bool
    """True if these are all dead letters that match."""


class DeadLetters(Listed, frozen=True, kw_only=True):
    """The facts of the page."""

    grouped: Grouped | None
    """``None`` on the pages with older dead letters, and if the dead letters could not be grouped within 2 s."""


async def dead(request: PageRequest) -> View:
    """Show the dead letters that match the filter."""
    filter = await requested_filter(request, *DEAD)
    if other := [state for state in filter.states if state not in DEAD]:
        raise Refused(
            400, f"{other[0]} notifications are not dead letters: dead letters are DEAD or EXPIRED.",
            "The page Notifications shows notifications in any state.",
        )  # fmt: skip
    after = request.query.get("after")
    page = await request.admin.list(filter, ROWS, after, shard=request.shard)
    states, groups = await asyncio.gather(counts_of(request, filter, DEAD), _groups(request, filter))
    grouped: Grouped | None = None
    count = total_of(states, filter, len(page))
    if groups is not None:
        count = cast(BoundedCount, groups.of)
        rows = group_rows(groups, shows_payloads=request.access.may("payloads"))
        grouped = Grouped(groups=rows, looked_at=groups.looked_at, is_all=groups.looked_at >= groups.of)
    facts = DeadLetters(
        filter=query_of(filter), states=states, rows=rows_of(page, request), next=page.next, grouped=grouped,
        count=count,
    )  # fmt: skip
    around = await around_of(request, filter, page, DEAD_LETTER_PARAMETERS, DEAD)
    return View(template="dead.html", title="Dead letters", facts=facts, shown={"around": around})


async def _groups(request: PageRequest, filter: Filter) -> Groups[Group] | None:
    """Return the groups; ``None`` on pages with older dead letters, and after 2 s."""
    return None if "after" in request.query else await in_time(request.admin.groups(filter, shard=request.shard))


def group_rows(groups: Iterable[Group], *, shows_payloads: bool) -> list[GroupRow]:
    """Return the groups as the user may see them, largest first."""
    if shows_payloads:
        return [_row(group, group.fingerprint, group.sample) for group in groups]
    return _by_class(groups)


def _by_class(groups: Iterable[Group]) -> list[GroupRow]:
    """Group by handler and error class, for a user who may not read error messages."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((group.handler_name, group.fingerprint.partition(": ")[0]), []).append(group)
    made: list[GroupRow] = []
    for (_, kind), members in found.items():
        newest = max(members, key=lambda group: group.last_seen)
        whole = replace(
            newest,
            count=sum(group.count for group in members),
            first_seen=min(group.first_seen for group in members),
            filter=replace(newest.filter, error=None),
        )
        made.append(_row(whole, kind, None))
    return sorted(made, key=lambda row: -row.count)


def _row(group: Group, error: str, sample: str | None) -> GroupRow:
    return made_from(group, GroupRow, error=error, sample=sample, filter=query_of(group.filter))
