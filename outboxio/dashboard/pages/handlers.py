"""All handlers, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS
from outboxio.dashboard.pages.overview import mended_at, without_messages
from outboxio.dashboard.view import View
from outboxio.operations.overview.values import Finding, HandlerStatus, Overview


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
    links = {finding: mended_at(finding, asked) for finding in findings}
    here = asked.here().partition("?")[0]
    return {finding: None if link is None or link[0] == here else link for finding, link in links.items()}


def findings_of(findings: Sequence[Finding], handlers: Sequence[HandlerStatus]) -> tuple[Finding, ...]:
    """The findings about handlers."""
    names = {handler.handler_name for handler in handlers}
    return tuple(finding for finding in findings if finding.handler in names)
