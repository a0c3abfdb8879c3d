"""The overview: whether anything is wrong, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import PATIENCE, View
from outboxio.errors import OutboxError
from outboxio.health.rules import RULES
from outboxio.health.values import Finding, HandlerStatus, KeyStatus, Overview
from outboxio.model.operating.groups import Filter, Group, HandlerHistory
from outboxio.operations.queries.filters import query_of
from outboxio.support.clock import utc_now

FOLDED_FROM = 4
"""If at least this many handlers have no finding, they are folded below the others."""

MAX_NEEDS = 5
_GROUPED = 200  # newest failures that the overview groups
_DAY = timedelta(days=1)


class Needs(Struct, frozen=True):
    """What needs attention besides the findings."""

    groups: Sequence[Group] = ()
    """Failures of the last 24 hours, grouped by error: the largest groups."""
    grouped_over: str = ""
    """How many failures were grouped, as text."""
    keys: Sequence[KeyStatus] = ()
    """The longest parked keys."""
    error: str | None = None
    """Why the other figures could not be read."""


class OverviewFacts(Struct, frozen=True):
    """The facts of the page."""

    overview: Overview
    needs: Needs
    history: HandlerHistory | None
    """The runs of all handlers within the last hour, by minute; ``None`` if they could not be read within 2 s."""


async def overview(request: PageRequest) -> View:
    """Show the status, the figures, the handlers (worst first), what needs attention, instances and shards."""
    found, needs, history = await asyncio.gather(
        request.admin.overview(), request.lately("needs", lambda: _needs(request)),
        request.lately("history", lambda: _history(request)),
    )  # fmt: skip
    if not request.access.may("payloads"):
        found, needs = without_messages(found), _only_types(needs)
    shown, folded = parted(found.handlers)
    links = {finding: fixed_at(finding, request) for finding in found.findings}
    like = [request.url("notifications", **query_of(group.filter)) for group in needs.groups]
    return View(
        template="overview.html",
        title="Overview",
        facts=OverviewFacts(found, needs, history),
        shown={"links": links, "like": like, "handlers": shown, "folded": folded},
    )


_PAGES = {rule.name: rule.see for rule in RULES}
_OF_HANDLERS = ("dead", "keys", "notifications")  # pages with a filter by handler


def fixed_at(finding: Finding, request: PageRequest) -> tuple[str, str] | None:
    """Return the address and label of the page that fixes a finding."""
    see = ("jobs", "Jobs") if finding.job is not None else _PAGES.get(finding.rule)
    if see is None or not request.has(see[0]):
        return None
    page, label = see
    if page == "handler":
        return (request.url("handler", name=finding.handler), label) if finding.handler else None
    return request.url(page, handler=finding.handler if page in _OF_HANDLERS else None), label


def parted(handlers: Sequence[HandlerStatus]) -> tuple[Sequence[HandlerStatus], Sequence[HandlerStatus]]:
    """Return the handlers to show, and the handlers without a finding to fold."""
    well = [one for one in handlers if one.level == "ok" and not one.paused_since and not one.dead_hour]
    if len(well) == len(handlers) or len(well) < FOLDED_FROM:
        return handlers, ()
    return [one for one in handlers if one not in well], well


def without_messages(found: Overview) -> Overview:
    """Return the overview without error messages, which may quote payloads."""
    findings = tuple(map(_without_message, found.findings))
    verdict = [finding.text for finding in findings] or found.verdict
    return replace(found, findings=findings, verdict=verdict)


_BEFORE_MESSAGES = {"circuit_open": "` has been open for ", "failing_long": " been failing for "}


def _without_message(finding: Finding) -> Finding:
    if finding.rule == "operation_failed":
        return replace(finding, text="Operation failed.")
    if (separator := _BEFORE_MESSAGES.get(finding.rule)) is not None:
        name, verb, rest = finding.text.partition(separator)
        return replace(finding, text=f"{name}{verb}{rest.partition(': ')[0]}.")
    if finding.rule == "handler_failing":
        name = f"`{finding.handler}`"
    elif finding.rule == "job_failing":
        name = f"Job `{finding.job}`"
    else:
        return finding
    figures, _, _ = finding.text.removeprefix(name).partition(":")
    return replace(finding, text=f"{name}{figures.rstrip('.')}.")


def _only_types(needs: Needs) -> Needs:
    groups = [
        replace(
            group, fingerprint=group.fingerprint.partition(":")[0], sample="", filter=replace(group.filter, error=None)
        )
        for group in needs.groups
    ]
    return replace(needs, groups=groups)


async def _history(request: PageRequest) -> HandlerHistory | None:
    """Read the history; ``None`` if the database does not respond, which the findings report."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await request.admin.history()
    except Exception:
        return None


async def _needs(request: PageRequest) -> Needs:
    """Read what needs attention, or why it could not be read."""
    since = utc_now() - _DAY
    try:
        async with asyncio.timeout(PATIENCE):
            groups, keys = await asyncio.gather(
                request.admin.groups(Filter(since=since), limit=_GROUPED), request.admin.keys(limit=MAX_NEEDS)
            )
    except TimeoutError:
        return Needs(error=f"The queries took longer than {PATIENCE:.0f} s.")
    except OutboxError as error:
        return Needs(error=str(error))
    except Exception as error:  # of the driver, if a table or an index is missing; the findings report it
        return Needs(error=f"{type(error).__name__}: {error}")
    return Needs(groups=groups[:MAX_NEEDS], grouped_over=str(groups), keys=keys)
