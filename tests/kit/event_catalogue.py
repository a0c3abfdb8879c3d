"""The event types of classes, as an outbox with these classes describes them."""

from __future__ import annotations

from typing import Any

from outboxio.catalogue.event_types import EventType, classes_of, event_types
from outboxio.model.event import EventTypes


def types_of(*classes: Any) -> tuple[list[EventType], dict[str, Any]]:
    known = EventTypes()
    for cls in classes:
        known.register(cls)
    return event_types([], known, "shop", {}), classes_of([], known)
