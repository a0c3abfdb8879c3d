"""The layouts of messages on the wire: CloudEvents in binary mode, CloudEvents as one JSON document, and Debezium's.

A layout is a function from a :class:`~outboxio.integrations.brokers.message.Message` to a :class:`Wire`. Brokers differ
in the prefix of the attributes' names, and in the characters that a header may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.integrations.brokers.message import Message
from outboxio.support.text import briefly

JSON: Final = "application/json"
CLOUDEVENTS_JSON: Final = "application/cloudevents+json"
FORMATS: Final = ("cloudevents", "structured", "debezium")
"""The values of ``format=``."""


class Wire(Struct, frozen=True, gc=False):
    """A message as a broker carries it.

    ``destination`` is the topic, subject or stream that the layout asks for; ``None`` leaves the choice to the relay.
    """

    headers: dict[str, str]
    body: bytes
    content_type: str = JSON
    destination: str | None = None


Encode = Callable[[Message], Wire]
"""Makes the wire form of a message. Raises :class:`~outboxio.Unprocessable` if the layout cannot hold the message."""

Escape = Callable[[str], str]


def wire_format(name: str, *, prefix: str, escape: Escape = str, fit: Escape = str) -> Encode:
    """The layout of a name; :class:`ConfigurationError` for an unknown name.

    ``prefix`` goes before the attributes of CloudEvents in binary mode. ``escape`` makes a value fit for a header,
    and ``fit`` for a part of a destination.
    """
    if name == "cloudevents":
        return _binary(prefix, escape)
    if name == "structured":
        return _structured
    if name == "debezium":
        return _debezium(escape, fit)
    known = ", ".join(map(repr, FORMATS))
    raise ConfigurationError(f"format is {briefly(name)}; expected one of {known}")


def percent_encoded(value: str) -> str:
    """A value for a header that takes visible ASCII only, encoded as the HTTP binding of CloudEvents says."""
    return value if _is_plain(value) else _ODD.sub(_as_percents, value)


_is_plain = re.compile(r"[!#$&-~]*\Z").match  # without the space, ", %, and all beyond ~
_ODD = re.compile(r"[^!#$&-~]")


def _as_percents(odd: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in odd[0].encode())


def rfc3339(moment: datetime) -> str:
    """A moment in naive UTC, as in ``2026-01-31T12:00:00.000000Z``."""
    return f"{moment.isoformat()}Z"


def _binary(prefix: str, escape: Escape) -> Encode:
    spec, id, type, source, time, subject = (
        prefix + name for name in ("specversion", "id", "type", "source", "time", "subject")
    )

    def encode(message: Message) -> Wire:
        headers = {
            spec: "1.0",
            id: message.id,
            type: escape(message.type),
            source: escape(message.source),
            time: rfc3339(message.time),
        }
        if message.subject is not None:
            headers[subject] = escape(message.subject)
        for name, value in message.attributes.items():
            headers[prefix + name] = escape(value)
        return Wire(headers, message.data)

    return encode


def _structured(message: Message) -> Wire:
    document: dict[str, Any] = {
        "specversion": "1.0",
        "id": message.id,
        "type": message.type,
        "source": message.source,
        "time": rfc3339(message.time),
        "datacontenttype": JSON,
        **message.attributes,
        "data": msgspec.Raw(message.data),
    }
    if message.subject is not None:
        document["subject"] = message.subject
    return Wire({}, msgspec.json.encode(document), CLOUDEVENTS_JSON)


def _debezium(escape: Escape, fit: Escape) -> Encode:
    def encode(message: Message) -> Wire:
        if message.model_type is None:
            raise Unprocessable(
                f"event {message.id} of type {message.type!r} has no model type, and format='debezium' names the "
                "destination by the model type: emit the event with model= or model_type=, or choose another format"
            )
        headers = {"id": message.id, "ce_type": escape(message.type), "ce_source": escape(message.namespace)}
        for header, attribute in (("correlation_id", "correlationid"), ("causation_id", "causationid")):
            if attribute in message.attributes:
                headers[header] = escape(message.attributes[attribute])
        return Wire(headers, message.data, JSON, f"outbox.event.{fit(message.model_type)}")

    return encode
