"""Notifications: every state, the newest first, with the orders for the selection and for all that match."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.lists import (
    ROWS,
    Listed,
    Words,
    around_of,
    counts_of,
    filter_asked,
    in_time,
    rows_of,
    total_of,
)
from outboxio.dashboard.view import Refused, View
from outboxio.model.notification import State
from outboxio.model.operating.groups import Filter, Group, Groups
from outboxio.model.operating.operation import BoundedCount
from outboxio.operations.queries.filters import TO_RETRY, TO_SKIP, query_of
from outboxio.support.codec import made_from


async def notifications(asked: Asked) -> View:
    """The notifications that match the filter."""
    filter = await filter_asked(asked)
    page = await asked.admin.list(filter, ROWS, asked.query.get("after"), documents=False, shard=asked.shard)
    states = await counts_of(asked, filter)
    facts = Listed(
        filter=query_of(filter), count=total_of(states, filter, len(page)), states=states, rows=rows_of(page, asked),
        next=page.next,
    )  # fmt: skip
    around = await around_of(asked, filter, page)
    changes = {"retries": _has(filter, TO_RETRY), "skips": _has(filter, TO_SKIP)}
    return View(template="notifications.html", title="Notifications", facts=facts, shown={"around": around, **changes})


def _has(filter: Filter, states: tuple[Any, ...]) -> bool:
    """True if a state of the filter can be changed by an order that means these states."""
    return not filter.states or any(state in states for state in filter.states)


# --- dead letters: grouped by handler and error, and one by one -----------------------------------


DEAD = (State.DEAD, State.EXPIRED)
DEAD_WORDS = ("state", "handler", "error", "type", "key", "model", "action", "correlation", "since", "until")


class GroupRow(Struct, frozen=True, kw_only=True):
    """Dead letters of a handler with the same error."""

    handler_name: str
    error: str
    """The error, with ``*`` for what differs between errors. Without the right to read payloads, its class only."""
    number: int
    """The dead letters among those that were grouped."""
    first_seen: datetime
    last_seen: datetime
    sample: str | None
    """The newest error; ``None`` without the right to read payloads."""
    event_id: UUID
    """The event of the newest dead letter."""
    filter: Words
    """Selects all dead letters of the group; without the right to read payloads, all dead letters of the handler."""


class Grouped(Struct, frozen=True, kw_only=True):
    """The groups, the largest first."""

    groups: list[GroupRow]
    looked_at: int
    """The newest dead letters, which were grouped."""
    is_all: bool
    """True if these are all dead letters that match."""


class DeadLetters(Listed, frozen=True, kw_only=True):
    """The facts of the page."""

    grouped: Grouped | None
    """``None`` on the pages with older dead letters, and if the dead letters could not be grouped within 2 s."""


async def dead(asked: Asked) -> View:
    """The dead letters that match the filter."""
    filter = await filter_asked(asked, *DEAD)
    if other := [state for state in filter.states if state not in DEAD]:
        raise Refused(
            400, f"{other[0]} notifications are no dead letters: dead letters are DEAD or EXPIRED.",
            "The page Notifications shows notifications in any state.",
        )  # fmt: skip
    after = asked.query.get("after")
    page = await asked.admin.list(filter, ROWS, after, shard=asked.shard)
    states, groups = await asyncio.gather(counts_of(asked, filter, DEAD), _groups(asked, filter))
    grouped: Grouped | None = None
    count = total_of(states, filter, len(page))
    if groups is not None:
        count = cast(BoundedCount, groups.of)
        rows = group_rows(groups, tells=asked.access.may("payloads"))
        grouped = Grouped(groups=rows, looked_at=groups.looked_at, is_all=groups.looked_at >= groups.of)
    facts = DeadLetters(
        filter=query_of(filter), states=states, rows=rows_of(page, asked), next=page.next, grouped=grouped,
        count=count,
    )  # fmt: skip
    around = await around_of(asked, filter, page, DEAD_WORDS, DEAD)
    return View(template="dead.html", title="Dead letters", facts=facts, shown={"around": around})


async def _groups(asked: Asked, filter: Filter) -> Groups[Group] | None:
    """The groups; ``None`` on the pages with older dead letters, and after 2 s."""
    return None if "after" in asked.query else await in_time(asked.admin.groups(filter, shard=asked.shard))


def group_rows(groups: Iterable[Group], *, tells: bool) -> list[GroupRow]:
    """The groups as the user may see them, the largest first."""
    if tells:
        return [_row(group, group.fingerprint, group.sample) for group in groups]
    return _by_class(groups)


def _by_class(groups: Iterable[Group]) -> list[GroupRow]:
    """The groups for a user who may not read messages: by handler and class of the error."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((group.handler_name, group.fingerprint.partition(": ")[0]), []).append(group)
    made: list[GroupRow] = []
    for (_, kind), members in found.items():
        newest = max(members, key=lambda group: group.last_seen)
        whole = replace(
            newest,
            number=sum(group.number for group in members),
            first_seen=min(group.first_seen for group in members),
            filter=replace(newest.filter, error=None),
        )
        made.append(_row(whole, kind, None))
    return sorted(made, key=lambda row: -row.number)


def _row(group: Group, error: str, sample: str | None) -> GroupRow:
    return made_from(group, GroupRow, error=error, sample=sample, filter=query_of(group.filter))
