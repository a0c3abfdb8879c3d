"""The shared parts of lists of notifications: facts, filter fields, links to older rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.filters import (
    PARAMETERS,
    PAYLOAD_PARAMETERS,
    describe_filter,
    filter_of,
    refuse_payload_parameters,
    refuse_unknown_parameters,
)
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import PATIENCE
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import WORST_FIRST, BoundedCount, Page
from outboxio.operations.queries.filters import query_of
from outboxio.support.codec import is_list, is_object, made_from

T = TypeVar("T")

ROWS = 50
LONG = 6.0  # seconds for a page with several queries of up to 2 s each
COUNTED_FOR = 5.0  # seconds for which the counts of the states are cached
MAX_ERROR = 500  # characters of an error in a list; the event's page has the complete error

#: Parameters of every query that belong to no filter.
COMMON_PARAMETERS = ("shard", "after", "format", "did")

Parameters = dict[str, list[str]]
"""Parameters of a filter with their values, as fields of a URL or of a form."""


async def in_time(query: Awaitable[T]) -> T | None:
    """Return the result of a query, or cancel it after 2 s and return ``None``."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await query
    except TimeoutError:
        return None


async def counts_of(request: PageRequest, filter: Filter, states: Iterable[State] = State) -> dict[str, BoundedCount]:
    """Count the notifications of each state that match the rest of the filter. The counts are at most 5 s old.

    States that could not be counted within 2 s are missing.
    """
    selected = [state for state in WORST_FIRST if state in tuple(states)]

    async def count() -> dict[str, BoundedCount]:
        found: dict[str, BoundedCount] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                for state in selected:
                    found[state] = await request.admin.count(replace(filter, states=(state,)), shard=request.shard)
        return found

    key = f"states {selected} {query_of(replace(filter, states=()))} {request.shard}"
    return await request.lately(key, count, fresh=0.0 if "did" in request.query else COUNTED_FOR)


def total_of(counts: Mapping[str, BoundedCount], filter: Filter, rows: int) -> BoundedCount:
    """Return the number of notifications in the states of the filter, at least the number of listed ``rows``."""
    selected = [str(state) for state in filter.states or State]
    known = [counts[state] for state in selected if state in counts]
    is_complete = len(known) == len(selected) and all(count.is_complete for count in known)
    return BoundedCount(max(sum(known), rows), is_complete=is_complete)


class Row(NotificationRecord, frozen=True, kw_only=True):
    """A notification in a list, with only the last of its errors."""

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

    filter: Parameters
    """The parameters of the filter, with dates in place of durations."""
    count: BoundedCount
    """The notifications that match."""
    states: Mapping[str, BoundedCount]
    """The notifications of each state that match the rest of the filter. A state that took too long is missing."""
    rows: list[Row]
    """The newest first."""
    next: str | None
    """The value of ``after`` for older rows; ``None`` at the end."""


def rows_of(records: Iterable[NotificationRecord], request: PageRequest) -> list[Row]:
    """Return the rows, without error messages if the user may not read payloads."""
    return [_row(record, shows_payloads=request.access.may("payloads")) for record in records]


def _row(record: NotificationRecord, *, shows_payloads: bool) -> Row:
    last = None if record.state is State.SUCCEEDED else last_error(record)
    error_type = None if last is None else str(last.get("type", ""))
    error = str(last.get("message", ""))[:MAX_ERROR] if last is not None and shows_payloads else None
    return made_from(record, Row, errors=[], error_type=error_type, error=error)


def last_error(record: NotificationRecord) -> dict[str, object] | None:
    """Return the last error of a notification; ``None`` if another tool has written a different document."""
    errors: object = record.errors
    last: object = errors[-1] if is_list(errors) and errors else None
    return last if is_object(last) else None


async def requested_filter(request: PageRequest, *states: State, parameters: Sequence[str] = PARAMETERS) -> Filter:
    """Return the filter of the query, with durations relative to the time of the database."""
    refuse_unknown_parameters(request.query, [*parameters, *COMMON_PARAMETERS])
    refuse_payload_parameters(request.query, request.access)
    relative = any(name in request.query for name in ("since", "until"))
    now = (await request.admin.overview()).read_date.replace(microsecond=0) if relative else None
    return filter_of(request.values, *states, now=now)


def _older(request: PageRequest, filter: Filter, page: Page[Any]) -> dict[str, Any]:
    """Return the parameters for older rows. ``since=2h`` becomes a date, so that the list stays the same."""
    parameters = query_of(filter)
    return {"after": page.next, **{name: parameters[name] for name in ("since", "until") if name in request.query}}


async def handler_names(request: PageRequest, *also: str | None) -> list[str]:
    """Return the names of all handlers, and the names in ``also``."""
    known = {handler.handler_name for handler in (await request.admin.overview()).handlers}
    return sorted(known | {name for name in also if name})


async def fields_of(
    request: PageRequest, filter: Filter, parameters: Iterable[str], states: Iterable[State] = State
) -> list[dict[str, Any]]:
    """Return the fields of the filter form."""
    made: list[dict[str, Any]] = []
    for name in parameters:
        if name in PAYLOAD_PARAMETERS and not request.access.may("payloads"):
            continue
        field: dict[str, Any] = {"name": name, "label": _LABELS[name], "value": request.query.get(name)}
        if name == "state":
            chosen = [str(state) for state in filter.states]
            field |= {"several": True, "options": [str(state) for state in states], "value": chosen}
        elif name == "handler":
            field["options"] = await handler_names(request, request.query.get("handler"))
        else:
            field["placeholder"] = _PLACEHOLDERS.get(name, "")
        made.append(field)
    if len(request.shards) > 1:
        made.append({"name": "shard", "label": "Shard", "value": request.query.get("shard"), "options": request.shards})
    return made


class Around(Struct, frozen=True, kw_only=True):
    """What the templates of lists need besides the facts."""

    description: str
    """What the filter selects."""
    fields: list[dict[str, Any]]
    older: dict[str, Any]
    is_filtered: bool
    is_filtered_further: bool
    """True if the query filters by more than states, which are shown above the filter."""


async def around_of(
    request: PageRequest,
    filter: Filter,
    page: Page[Any],
    parameters: Sequence[str] = PARAMETERS,
    states: Iterable[State] = State,
    things: str = "notifications",
) -> Around:
    """Return the description and form of the filter, and the link to older rows. ``things``: what is listed."""
    fields = await fields_of(request, filter, parameters, states)
    if things != "notifications":
        fields = [{**field, "label": field["label"].replace("Changed", "Emitted")} for field in fields]
    return Around(
        description=describe_filter(filter, things), fields=fields, older=_older(request, filter, page),
        is_filtered=any(name in request.query for name in parameters),
        is_filtered_further=any(name in request.query for name in parameters if name != "state"),
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
