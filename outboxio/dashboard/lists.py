"""The parts that all lists of notifications share: facts, the fields of the filter, links to older rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import (
    HIDDEN_WORDS,
    WORDS,
    filter_of,
    in_words,
    refuse_hidden_words,
    refuse_unknown_words,
)
from outboxio.dashboard.view import PATIENCE
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import WORST_FIRST, BoundedCount, Page
from outboxio.operations.queries.filters import query_of
from outboxio.support.codec import is_list, is_object, made_from

T = TypeVar("T")

ROWS = 50
LONG = 6.0  # seconds for a page with several questions, of which each may take 2 s
COUNTED_FOR = 5.0  # seconds for which the counts of the states are shown again
LONGEST_ERROR = 500  # characters of an error in a list; the page of the event has the whole error

#: Words of every query that belong to no filter.
OTHER_WORDS = ("shard", "after", "format", "did")

Words = dict[str, list[str]]
"""Words of a filter with their values, as fields of a URL or of a form."""


async def in_time(question: Awaitable[T]) -> T | None:
    """The answer, or ``None`` after 2 s: then the question is ended, and the page is shown without the answer."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await question
    except TimeoutError:
        return None


async def counts_of(asked: Asked, filter: Filter, states: Iterable[State] = State) -> dict[str, BoundedCount]:
    """The notifications of each state that match the rest of the filter, at most 5 s old.

    The counts take 2 s at most; a state that was not counted by then is missing.
    """
    wanted = [state for state in WORST_FIRST if state in tuple(states)]

    async def count() -> dict[str, BoundedCount]:
        found: dict[str, BoundedCount] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                for state in wanted:
                    found[state] = await asked.admin.count(replace(filter, states=(state,)), shard=asked.shard)
        return found

    key = f"states {wanted} {query_of(replace(filter, states=()))} {asked.shard}"
    return await asked.lately(key, count, fresh=0.0 if "did" in asked.query else COUNTED_FOR)


def total_of(counts: Mapping[str, BoundedCount], filter: Filter, rows: int) -> BoundedCount:
    """The notifications in the states of the filter. ``rows``: those that were listed, the least there can be."""
    wanted = [str(state) for state in filter.states or State]
    known = [counts[state] for state in wanted if state in counts]
    is_complete = len(known) == len(wanted) and all(count.is_complete for count in known)
    return BoundedCount(max(sum(known), rows), is_complete=is_complete)


class Row(NotificationRecord, frozen=True, kw_only=True):
    """A notification in a list, with the last of its errors only."""

    error_type: str | None
    """The class of the last error."""
    error: str | None
    """The message of the last error; ``None`` without an error, or without the right to read payloads."""

    in_json = (
        "id", "event_id", "handler_name", "state", "event_type", "model_type", "model_id", "ordering_key",
        "correlation_id", "attempts", "next_retry_at", "updated_date", "error_type", "error", "shard",
    )  # fmt: skip


class Listed(Struct, frozen=True, kw_only=True):
    """The facts of a page with a list of notifications."""

    filter: Words
    """The words of the filter, with dates in place of durations."""
    count: BoundedCount
    """The notifications that match."""
    states: Mapping[str, BoundedCount]
    """The notifications of each state that match the rest of the filter. A state that took too long is missing."""
    rows: list[Row]
    """The newest first."""
    next: str | None
    """The word ``after`` for older rows; ``None`` at the end."""


def rows_of(records: Iterable[NotificationRecord], asked: Asked) -> list[Row]:
    """The rows, without messages of errors if the user may not read payloads."""
    return [_row(record, tells=asked.access.may("payloads")) for record in records]


def _row(record: NotificationRecord, *, tells: bool) -> Row:
    last = None if record.state is State.SUCCEEDED else last_error(record)
    error_type = None if last is None else str(last.get("type", ""))
    error = str(last.get("message", ""))[:LONGEST_ERROR] if last is not None and tells else None
    return made_from(record, Row, errors=[], error_type=error_type, error=error)


