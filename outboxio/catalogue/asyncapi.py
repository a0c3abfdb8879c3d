"""The event types of an outbox as an AsyncAPI 3.0 document.

Each event type has a channel with a message per version, and a ``receive`` operation for each handler. Each relay of an
event type has a channel with the relay's address, and a ``send`` operation. Fields that AsyncAPI does not define have
names that begin with ``x-outboxio-``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outboxio.catalogue.event_types import EventType
from outboxio.catalogue.lock import LockedVersion
from outboxio.catalogue.schemas import Schema, as_schema
from outboxio.support.codec import is_list, is_object

_Object = dict[str, Any]
_DEFS = "#/$defs/"


def document_of(
    types: Iterable[EventType],
    *,
    namespace: str,
    version: str,
    topics: Mapping[str, Sequence[str]],
    older: Mapping[str, Mapping[int, LockedVersion]],
) -> _Object:
    """Return the document. ``topics``: handlers of topics, by topic. ``older``: the versions in a lock file."""
    document = _Document()
    for one in types:
        document.add(one, older.get(one.name, {}))
    for topic, handlers in topics.items():
        document.add_topic(topic, handlers)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": namespace, "version": version,
            "description": f"The events of the outbox {namespace}, with their handlers and relays.",
        },
        "defaultContentType": "application/json",
        "channels": document.channels, "operations": document.operations,
        "components": {"messages": document.messages, "schemas": document.schemas},
    }  # fmt: skip


class _Document:
    """The parts of the document, by key. Keys contain only characters that AsyncAPI allows in keys."""

    def __init__(self) -> None:
        self.channels: dict[str, _Object] = {}
        self.operations: dict[str, _Object] = {}
        self.messages: dict[str, _Object] = {}
        self.schemas: dict[str, Any] = {}

    def add(self, one: EventType, older: Mapping[int, LockedVersion]) -> None:
        versions = {number: locked for number, locked in older.items() if number < one.version}
        versions[one.version] = LockedVersion(one.schema, list(one.examples))
        keys = [self._message(one, number, versions[number]) for number in sorted(versions)]
        channel = self._channel(one.name, one.name, keys)
        self.channels[channel] |= _described(one) | {
            "x-outboxio-aliases": list(one.aliases), "x-outboxio-emitted-by": list(one.emitted_by),
        }  # fmt: skip
        for handler in one.handlers:
            self._operation("receive", handler, one.name, channel, keys)
        for relay in one.relays:
            sent = self._channel(f"{relay.handler}.{one.name}", relay.address, keys)
            self._operation("send", relay.handler, one.name, sent, keys)

    def add_topic(self, topic: str, handlers: Sequence[str]) -> None:
        channel = self._channel(f"topic.{topic}", topic, ())
        self.channels[channel]["description"] = "All events that are emitted on this topic."
        for handler in handlers:
            self._operation("receive", handler, f"topic.{topic}", channel, ())

    def _channel(self, name: str, address: str | None, messages: Sequence[str]) -> str:
        key = _free(name, self.channels)
        fields = re.findall(r"\{(\w+)\}", address or "")
        self.channels[key] = {
            "address": address,
            "messages": {one: {"$ref": f"#/components/messages/{one}"} for one in messages},
            **({"parameters": {field: {"description": f"The {field} of the event."} for field in fields}}
               if fields else {}),
        }  # fmt: skip
        return key

    def _operation(self, action: str, handler: str, name: str, channel: str, messages: Sequence[str]) -> None:
        key = _free(f"{action}.{handler}.{name}", self.operations)
        self.operations[key] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
            **({"messages": [{"$ref": f"#/channels/{channel}/messages/{one}"} for one in messages]}
               if messages else {}),
            "x-outboxio-handler": handler,
        }  # fmt: skip

    def _message(self, one: EventType, version: int, locked: LockedVersion) -> str:
        key = _free(f"{one.name}.v{version}", self.messages)
        self.messages[key] = {
            "name": one.name, "title": f"{one.name}, version {version}", "contentType": "application/json",
            "payload": self._payload(key, locked.schema), "x-outboxio-version": version,
            **({"examples": [{"payload": each} for each in locked.examples]} if locked.examples else {}),
        } | _described(one)  # fmt: skip
        return key

    def _payload(self, key: str, schema: Schema | None) -> _Object:
        if schema is None:
            return {"type": "object"}
        names = {name: f"{key}.{_sanitized(name)}" for name in schema.get("$defs", {})}
        main = {name: value for name, value in schema.items() if name != "$defs"}
        for name, part in ((key, main), *((names[name], part) for name, part in schema.get("$defs", {}).items())):
            self.schemas[name] = _rewritten(part, names)
        return {"$ref": f"#/components/schemas/{key}"}


def _described(one: EventType) -> _Object:
    return {} if one.description is None else {"description": one.description}


def _rewritten(node: Any, names: Mapping[str, str]) -> Any:
    """Convert a schema to AsyncAPI: references to components, tuples as in draft 7, no mapped discriminator."""
    if is_list(node):
        return [_rewritten(each, names) for each in node]
    if not is_object(node):
        return node
    found = {key: _rewritten(value, names) for key, value in node.items()}
    if isinstance(reference := found.get("$ref"), str) and (name := names.get(reference.removeprefix(_DEFS))):
        found["$ref"] = f"#/components/schemas/{name}"
    if isinstance(as_schema(found.get("discriminator")).get("propertyName"), str):
        del found["discriminator"]
    if isinstance(found.get("prefixItems"), list):
        found["additionalItems"] = found.pop("items", True)
        found["items"] = found.pop("prefixItems")
    return found


def _sanitized(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return a free key for a name. A number is added if names differ only in characters that are not allowed."""
    key = _sanitized(name)
    return key if key not in taken else next(each for n in range(2, 10_000) if (each := f"{key}-{n}") not in taken)
