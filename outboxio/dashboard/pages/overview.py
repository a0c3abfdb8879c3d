"""The overview: whether anything is wrong, and what to do."""

from __future__ import annotations

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.view import View


async def overview(asked: Asked) -> View:
    """The verdict, six figures, the handlers worst first, what needs a person, instances and shards."""
    found = await asked.admin.overview()
    return View(template="overview.html", title="Overview", facts=found)