def last_error(record: NotificationRecord) -> dict[str, object] | None:
    """The last error of a notification. A foreign tool may have written a different document."""
    errors: object = record.errors
    last: object = errors[-1] if is_list(errors) and errors else None
    return last if is_object(last) else None


async def filter_asked(asked: Asked, *states: State, words: Sequence[str] = WORDS) -> Filter:
    """The filter of the query. Durations count from the time of the database. Refuses unknown and hidden words."""
    refuse_unknown_words(asked.query, [*words, *OTHER_WORDS])
    refuse_hidden_words(asked.query, asked.access)
    relative = any(word in asked.query for word in ("since", "until"))
    now = (await asked.admin.overview()).read_date.replace(microsecond=0) if relative else None
    return filter_of(asked.values, *states, now=now)


def _older(asked: Asked, filter: Filter, page: Page[Any]) -> dict[str, Any]:
    """The changes of this address for the older rows: ``since=2h`` becomes a date, so that the list stays the same."""
    words = query_of(filter)
    return {"after": page.next, **{word: words[word] for word in ("since", "until") if word in asked.query}}


async def handler_names(asked: Asked, *also: str | None) -> list[str]:
    """The names of all handlers, for a choice. ``also``: names that have to be among the choices."""
    known = {handler.handler_name for handler in (await asked.admin.overview()).handlers}
    return sorted(known | {name for name in also if name})


async def fields_of(
    asked: Asked, filter: Filter, words: Iterable[str], states: Iterable[State] = State
) -> list[dict[str, Any]]:
    """The fields of the form with which a user changes the filter."""
    made: list[dict[str, Any]] = []
    for word in words:
        if word in HIDDEN_WORDS and not asked.access.may("payloads"):
            continue
        field: dict[str, Any] = {"name": word, "label": _LABELS[word], "value": asked.query.get(word)}
        if word == "state":
            chosen = [str(state) for state in filter.states]
            field |= {"several": True, "options": [str(state) for state in states], "value": chosen}
        elif word == "handler":
            field["options"] = await handler_names(asked, asked.query.get("handler"))
        else:
            field["placeholder"] = _PLACEHOLDERS.get(word, "")
        made.append(field)
    if len(asked.shards) > 1:
        made.append({"name": "shard", "label": "Shard", "value": asked.query.get("shard"), "options": asked.shards})
    return made


class Around(Struct, frozen=True, kw_only=True):
    """What the templates of lists need beside the facts."""

    words: str
    """The filter in words."""
    fields: list[dict[str, Any]]
    older: dict[str, Any]
    is_filtered: bool
    is_filtered_further: bool
    """True if the query has more than states, which are above the filter."""


async def around_of(
    asked: Asked,
    filter: Filter,
    page: Page[Any],
    words: Sequence[str] = WORDS,
    states: Iterable[State] = State,
    things: str = "notifications",
) -> Around:
    """The filter in words, its form, and the link to older rows. ``things``: notifications, events or actions."""
    fields = await fields_of(asked, filter, words, states)
    if things != "notifications":
        fields = [{**field, "label": field["label"].replace("Changed", "Emitted")} for field in fields]
    return Around(
        words=in_words(filter, things), fields=fields, older=_older(asked, filter, page),
        is_filtered=any(word in asked.query for word in words),
        is_filtered_further=any(word in asked.query for word in words if word != "state"),
    )  # fmt: skip


_LABELS = {
    "state": "State", "handler": "Handler", "type": "Event type", "key": "Ordering key", "model": "Model id",
    "action": "Action", "correlation": "Correlation id", "error": "Last error", "since": "Changed since",
    "until": "Changed before",
}  # fmt: skip
_PLACEHOLDERS = {
    "error": "TypeName: part * part", "since": "2h, 3d, 2026-01-31", "until": "10m, 2026-01-31",
    "action": "name or id",
}  # fmt: skip
