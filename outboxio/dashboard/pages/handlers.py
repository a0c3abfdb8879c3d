"""The list of handlers, worst first, and the page of a handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from msgspec import Struct

from outboxio.dashboard.filters import refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, in_time
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.pages.notifications import GroupRow, group_rows
from outboxio.dashboard.pages.operations import without_errors
from outboxio.dashboard.pages.overview import fixed_at, without_messages
from outboxio.dashboard.view import Refused, View
from outboxio.errors import UnknownHandler
from outboxio.handlers.described import DEFAULT_OPTIONS, changed, in_texts
from outboxio.health.values import Finding, HandlerStatus, InstanceStatus, KeyStatus, Overview
from outboxio.model.operating.groups import Filter, HandlerHistory
from outboxio.model.operating.operation import Operation
from outboxio.operations.partitions.owners import HandlerPartitions
from outboxio.outbox import Outbox
from outboxio.statistics.figures import DURATIONS, LAGS
from outboxio.support.codec import is_object


class HandlersFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    handlers: tuple[HandlerStatus, ...]
    findings: tuple[Finding, ...]
    """What is wrong with these handlers."""
    of: int
    """The number of all handlers, including those that the filter excludes."""
    read_date: datetime


async def handlers(request: PageRequest) -> View:
    """Show the handlers, or those whose names contain the parameter ``name``."""
    refuse_unknown_parameters(request.query, ["name", *COMMON_PARAMETERS])
    overview = await overview_for(request)
    part = request.query.get("name", "").lower()
    chosen = tuple(one for one in overview.handlers if part in one.handler_name.lower())
    facts = HandlersFacts(
        handlers=chosen,
        findings=findings_of(overview.findings, chosen),
        of=len(overview.handlers),
        read_date=overview.read_date,
    )
    links = links_of(facts.findings, request)
    return View(template="handlers.html", title="Handlers", facts=facts, shown={"links": links})


async def overview_for(request: PageRequest) -> Overview:
    """Return the overview with what the user may see."""
    overview = await request.admin.overview()
    return overview if request.access.may("payloads") else without_messages(overview)


def links_of(findings: Sequence[Finding], request: PageRequest) -> dict[Finding, tuple[str, str] | None]:
    """Return the link to the page that fixes each finding; ``None`` if it is this page."""
    links = {finding: fixed_at(finding, request) for finding in findings}
    here = request.here().partition("?")[0]
    return {finding: None if link is None or link[0] == here else link for finding, link in links.items()}


def findings_of(findings: Sequence[Finding], handlers: Sequence[HandlerStatus]) -> tuple[Finding, ...]:
    """Return the findings about these handlers."""
    names = {handler.handler_name for handler in handlers}
    return tuple(finding for finding in findings if finding.handler in names)


# --- the handlers of the code of this process, with their options ---------------------------------


# pyright: reportPrivateUsage=false


def registered(outbox: Outbox, name: str) -> dict[str, Any] | None:
    """Return the handler as registered in this process, or ``None``. ``options``: other non-default options."""
    handler = outbox._handlers.find(name)
    if handler is None:
        return None
    options = changed(handler.options, DEFAULT_OPTIONS)
    return {
        "where": handler.where, "delivery": str(handler.options.delivery), "ordered": handler.options.ordered,
        "event_types": handler.event_type_names, "topic": handler.topic,
        "options": {name: value for name, value in options.items() if name not in ("delivery", "ordered")},
    }  # fmt: skip


# --- one handler ----------------------------------------------------------------------------------


MAX_GROUPED = 200
GROUPS, KEYS, OPERATIONS = 5, 10, 5
LOOKED_AT = 100  # operations that are searched for those on the handler

Span = Literal["1h", "24h"]
SPANS: dict[str, tuple[timedelta, timedelta]] = {
    "1h": (timedelta(hours=1), timedelta(minutes=1)),
    "24h": (timedelta(hours=24), timedelta(minutes=15)),
}


class HandlerFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    handler_name: str
    status: HandlerStatus | None
    """``None`` for a name that only notifications still have."""
    findings: tuple[Finding, ...]
    registered: dict[str, Any] | None
    """``None`` if this process does not have the code of the handler."""
    options: Mapping[str, str] | None
    """The non-default options, of a running process or of this one; ``None`` if neither has the handler."""
    options_from: str | None
    """The process that reports the options, with its version of outboxio; ``None`` for the code of this process."""
    span: str
    history: HandlerHistory
    groups: list[GroupRow]
    """The most frequent errors of the newest 200 failures."""
    grouped: int | None
    """The failures that were grouped; ``None`` if the failures could not be grouped within 2 s."""
    keys: list[KeyStatus]
    partitions: list[HandlerPartitions]
    instances: list[InstanceStatus]
    """The processes that have the handler, by their own reports."""
    operations: list[Operation]
    """The newest operations on the handler."""
    read_date: datetime


async def handler(request: PageRequest) -> View:
    """Show a handler, with a chart of 1 h or 24 h (the parameter ``span``)."""
    refuse_unknown_parameters(request.query, ["span", *COMMON_PARAMETERS])
    name, span, admin = request.path["name"], request.query.get("span", "1h"), request.admin
    if span not in SPANS:
        raise Refused(400, f"Unknown span {span}.", f"Available: {', '.join(SPANS)}.")
    within, step = SPANS[span]
    try:
        history = await admin.history(name, within=within, step=step, shard=request.shard)
    except UnknownHandler as error:
        raise Refused(404, str(error), "The page Handlers lists all handlers.") from None
    overview = await overview_for(request)
    status = next((one for one in overview.handlers if one.handler_name == name), None)
    groups = await in_time(admin.groups(Filter(handler=name), limit=MAX_GROUPED))
    options, options_from = _options(request.outbox, overview, name, status)
    facts = HandlerFacts(
        handler_name=name,
        status=status,
        findings=findings_of(overview.findings, [status] if status else []),
        registered=registered(request.outbox, name),
        options=options,
        options_from=options_from,
        span=span,
        history=history,
        groups=group_rows(groups or (), shows_payloads=request.access.may("payloads"))[:GROUPS],
        grouped=None if groups is None else groups.looked_at,
        keys=list(await admin.keys(name, limit=KEYS)),
        partitions=await _partitions(request, name),
        instances=[one for one in overview.instances if name in one.handlers],
        operations=await _operations(request, name),
        read_date=overview.read_date,
    )
    p95s = {  # a chart shows no run as 0, and values above the largest bound as that bound
        "durations": [min(point.duration_p95 or 0.0, DURATIONS[-1]) for point in history.points],
        "lags": [min(point.lag_p95 or 0.0, LAGS[-1]) for point in history.points],
    }
    return View(
        template="handler.html",
        title=name,
        facts=facts,
        shown={"p95s": p95s, "links": links_of(facts.findings, request)},
    )


def _options(
    outbox: Outbox, overview: Overview, name: str, status: HandlerStatus | None
) -> tuple[Mapping[str, str] | None, str | None]:
    """Return the options of a handler, and the process that reports them."""
    if status is not None and status.options is not None:
        version = next((one.version for one in overview.instances if one.instance == status.options_from), "")
        return status.options, f"{status.options_from}, outboxio {version}"
    handler = outbox._handlers.find(name)
    return (None if handler is None else in_texts(handler.options)), None


async def _partitions(request: PageRequest, name: str) -> list[HandlerPartitions]:
    """Return the partitions; none for a handler that only has notifications left."""
    try:
        return list(await request.admin.partitions(name))
    except UnknownHandler:
        return []


async def _operations(request: PageRequest, name: str) -> list[Operation]:
    """Return the newest operations on a handler, among the newest 100 operations."""
    found = [one for one in await request.admin.operations(LOOKED_AT) if _handler_in(one.request) == name]
    shows_payloads = request.access.may("payloads")
    return [one if shows_payloads else without_errors(one) for one in found[:OPERATIONS]]


def _handler_in(request: Mapping[str, object]) -> object:
    filter = request.get("filter")
    return filter.get("handler") if is_object(filter) else request.get("handler")
