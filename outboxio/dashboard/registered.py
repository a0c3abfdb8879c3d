"""The handlers of the code of this process, with their options."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from outboxio.handlers.described import DEFAULT_OPTIONS, changed
from outboxio.outbox import Outbox

# pyright: reportPrivateUsage=false


class Registered(Struct, frozen=True, kw_only=True):
    """A handler, as the code of this process has registered the handler."""

    where: str
    """The place in the code."""
    delivery: str
    ordered: bool
    event_types: list[str]
    topic: str | None
    options: dict[str, Any]
    """The further options that are not the defaults."""


def registered(outbox: Outbox, name: str) -> Registered | None:
    """The handler with this name; ``None`` if this process does not have its code."""
    handler = outbox._handlers.find(name)
    if handler is None:
        return None
    options = changed(handler.options, DEFAULT_OPTIONS)
    return Registered(
        where=handler.where,
        delivery=str(handler.options.delivery),
        ordered=handler.options.ordered,
        event_types=handler.wanted_names,
        topic=handler.topic,
        options={name: value for name, value in options.items() if name not in ("delivery", "ordered")},
    )
