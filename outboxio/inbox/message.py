"""Messages: the parts of an inbox message as the application gives them, checked before any row is written."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any, TypedDict, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import InvalidEvent
from outboxio.model.emitter import Emitter
from outboxio.model.event import EventRecord, checked_name
from outboxio.payloads.classes import AnyEvent
from outboxio.payloads.versions import checked_version, header_of
from outboxio.support.codec import decode_given, encode_object
from outboxio.support.text import briefly


class MessageParts(TypedDict, total=False):
    """The parts of a message, as keywords of ``consume``."""

    source: str
    external_id: str
    event: AnyEvent | None
    type: str | None
    payload: object
    version: int
    topic: str | None
    ordering_key: object
    headers: Mapping[str, Any] | None
    correlation_id: str | None
    available_at: datetime | None


class Given(Struct, frozen=True, kw_only=True):
    """The parts of a message as the application gives them."""

    source: str = ""
    external_id: str = ""
    event: AnyEvent | None = None
    type: str | None = None
    payload: object = None
    version: int = 1
    topic: str | None = None
    ordering_key: object = None
    headers: Mapping[str, Any] | None = None
    correlation_id: str | None = None
    available_at: datetime | None = None

    @property
    def params(self) -> dict[str, str]:
        """The parameters of the action that receives the message."""
        return {"source": self.source, "external_id": self.external_id}

    def checked(self, emitter: Emitter) -> EventRecord:
        """The record of the event; :class:`InvalidEvent` if a part cannot be stored."""
        checked_name(self.source, "source")
        external_id = checked_name(self.external_id, f"external_id of {self.source!r}")
        subject = f"what {self.source!r} delivered as {external_id!r}"
        record = self._record(emitter, subject)
        routing = emitter.routing(
            subject, ordering_key=self.ordering_key, topic=self.topic, available_at=self.available_at
        )
        return replace(record, **routing)

    def _record(self, emitter: Emitter, subject: str) -> EventRecord:
        event, payload = self.event, self.payload
        if (event is None) == (self.type is None) or (event is not None and payload is not None):
            raise InvalidEvent(subject, "give either event=, or type= and payload=")
        version = checked_version(self.version, f"version of {subject}")
        if event is not None:
            if version != 1:
                raise InvalidEvent(subject, "give version= with type= and payload=; the class of event= has a version")
            return emitter.record(event)
        return EventRecord(
            id=emitter.new_id(),
            event_type=checked_name(self.type, f"type of {subject}"),
            payload=encode_object(
                _decoded(payload, subject),
                f"payload of {subject}",
                stores_nul=emitter.stores_nul,
                check=emitter.check_numbers,
            ),
            headers=header_of(version),
        )


def parts_of(message: object) -> dict[str, Any]:
    """The parts of a message that is given as a mapping or an object."""
    if message is None:
        return {}
    if isinstance(message, Mapping):
        given = dict(cast(Mapping[str, Any], message))
        for key in given.keys() - MessageParts.__annotations__.keys():
            parts = ", ".join(MessageParts.__annotations__)
            raise InvalidEvent("the message", f"it has {briefly(key)}, which is no part of one; there is {parts}")
        return given
    return {part: getattr(message, part) for part in MessageParts.__annotations__ if hasattr(message, part)}


def hash_of(event: EventRecord) -> str:
    """The hash of type and content. The order of keys and white space do not count."""
    content = msgspec.json.decode(event.payload or "null")
    return sha256(msgspec.json.encode([event.event_type, content], order="deterministic")).hexdigest()


def _decoded(payload: object, subject: str) -> object:
    """The payload, decoded if it is JSON text or bytes: so a value that cannot be stored is found."""
    if not isinstance(payload, str | bytes | bytearray):
        return payload
    return decode_given(payload, f"payload of {subject}")
