"""The overview: whether anything is wrong, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.view import PATIENCE, View
from outboxio.errors import OutboxError
from outboxio.health.rules import RULES
from outboxio.health.values import Finding, HandlerStatus, KeyStatus, Overview
from outboxio.model.operating.groups import Filter, Group, HandlerHistory
from outboxio.operations.queries.filters import query_of
from outboxio.support.clock import utc_now

FOLDED_FROM = 4
"""Handlers in order, from this number on, are folded below the handlers with a finding."""

MOST_NEEDS = 5
_GROUPED = 200  # the newest failures, among which the overview shows the largest groups
_DAY = timedelta(days=1)


class Needs(Struct, frozen=True):
    """What needs a person, besides the findings."""

    groups: Sequence[Group] = ()
    """Failures of the last 24 hours, grouped by error: the largest groups."""
    grouped_over: str = ""
    """The number of failures that the groups were made of, in words."""
    keys: Sequence[KeyStatus] = ()
    """The longest parked keys."""
    error: str | None = None
    """Why the rest could not be read."""


class OverviewFacts(Struct, frozen=True):
    """The facts of the page."""

    overview: Overview
    needs: Needs
    history: HandlerHistory | None
    """The runs of all handlers within the last hour, by minute; ``None`` if they could not be read within 2 s."""


async def overview(asked: Asked) -> View:
    """The verdict, six figures, the handlers worst first, what needs a person, instances and shards."""
    found, needs, history = await asyncio.gather(
        asked.admin.overview(), asked.lately("needs", lambda: _needs(asked)),
        asked.lately("history", lambda: _history(asked)),
    )  # fmt: skip
    if not asked.access.may("payloads"):
        found, needs = without_messages(found), _only_types(needs)
    shown, folded = parted(found.handlers)
    links = {finding: fixed_at(finding, asked) for finding in found.findings}
    like = [asked.url("notifications", **query_of(group.filter)) for group in needs.groups]
    return View(
        template="overview.html",
        title="Overview",
        facts=OverviewFacts(found, needs, history),
        shown={"links": links, "like": like, "handlers": shown, "folded": folded},
    )


_PAGES = {rule.name: rule.see for rule in RULES}
_OF_HANDLERS = ("dead", "keys", "notifications")  # pages with a filter by handler


def fixed_at(finding: Finding, asked: Asked) -> tuple[str, str] | None:
    """The address at which a finding is fixed, and the words of the link."""
    see = ("jobs", "Jobs") if finding.job is not None else _PAGES.get(finding.rule)
    if see is None or not asked.has(see[0]):
        return None
    page, words = see
    if page == "handler":
        return (asked.url("handler", name=finding.handler), words) if finding.handler else None
    return asked.url(page, handler=finding.handler if page in _OF_HANDLERS else None), words


def parted(handlers: Sequence[HandlerStatus]) -> tuple[Sequence[HandlerStatus], Sequence[HandlerStatus]]:
    """The handlers that are shown, and the handlers in order that are folded."""
    well = [one for one in handlers if one.level == "ok" and not one.paused_since and not one.dead_hour]
    if len(well) == len(handlers) or len(well) < FOLDED_FROM:
        return handlers, ()
    return [one for one in handlers if one not in well], well


def without_messages(found: Overview) -> Overview:
    """The overview without the messages of errors, which may quote a payload."""
    findings = tuple(map(_without_message, found.findings))
    verdict = [finding.text for finding in findings] or found.verdict
    return replace(found, findings=findings, verdict=verdict)


_BEFORE_MESSAGES = {"handler_resting": "` has rested for ", "failing_long": " failing, for "}


def _without_message(finding: Finding) -> Finding:
    if finding.rule == "operation_failed":
        return replace(finding, text="An order has failed.")
    if (words := _BEFORE_MESSAGES.get(finding.rule)) is not None:
        name, verb, rest = finding.text.partition(words)
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


async def _history(asked: Asked) -> HandlerHistory | None:
    """The overview is shown without the chart, if the database does not answer: the findings say so."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await asked.admin.history()
    except Exception:
        return None


async def _needs(asked: Asked) -> Needs:
    """The overview is shown without these facts, if the database does not answer."""
    since = utc_now() - _DAY
    try:
        async with asyncio.timeout(PATIENCE):
            groups, keys = await asyncio.gather(
                asked.admin.groups(Filter(since=since), limit=_GROUPED), asked.admin.keys(limit=MOST_NEEDS)
            )
    except TimeoutError:
        return Needs(error=f"The questions took longer than {PATIENCE:.0f} s.")
    except OutboxError as error:
        return Needs(error=str(error))
    except Exception as error:  # of the driver, if a table or an index is missing: the verdict says what is wrong
        return Needs(error=f"{type(error).__name__}: {error}")
    return Needs(groups=groups[:MOST_NEEDS], grouped_over=str(groups), keys=keys)
