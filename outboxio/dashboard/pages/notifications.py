"""Notifications: every state, the newest first, with the orders for the selection and for all that match."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import WORDS, in_words, query_of
from outboxio.dashboard.lists import ROWS, Listed, count_in_time, fields_of, filter_asked, older, rows_of
from outboxio.dashboard.view import View
from outboxio.model.operating.filter import Filter
from outboxio.operations.asking.filters import TO_RETRY, TO_SKIP


class Around(Struct, frozen=True):
    """What the template needs beside the facts."""

    words: str
    """The filter in words."""
    fields: list[dict[str, Any]]
    older: dict[str, Any]
    retries: bool
    """True if there may be notifications that ``retry`` changes."""
    skips: bool


class Notifications(Listed, frozen=True, kw_only=True):
    """The facts of the page."""


async def notifications(asked: Asked) -> View:
    """The notifications that match the filter."""
    filter = await filter_asked(asked)
    page = await asked.admin.list(filter, ROWS, asked.query.get("after"), documents=False, shard=asked.shard)
    count = await count_in_time(asked, filter, len(page))
    facts = Notifications(filter=query_of(filter), count=count, rows=rows_of(page, asked), next=page.next)
    around = Around(
        in_words(filter),
        await fields_of(asked, WORDS),
        older(asked, filter, page),
        _has(filter, TO_RETRY),
        _has(filter, TO_SKIP),
    )
    return View(template="notifications.html", title="Notifications", facts=facts, shown={"around": around})


def _has(filter: Filter, states: tuple[Any, ...]) -> bool:
    """True if a state of the filter can be changed by an order that means these states."""
    return not filter.states or any(state in states for state in filter.states)
