"""The orders of operators: who ordered what, why, and how far the order is."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import in_words, refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, ROWS, Words
from outboxio.dashboard.view import Refused, View
from outboxio.errors import OutboxError
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import BoundedCount, Operation, OperationState
from outboxio.operations.queries.filters import given_filter, query_of
from outboxio.support.codec import is_list, is_object, made_from

HIDDEN = "(hidden)"
MOST_LEFT = 10_000
WAITS_AFTER = 15.0  # seconds without a piece after which a RUNNING order is said to wait for a process


class OperationRow(Struct, frozen=True, kw_only=True):
    """An order in words."""

    operation: Operation
    said: str
    """What was ordered."""
    handler: str | None


class OperationsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the list."""

    operations: list[OperationRow]
    next: str | None


class OperationFacts(OperationRow, frozen=True, kw_only=True):
    """The facts of one order."""

    filter: Words | None
    """The words of the filter, for links to the notifications."""
    left: BoundedCount | None
    """The notifications that a bulk order has still to reach; ``None`` for a different order, or an ended order."""
    share: float | None
    """The part that is done, 0 to 1."""
    took: float
    """Seconds from the order to its end, or until the last piece."""
    waits: bool
    """True if the order waits for a process."""


async def operations(asked: Asked) -> View:
    """The orders, the newest first."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    page = await asked.admin.operations(ROWS, asked.query.get("after"), shard=asked.shard)
    tells = asked.access.may("payloads")
    rows = [row_of(operation, tells=tells) for operation in page]
    facts = OperationsFacts(operations=rows, next=page.next)
    return View(template="operations.html", title="Operations", facts=facts)


async def operation(asked: Asked) -> View:
    """One order, with its progress."""
    refuse_unknown_words(asked.query, ["of", *OTHER_WORDS])
    given = asked.path["id"]
    found = await asked.admin.operation(given) if _is_id(given) else None
    if found is None:
        raise Refused(404, f"There is no operation {given[:40]}.", "The page Operations lists the orders of 90 days.")
    tells = asked.access.may("payloads")
    row, filter = row_of(found, tells=tells), filter_in(found)
    left = await _left(asked, found, filter)
    facts = made_from(
        row,
        OperationFacts,
        filter=None if filter is None or (filter.error is not None and not tells) else query_of(filter),
        left=left,
        share=_share(found, left, asked.query.get("of", "")),
        took=((found.finished_date or found.updated_date) - found.created_date).total_seconds(),
        waits=_waits(found, (await asked.admin.overview()).read_date),
    )
    title = f"{found.kind.capitalize()} by {found.actor}"
    return View(template="operation.html", title=title, facts=facts, refreshes=not found.has_ended)


def filter_in(operation: Operation) -> Filter | None:
    """The filter of a bulk order, with the moment before which notifications match."""
    given, search = operation.request.get("filter"), operation.request.get("search")
    if not is_object(given):
        return None
    fields: dict[str, Any] = {name: given[name] for name in Filter.__struct_fields__ if name in given}
    if is_object(search) and search.get("until"):
        fields["until"] = search["until"]
    for name in fields.keys() & {"since", "until"}:
        fields[name] = datetime.fromisoformat(fields[name])
    return given_filter(Filter(**fields))


def said(operation: Operation, *, tells: bool) -> str:
    """What was ordered, in words. ``tells``: False hides the error of a filter."""
    request, filter = operation.request, filter_in(operation)
    if filter is not None:
        error = filter.error if tells or filter.error is None else HIDDEN
        given: Any = request["filter"]
        until = filter.until.replace(microsecond=0) if filter.until is not None and "until" in given else None
        return in_words(replace(filter, error=error, until=until))
    if isinstance(number := request.get("number"), int) and "ids" in request:
        return "1 notification" if number == 1 else f"{number:,} notifications"
    parts = [f"the handler “{request['handler']}”"] if "handler" in request else []
    parts += [f"the job “{request['job']}”"] if "job" in request else []
    parts += [f"{_NAMES[name]} {_value(value)}" for name, value in request.items() if name in _NAMES and value]
    return ", ".join(parts) or ("old rows" if operation.kind == "purge" else "everything")


def row_of(operation: Operation, *, tells: bool) -> OperationRow:
    """An order in words. ``tells``: False hides texts that may come from payloads."""
    filter, request = filter_in(operation), operation.request
    handler: Any = filter.handler if filter is not None else request.get("handler")
    shown = operation if tells else without_errors(operation)
    return OperationRow(operation=shown, said=said(operation, tells=tells), handler=handler)


def without_errors(operation: Operation) -> Operation:
    """The operation without texts that may come from payloads."""
    request = {name: _hidden(value) for name, value in operation.request.items()}
    return replace(operation, request=request, error=None if operation.error is None else HIDDEN)


def _hidden(value: object) -> object:
    return {**value, "error": HIDDEN} if is_object(value) and value.get("error") else value


async def _left(asked: Asked, operation: Operation, filter: Filter | None) -> BoundedCount | None:
    """The notifications that still match: those that were changed do not match any longer."""
    if operation.has_ended or filter is None:
        return None
    try:
        return await asked.admin.count(filter, most=MOST_LEFT)
    except OutboxError:  # the last notification of a handler without any process was changed just now
        return None


def _share(operation: Operation, left: BoundedCount | None, of: str) -> float | None:
    """The part that is done. ``of``: the number that was confirmed, if the address has the number."""
    if operation.state is OperationState.DONE:
        return 1.0
    reached = operation.matched
    whole = reached + left if left is not None else 0
    if of.isdecimal() and len(of) < 10 and not operation.has_ended:
        whole = max(whole, int(of))
    return min(1.0, reached / whole) if whole else None


def _waits(operation: Operation, now: datetime) -> bool:
    return not operation.has_ended and (now - operation.updated_date).total_seconds() > WAITS_AFTER


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if is_list(value) else str(value)


def _is_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


_NAMES = {
    "ordering_key": "key", "since": "since", "until": "until", "types": "types", "states": "states",
    "number": "partitions", "operation": "operation",
}  # fmt: skip
