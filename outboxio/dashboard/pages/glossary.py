"""The glossary: all words of the dashboard."""

from __future__ import annotations

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.showing.words import STATES, TERMS
from outboxio.dashboard.view import View


async def glossary(asked: Asked) -> View:
    """The states and terms, each with its sentence."""
    return View(template="glossary.html", title="Glossary", facts={"states": STATES, "terms": TERMS}, refreshes=False)
