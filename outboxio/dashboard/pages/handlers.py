"""All handlers, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS
from outboxio.dashboard.view import View
from outboxio.operations.overview.values import Finding, HandlerStatus


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
    overview = await asked.admin.overview()
    part = asked.query.get("name", "").lower()
    chosen = tuple(one for one in overview.handlers if part in one.handler_name.lower())
    facts = HandlersFacts(
        handlers=chosen,
        findings=findings_of(overview.findings, chosen),
        of=len(overview.handlers),
        read_date=overview.read_date,
    )
    return View(template="handlers.html", title="Handlers", facts=facts)


def findings_of(findings: Sequence[Finding], handlers: Sequence[HandlerStatus]) -> tuple[Finding, ...]:
    """The findings about handlers."""
    names = {handler.handler_name for handler in handlers}
    return tuple(finding for finding in findings if finding.handler in names)
