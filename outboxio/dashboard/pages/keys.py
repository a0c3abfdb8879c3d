"""Parked ordering keys."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, handler_names
from outboxio.dashboard.view import View
from outboxio.operations.overview.values import KeyStatus

MOST = 200


class KeysFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    keys: list[KeyStatus]
    """The longest parked first."""
    is_all: bool
    """False if there are more keys, or may be."""


async def keys(asked: Asked) -> View:
    """The parked keys of all handlers, or of one handler."""
    refuse_unknown_words(asked.query, ["handler", *OTHER_WORDS])
    name = asked.query.get("handler")
    found = list(await asked.admin.keys(name, limit=MOST + 1, shard=asked.shard))
    field: dict[str, Any] = {
        "name": "handler", "label": "Handler", "value": name, "options": await handler_names(asked, name),
    }  # fmt: skip
    facts = KeysFacts(keys=found[:MOST], is_all=len(found) <= MOST)
    return View(template="keys.html", title="Parked keys", facts=facts, shown={"around": [field]})
