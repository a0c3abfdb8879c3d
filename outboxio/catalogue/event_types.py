"""The event types of an outbox, with schema, examples, versions, handlers and relays."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from outboxio.catalogue.schemas import Schema, examples_of, schema_of
from outboxio.handlers.handler import Handler
from outboxio.model.event import EventTypes, type_name, type_names, upcasters_of, version_of
from outboxio.model.payloads.classes import AnyEvent


class Relaying(Struct, frozen=True):
    """A relay of an event type."""

    handler: str
    address: str | None
    """The topic, subject, routing key or stream; ``None`` if it depends on the event."""


class EventType(Struct, frozen=True, kw_only=True):
    """An event type of an outbox, according to the code in this process."""

    name: str
    aliases: tuple[str, ...] = ()
    version: int = 1
    upcasts: tuple[int, ...] = ()
    """The versions that have an upcaster."""
    description: str | None = None
    schema: Schema | None = None
    """The JSON Schema of the version; ``None`` if this process has no class for the type."""
    examples: tuple[dict[str, Any], ...] = ()
    handlers: tuple[str, ...] = ()
    relays: tuple[Relaying, ...] = ()
    emitted_by: tuple[str, ...] = ()
    """The actions that are known to have emitted such events."""


def classes_of(handlers: Iterable[Handler], types: EventTypes) -> dict[str, type[AnyEvent]]:
    """Return the event classes of the handlers and the registered ones, by type name."""
    known = {cls for handler in handlers for cls in handler.accepts()} | set(types)
    return {type_name(cls): cls for cls in sorted(known, key=lambda cls: (cls.__module__, cls.__qualname__))}


def is_internal(name: str) -> bool:
    """Return True for an event type or topic that only outboxio uses, as for webhook deliveries."""
    return name.startswith("outboxio.")


def published(types: Iterable[EventType]) -> list[EventType]:
    """Return the event types except internal ones."""
    return [one for one in types if not is_internal(one.name)]


def event_types(
    handlers: Iterable[Handler], types: EventTypes, namespace: str, emitted_by: Mapping[str, Iterable[str]]
) -> list[EventType]:
    """Return the event types sorted by name: those with a class, and those that handlers refer to by stored name."""
    registry = list(handlers)
    classes = classes_of(registry, types)
    stored = {name: cls for cls in classes.values() for name in type_names(cls)}
    wanted: dict[str, list[Handler]] = {name: [] for name in classes}
    for handler in registry:
        names = {*map(type_name, handler.accepts()), *handler.type_names}
        for name in {type_name(stored[name]) if name in stored else name for name in names}:
            wanted.setdefault(name, []).append(handler)
    return [_described(name, classes.get(name), wanted[name], namespace, emitted_by) for name in sorted(wanted)]


def _described(
    name: str,
    cls: Any,
    handlers: Iterable[Handler],
    namespace: str,
    emitted_by: Mapping[str, Iterable[str]],
) -> EventType:
    names = {name} if cls is None else type_names(cls)
    relays, plain = list[Relaying](), list[str]()
    for handler in handlers:
        if handler.options.relay:
            relays.append(Relaying(handler.name, _address(handler, name, namespace)))
        else:
            plain.append(handler.name)
    found = EventType(
        name=name, handlers=tuple(sorted(plain)), relays=tuple(sorted(relays, key=lambda relay: relay.handler)),
        emitted_by=tuple(sorted({action for one in names for action in emitted_by.get(one, ())})),
    )  # fmt: skip
    if cls is None:
        return found
    schema = schema_of(cls)
    return replace(
        found, aliases=tuple(sorted(names - {name})), version=version_of(cls), upcasts=tuple(sorted(upcasters_of(cls))),
        description=_docstring(cls), schema=schema,
        examples=tuple(examples_of(cls, schema)),
    )  # fmt: skip


def _docstring(cls: type[Any]) -> str | None:
    """Return the docstring of the class itself, not of a base class."""
    text: str | None = cls.__dict__.get("__doc__")
    return inspect.cleandoc(text) if text else None


def _address(handler: Handler, event_type: str, namespace: str) -> str | None:
    """Return the address of a relay, from the object whose method is the handler."""
    address_of = getattr(getattr(handler.given, "__self__", None), "address_of", None)
    return None if address_of is None else address_of(event_type, namespace)
