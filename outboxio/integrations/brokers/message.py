"""The message that a relay sends for an event: the same values for every broker, and nothing is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

from outboxio.model.envelope import EventEnvelope

VERSION = "eventversion"
"""The attribute for the version of the event's class. An event of version 1 has no such attribute."""


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """An event as a relay sends it. The names are those of CloudEvents 1.0.

    ``id`` is the event's id, and so the same for every attempt; readers and brokers remove duplicates by ``id`` and
    ``source``. ``source`` is ``/<namespace>``. ``subject`` is the ``model_id``. Messages with the same ``key`` keep
    their order, as far as the broker keeps an order: the ordering key, else the ``model_id``, else the event's id. A
    relay without ``ordered=True`` does not know the ordering key.
    ``time`` is naive UTC. ``data`` is the stored JSON of the event. ``attributes`` has these names, if the event has
    such values: ``partitionkey``, ``correlationid``, ``causationid``, ``modeltype``, ``eventversion``,
    ``traceparent``, ``tracestate``.
    """

    id: str
    type: str
    source: str
    subject: str | None
    key: str
    time: datetime
    data: bytes
    attributes: Mapping[str, str]

    @property
    def namespace(self) -> str:
        return self.source[1:]

    @property
    def model_type(self) -> str | None:
        return self.attributes.get("modeltype")


def message_of(envelope: EventEnvelope[Any]) -> Message:
    """The message for an event.

    Example::

        message = message_of(envelope)
        await client.publish(message.type, message.data)
    """
    event_id = str(envelope.event_id)
    subject = envelope.model_id
    key = envelope.ordering_key or subject
    attributes: dict[str, str] = {}
    if key is not None:
        attributes["partitionkey"] = key
    if (correlation_id := envelope.correlation_id) is not None:
        attributes["correlationid"] = correlation_id
    if (causation_id := envelope.causation_id) is not None:
        attributes["causationid"] = str(causation_id)
    if (model_type := envelope.model_type) is not None:
        attributes["modeltype"] = model_type
    if envelope.has_headers:
        if (version := envelope.event_version) != 1:
            attributes[VERSION] = str(version)
        trace = envelope.trace_headers
        for name in ("traceparent", "tracestate"):
            if name in trace:
                attributes[name] = trace[name]
    return Message(
        id=event_id,
        type=envelope.event_type,
        source=f"/{envelope.namespace}",
        subject=subject,
        key=key or event_id,
        time=envelope.event_date,
        data=envelope.payload,
        attributes=attributes,
    )
