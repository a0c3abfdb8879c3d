"""Messages of a broker as the inbox takes them: CloudEvents in either mode, Debezium's layout, or plain JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from outboxio.errors import InvalidEvent
from outboxio.integrations.brokers.message import VERSION
from outboxio.support.text import briefly

_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")
_TRACE = ("traceparent", "tracestate")
_OF_DEBEZIUM = {"id": "id", "source": "ce_source", "type": "ce_type", "correlationid": "correlation_id"}
"""The attributes of CloudEvents, with the headers that Debezium's layout has for them."""


class Incoming(Struct, kw_only=True):
    """A message of a broker.

    ``payload`` is JSON text. ``key`` is the ordering key. ``headers`` are the headers of the trace. ``raw`` is the
    message of the client, with which the inbox acknowledges. ``flaw`` is set if the message can never be stored; then
    the other parts have no meaning.
    """

    id: str = ""
    source: str = ""
    type: str = ""
    payload: bytes = b""
    version: int = 1
    key: str | None = None
    correlation_id: str | None = None
    headers: Mapping[str, str] | None = None
    place: str = ""
    """The place of the message in the broker, for the log."""
    raw: Any = None
    flaw: InvalidEvent | None = None

    def parts(self, topic: str | None) -> dict[str, Any]:
        """The keywords of ``outbox.inbox.receive``."""
        return {
            "source": self.source,
            "external_id": self.id,
            "type": self.type,
            "payload": self.payload,
            "version": self.version,
            "topic": topic,
            "ordering_key": self.key,
            "headers": self.headers,
            "correlation_id": self.correlation_id,
        }


class Fallback(Struct, frozen=True, kw_only=True):
    """The parts of a message that names none: ``id`` is the message's place in the broker, such as a number."""

    id: str
    source: str
    type: str | None = None


_Name = Annotated[str, msgspec.Meta(min_length=1)]


class _Document(Struct, kw_only=True):
    """A CloudEvent as one JSON document. Attributes without a meaning for the inbox are left out."""

    id: _Name
    source: _Name
    type: _Name
    data: msgspec.Raw = msgspec.Raw(b"")
    data_base64: str | None = None
    partitionkey: str | None = None
    correlationid: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    eventversion: str | int | None = None


_decode_document = msgspec.json.Decoder(_Document).decode


def incoming_of(
    headers: Mapping[str, str] | None,
    body: bytes,
    *,
    fallback: Fallback,
    content_type: str | None = None,
    key: str | None = None,
    escaped: bool = False,
    raw: Any = None,
) -> Incoming:
    """Read a message. A message that can never be stored has a ``flaw``; nothing is raised.

    ``content_type`` is the content type as the broker tells it, if not in a header. ``key`` is the key of the broker's
    record; without one the attribute ``partitionkey`` counts. ``escaped``: header values are percent-encoded.

    Example::

        incoming = incoming_of(message.headers, message.data, fallback=Fallback(id="7", source="nats:WALLETS"))
    """
    named = {name.lower(): value for name, value in headers.items()} if headers else {}
    kind = content_type or named.get("content-type") or ""
    try:
        if kind.startswith("application/cloudevents"):
            attributes, body = _document(kind, body)
        else:
            attributes = _attributes(named, escaped=escaped)
        found = _event(attributes, body, fallback)
    except InvalidEvent as error:
        return Incoming(place=fallback.id, raw=raw, flaw=error)
    found.place = fallback.id
    found.raw = raw
    if key is not None:
        found.key = key
    return found


def _attributes(headers: Mapping[str, str], *, escaped: bool) -> dict[str, Any]:
    """The attributes that headers have, in one of the layouts; of plain JSON the trace alone."""
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}id" in headers), None)
    if prefix is not None:
        start = len(prefix)
        found = {name[start:]: value for name, value in headers.items() if name.startswith(prefix)}
    elif "id" in headers:
        found = {attribute: headers[name] for attribute, name in _OF_DEBEZIUM.items() if name in headers}
        found["type"] = found.get("type") or headers.get("eventtype", "")
    else:
        return {name: headers[name] for name in _TRACE if name in headers}
    return {name: unquote(value) if "%" in value else value for name, value in found.items()} if escaped else found


def _document(kind: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """The attributes and the data of a CloudEvent in JSON."""
    if "json" not in kind:
        raise InvalidEvent("the message", f"its content type is {briefly(kind)}; expected application/cloudevents+json")
    try:
        document = _decode_document(body)
        data = bytes(document.data) if document.data_base64 is None else base64.b64decode(document.data_base64)
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise InvalidEvent("the message", f"it is no CloudEvent in JSON: {error}") from None
    return msgspec.structs.asdict(document), data


def _event(attributes: Mapping[str, Any], payload: bytes, fallback: Fallback) -> Incoming:
    id = attributes.get("id", fallback.id)
    type = attributes.get("type") or fallback.type
    if not type:
        raise InvalidEvent(
            f"message {fallback.id!r} of {fallback.source!r}",
            "it names no event type: send the attribute 'type' of CloudEvents, or give the inbox type=",
        )
    return Incoming(
        id=id,
        source=attributes.get("source") or fallback.source,
        type=type,
        payload=payload,
        version=_version(attributes.get(VERSION), id),
        key=attributes.get("partitionkey"),
        correlation_id=attributes.get("correlationid"),
        headers={name: attributes[name] for name in _TRACE if attributes.get(name) is not None} or None,
    )


def _version(given: str | int | None, id: str) -> int:
    if given is None:
        return 1
    try:
        return int(given)
    except ValueError:
        raise InvalidEvent(f"message {id!r}", f"its {VERSION} is {briefly(given)}; expected a whole number") from None
