"""The endpoints of outgoing webhooks, with their newest deliveries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from outboxio.dashboard.filters import refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, Row, rows_of
from outboxio.dashboard.page_request import WEBHOOK_DELIVERY, PageRequest
from outboxio.dashboard.view import View
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import WORST_FIRST

LOOKED_AT = 500


class EndpointRow(Struct, frozen=True, kw_only=True):
    """An endpoint, according to its newest deliveries."""

    endpoint_id: str
    handler_name: str
    states: Mapping[str, int]
    """The deliveries in each state, the worst state first."""
    attempts: int
    """The number of attempts of these deliveries."""
    error: str | None
    """The newest error of an attempt, or else of a postponed delivery; a class without the right to read payloads."""
    updated_date: datetime


class WebhooksFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    endpoints: list[EndpointRow]
    """Endpoints with failures first."""
    looked_at: int
    """The number of deliveries that the page is based on."""


async def webhooks(request: PageRequest) -> View:
    """Show the endpoints of the newest 500 deliveries."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    found: dict[tuple[str, str], list[Row]] = {}
    rows: list[Row] = []
    if request.sends_webhooks:
        filter = Filter(event_type=WEBHOOK_DELIVERY)
        rows = rows_of(await request.admin.list(filter, LOOKED_AT, documents=False, shard=request.shard), request)
    for row in rows:
        found.setdefault((row.handler_name, row.model_id or ""), []).append(row)
    endpoints = [_endpoint(*key, some) for key, some in found.items()]
    endpoints.sort(key=lambda one: (one.error is None, one.handler_name, one.endpoint_id))
    return View(
        template="webhooks.html", title="Webhooks", facts=WebhooksFacts(endpoints=endpoints, looked_at=len(rows))
    )


def _endpoint(handler_name: str, endpoint_id: str, rows: list[Row]) -> EndpointRow:
    states = Counter(str(row.state) for row in rows)
    failed = sorted((row for row in rows if row.error_type), key=lambda row: row.attempts == 0)
    return EndpointRow(
        endpoint_id=endpoint_id,
        handler_name=handler_name,
        states={state: states[state] for state in WORST_FIRST if states[state]},
        attempts=sum(row.attempts for row in rows),
        error=(failed[0].error or failed[0].error_type) if failed else None,
        updated_date=max(row.updated_date for row in rows),
    )
