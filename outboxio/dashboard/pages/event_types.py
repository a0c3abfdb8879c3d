"""The event types in the code of this process, in the newest rows, and of all handlers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.catalogue.event_types import EventType, event_types
from outboxio.catalogue.fields import Field, fields_of
from outboxio.dashboard.filters import refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, in_time
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import Refused, View
from outboxio.health.values import HandlerStatus

# pyright: reportPrivateUsage=false


class EventTypesFacts(Struct, frozen=True):
    """The facts of the page."""

    types: list[EventType]
    has_emitters: bool
    """False if the newest events could not be read in time."""


async def all_event_types(request: PageRequest) -> View:
    """Show the event types by name."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    facts = await _facts(request)
    return View(template="event_types.html", title="Event types", facts=facts, refreshes=False)


class EventTypeFacts(Struct, frozen=True):
    """The facts of the page."""

    type: EventType
    fields: list[Field]
    example: str | None
    """The first example, as indented JSON."""


async def event_type(request: PageRequest) -> View:
    """Show the event type with this name or alias."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    name = request.path["name"]
    types = (await _facts(request)).types
    found = next((one for one in types if name == one.name or name in one.aliases), None)
    if found is None:
        raise Refused(404, f"There is no event type {name!r}.", "The page Event types lists all event types.")
    example = msgspec.json.format(msgspec.json.encode(found.examples[0]), indent=2) if found.examples else None
    facts = EventTypeFacts(
        type=found,
        fields=[] if found.schema is None else fields_of(found.schema),
        example=None if example is None else example.decode(),
    )
    return View(template="event_type.html", title=found.name, facts=facts, refreshes=False)


async def _facts(request: PageRequest) -> EventTypesFacts:
    emitted_by = await in_time(request.admin.emitters(shard=request.shard))
    outbox = request.outbox
    known = event_types(outbox._handlers, outbox._types, outbox.namespace, emitted_by or {})
    handlers = (await request.admin.overview()).handlers
    return EventTypesFacts(_with_others(known, handlers, emitted_by or {}), emitted_by is not None)


def _with_others(
    known: Iterable[EventType], handlers: Iterable[HandlerStatus], emitted_by: Mapping[str, Iterable[str]]
) -> list[EventType]:
    """Add the handlers of all processes, and event types that the code of this process does not have."""
    types = {one.name: one for one in known}
    names = {name: one.name for one in types.values() for name in (one.name, *one.aliases)}
    for name, actions in emitted_by.items():
        if name not in names:
            names[name], types[name] = name, EventType(name=name, emitted_by=tuple(actions))
    for handler in handlers:
        for name in handler.event_types:
            one = types.get(names.setdefault(name, name), EventType(name=name))
            taken = {*one.handlers, *(relay.handler for relay in one.relays)}
            if handler.handler_name not in taken:
                one = replace(one, handlers=tuple(sorted((*one.handlers, handler.handler_name))))
            types[one.name] = one
    return sorted(types.values(), key=lambda one: one.name)
