"""All handlers, the worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, in_time
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
    """All handlers, also those that the filter leaves out."""
    read_date: datetime


async def handlers(asked: Asked) -> View:
    """The handlers, or those whose names contain the word ``name``."""
    refuse_unknown_words(asked.query, ["name", *OTHER_WORDS])
    overview = await overview_for(asked)
    part = asked.query.get("name", "").lower()
    chosen = tuple(one for one in overview.handlers if part in one.handler_name.lower())
    facts = HandlersFacts(
        handlers=chosen,
        findings=findings_of(overview.findings, chosen),
        of=len(overview.handlers),
        read_date=overview.read_date,
    )
    links = links_of(facts.findings, asked)
    return View(template="handlers.html", title="Handlers", facts=facts, shown={"links": links})


async def overview_for(asked: Asked) -> Overview:
    """The overview as the user may see the overview."""
    overview = await asked.admin.overview()
    return overview if asked.access.may("payloads") else without_messages(overview)


def links_of(findings: Sequence[Finding], asked: Asked) -> dict[Finding, tuple[str, str] | None]:
    """The address at which each finding is mended, unless this is the address, and the words of the link."""
    links = {finding: fixed_at(finding, asked) for finding in findings}
    here = asked.here().partition("?")[0]
    return {finding: None if link is None or link[0] == here else link for finding, link in links.items()}


def findings_of(findings: Sequence[Finding], handlers: Sequence[HandlerStatus]) -> tuple[Finding, ...]:
    """The findings about handlers."""
    names = {handler.handler_name for handler in handlers}
    return tuple(finding for finding in findings if finding.handler in names)


# --- the handlers of the code of this process, with their options ---------------------------------


# pyright: reportPrivateUsage=false


def registered(outbox: Outbox, name: str) -> dict[str, Any] | None:
    """The handler with this name, as the code of this process has registered it; ``None`` without its code.

    ``options``: the further options that are not the defaults.
    """
    handler = outbox._handlers.find(name)
    if handler is None:
        return None
    options = changed(handler.options, DEFAULT_OPTIONS)
    return {
        "where": handler.where, "delivery": str(handler.options.delivery), "ordered": handler.options.ordered,
        "event_types": handler.wanted_names, "topic": handler.topic,
        "options": {name: value for name, value in options.items() if name not in ("delivery", "ordered")},
    }  # fmt: skip


# --- one handler: what it does, how it does, and the orders for it --------------------------------


MOST_GROUPED = 200
GROUPS, KEYS, OPERATIONS = 5, 10, 5
LOOKED_AT = 100  # operations, of which those about the handler are shown

Span = Literal["1h", "24h"]
SPANS: dict[str, tuple[timedelta, timedelta]] = {
    "1h": (timedelta(hours=1), timedelta(minutes=1)),
    "24h": (timedelta(hours=24), timedelta(minutes=15)),
}


class HandlerFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    handler_name: str
    status: HandlerStatus | None
    """``None`` for a name that no process has announced for a long time, and that still has notifications."""
    findings: tuple[Finding, ...]
    registered: dict[str, Any] | None
    """``None`` if this process does not have the code of the handler."""
    options: Mapping[str, str] | None
    """The options that are not the defaults, of a process that runs or of this process; ``None`` if neither has any."""
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
    """The newest orders about the handler."""
    read_date: datetime


async def handler(asked: Asked) -> View:
    """The facts about a handler, with a chart of 1 h or of 24 h (the word ``span``)."""
    refuse_unknown_words(asked.query, ["span", *OTHER_WORDS])
    name, span, admin = asked.path["name"], asked.query.get("span", "1h"), asked.admin
    if span not in SPANS:
        raise Refused(400, f"There is no chart of {span}.", f"The charts are: {', '.join(SPANS)}.")
    within, step = SPANS[span]
    try:
        history = await admin.history(name, within=within, step=step, shard=asked.shard)
    except UnknownHandler as error:
        raise Refused(404, str(error), "The page Handlers lists all handlers.") from None
    overview = await overview_for(asked)
    status = next((one for one in overview.handlers if one.handler_name == name), None)
    groups = await in_time(admin.groups(Filter(handler=name), limit=MOST_GROUPED))
    options, options_from = _options(asked.outbox, overview, name, status)
    facts = HandlerFacts(
        handler_name=name,
        status=status,
        findings=findings_of(overview.findings, [status] if status else []),
        registered=registered(asked.outbox, name),
        options=options,
        options_from=options_from,
        span=span,
        history=history,
        groups=group_rows(groups or (), tells=asked.access.may("payloads"))[:GROUPS],
        grouped=None if groups is None else groups.looked_at,
        keys=list(await admin.keys(name, limit=KEYS)),
        partitions=await _partitions(asked, name),
        instances=[one for one in overview.instances if name in one.handlers],
        operations=await _operations(asked, name),
        read_date=overview.read_date,
    )
    p95s = {  # in a line of a chart, no run is 0, and more than the largest bound is the largest bound
        "durations": [min(point.duration_p95 or 0.0, DURATIONS[-1]) for point in history.points],
        "lags": [min(point.lag_p95 or 0.0, LAGS[-1]) for point in history.points],
    }
    return View(
        template="handler.html",
        title=name,
        facts=facts,
        shown={"p95s": p95s, "links": links_of(facts.findings, asked)},
    )


def _options(
    outbox: Outbox, overview: Overview, name: str, status: HandlerStatus | None
) -> tuple[Mapping[str, str] | None, str | None]:
    """The options of a handler, and the process that reports them."""
    if status is not None and status.options is not None:
        version = next((one.version for one in overview.instances if one.instance == status.options_from), "")
        return status.options, f"{status.options_from}, outboxio {version}"
    handler = outbox._handlers.find(name)
    return (None if handler is None else in_texts(handler.options)), None


async def _partitions(asked: Asked, name: str) -> list[HandlerPartitions]:
    """The partitions; none of a handler that no process has had for long, of which only notifications are left."""
    try:
        return list(await asked.admin.partitions(name))
    except UnknownHandler:
        return []


async def _operations(asked: Asked, name: str) -> list[Operation]:
    """The newest orders about a handler, among the newest 100 orders."""
    found = [one for one in await asked.admin.operations(LOOKED_AT) if _handler_in(one.request) == name]
    tells = asked.access.may("payloads")
    return [one if tells else without_errors(one) for one in found[:OPERATIONS]]


def _handler_in(request: Mapping[str, object]) -> object:
    filter = request.get("filter")
    return filter.get("handler") if is_object(filter) else request.get("handler")
