"""The URL of each page, with rows of the busy shop as parameters."""

from __future__ import annotations

import re

from outboxio import Outbox
from outboxio.dashboard.pages import PAGES
from tests.kit.site import Site

NAMES = [route.name for route in PAGES if "{" not in route.path] + [
    route.name for route in PAGES if route.name in ("handler", "event", "event_type", "action", "operation")
]


def address(site: Site, name: str) -> str:
    """The path of a page below the mount."""
    path = next(route.path for route in PAGES if route.name == name)
    parameters = site.run(lambda outbox: _parameters(outbox, name))
    return re.sub(r"\{(\w+)[^}]*\}", lambda match: str(parameters[match[1]]), path).lstrip("/")


async def _parameters(outbox: Outbox, name: str) -> dict[str, object]:
    if name == "handler":
        return {"name": "invoice-pdf"}
    if name == "event_type":
        return {"name": "OrderPlaced"}
    if name == "operation":
        return {"id": (await outbox.admin.operations(limit=1))[0].id}
    if name in ("event", "action"):
        [dead] = await outbox.admin.list(state="DEAD", handler="invoice-pdf", limit=1)
        return {"id": dead.event_id if name == "event" else dead.action_id}
    return {}
