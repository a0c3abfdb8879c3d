"""Operations: who started them, why, and their progress."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.filters import describe_filter, refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, ROWS, Parameters
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import Refused, View
from outboxio.errors import OutboxError
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import BoundedCount, Operation, OperationState
from outboxio.operations.queries.filters import filter_argument, query_of
from outboxio.support.codec import is_list, is_object, made_from

HIDDEN = "(hidden)"
MAX_LEFT = 10_000
WAITS_AFTER = 15.0  # seconds without progress until a RUNNING operation is shown as waiting for a process


class OperationRow(Struct, frozen=True, kw_only=True):
    """An operation with a description."""

    operation: Operation
    description: str
    """What the operation applies to."""
    handler: str | None


class OperationsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the list."""

    operations: list[OperationRow]
    next: str | None


class OperationFacts(OperationRow, frozen=True, kw_only=True):
    """The facts of one operation."""

    filter: Parameters | None
    """The parameters of the filter, for links to the notifications."""
    left: BoundedCount | None
    """The notifications that a bulk operation still has to change; ``None`` for others, and for finished ones."""
    share: float | None
    """The part that is done, 0 to 1."""
    took: float
    """Seconds from the start to the end, or to the last chunk."""
    waits: bool
    """True if the operation waits for a process."""


async def operations(request: PageRequest) -> View:
    """Show the operations, newest first."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    page = await request.admin.operations(ROWS, request.query.get("after"), shard=request.shard)
    shows_payloads = request.access.may("payloads")
    rows = [row_of(operation, shows_payloads=shows_payloads) for operation in page]
    facts = OperationsFacts(operations=rows, next=page.next)
    return View(template="operations.html", title="Operations", facts=facts)


async def operation(request: PageRequest) -> View:
    """Show an operation with its progress."""
    refuse_unknown_parameters(request.query, ["of", *COMMON_PARAMETERS])
    id = request.path["id"]
    found = await request.admin.operation(id) if _is_id(id) else None
    if found is None:
        raise Refused(
            404, f"There is no operation {id[:40]}.", "The page Operations lists the operations of the last 90 days."
        )
    shows_payloads = request.access.may("payloads")
    row, filter = row_of(found, shows_payloads=shows_payloads), filter_in(found)
    left = await _left(request, found, filter)
    facts = made_from(
        row,
        OperationFacts,
        filter=None if filter is None or (filter.error is not None and not shows_payloads) else query_of(filter),
        left=left,
        share=_share(found, left, request.query.get("of", "")),
        took=((found.finished_date or found.updated_date) - found.created_date).total_seconds(),
        waits=_waits(found, (await request.admin.overview()).read_date),
    )
    title = f"{found.kind.capitalize()} by {found.actor}"
    return View(template="operation.html", title=title, facts=facts, refreshes=not found.has_ended)


def filter_in(operation: Operation) -> Filter | None:
    """Return the filter of a bulk operation, with the time before which notifications match."""
    stored, search = operation.request.get("filter"), operation.request.get("search")
    if not is_object(stored):
        return None
    fields: dict[str, Any] = {name: stored[name] for name in Filter.__struct_fields__ if name in stored}
    if is_object(search) and search.get("until"):
        fields["until"] = search["until"]
    for name in fields.keys() & {"since", "until"}:
        fields[name] = datetime.fromisoformat(fields[name])
    return filter_argument(Filter(**fields))


def description_of(operation: Operation, *, shows_payloads: bool) -> str:
    """Describe what an operation applies to. ``shows_payloads``: False hides the error of a filter."""
    arguments, filter = operation.request, filter_in(operation)
    if filter is not None:
        error = filter.error if shows_payloads or filter.error is None else HIDDEN
        stored: Any = arguments["filter"]
        until = filter.until.replace(microsecond=0) if filter.until is not None and "until" in stored else None
        return describe_filter(replace(filter, error=error, until=until))
    if isinstance(number := arguments.get("number"), int) and "ids" in arguments:
        return "1 notification" if number == 1 else f"{number:,} notifications"
    parts = [f"the handler “{arguments['handler']}”"] if "handler" in arguments else []
    parts += [f"the job “{arguments['job']}”"] if "job" in arguments else []
    parts += [f"{_NAMES[name]} {_value(value)}" for name, value in arguments.items() if name in _NAMES and value]
    return ", ".join(parts) or ("old rows" if operation.kind == "purge" else "everything")


def row_of(operation: Operation, *, shows_payloads: bool) -> OperationRow:
    """Return an operation with its description. ``shows_payloads``: False hides texts that may quote payloads."""
    filter, arguments = filter_in(operation), operation.request
    handler: Any = filter.handler if filter is not None else arguments.get("handler")
    shown = operation if shows_payloads else without_errors(operation)
    description = description_of(operation, shows_payloads=shows_payloads)
    return OperationRow(operation=shown, description=description, handler=handler)


def without_errors(operation: Operation) -> Operation:
    """Return the operation without texts that may quote payloads."""
    arguments = {name: _hidden(value) for name, value in operation.request.items()}
    return replace(operation, request=arguments, error=None if operation.error is None else HIDDEN)


def _hidden(value: object) -> object:
    return {**value, "error": HIDDEN} if is_object(value) and value.get("error") else value


async def _left(request: PageRequest, operation: Operation, filter: Filter | None) -> BoundedCount | None:
    """Count the notifications that still match; those that were changed do not match any more."""
    if operation.has_ended or filter is None:
        return None
    try:
        return await request.admin.count(filter, most=MAX_LEFT)
    except OutboxError:  # the last notification of a handler without a process was just changed
        return None


def _share(operation: Operation, left: BoundedCount | None, of: str) -> float | None:
    """Return the part that is done. ``of``: the confirmed number, from the address."""
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
