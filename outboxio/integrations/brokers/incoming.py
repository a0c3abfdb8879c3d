"""Messages of a broker as the inbox takes them: CloudEvents in either mode, Debezium's layout, or plain JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from outboxio.errors import InvalidEvent
from outboxio.integrations.brokers.message import VERSION
from outboxio.support.text import briefly

_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")
_TRACE = ("traceparent", "tracestate")


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


class _Document(Struct, kw_only=True):
    """A CloudEvent as one JSON document. Attributes without a meaning for the inbox are left out."""

    id: str
    source: str
    type: str
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
            found = _structured(kind, body)
        else:
            found = _in_headers(named, body, fallback, escaped=escaped)
    except InvalidEvent as error:
        return Incoming(place=fallback.id, raw=raw, flaw=error)
    found.place = fallback.id
    found.raw = raw
    if key is not None:
        found.key = key
    return found


def _in_headers(headers: Mapping[str, str], body: bytes, fallback: Fallback, *, escaped: bool) -> Incoming:
    for prefix in _PREFIXES:
        if f"{prefix}id" in headers:
            return _binary(headers, prefix, body, fallback, escaped=escaped)
    if "id" in headers:
        return _debezium(headers, body, fallback, escaped=escaped)
    return Incoming(
        id=fallback.id,
        source=fallback.source,
        type=_known_type(None, fallback),
        payload=body,
        headers=_trace({name: headers[name] for name in _TRACE if name in headers}),
    )


def _binary(headers: Mapping[str, str], prefix: str, body: bytes, fallback: Fallback, *, escaped: bool) -> Incoming:
    start = len(prefix)
    attributes = {name[start:]: value for name, value in headers.items() if name.startswith(prefix)}
    if escaped:
        attributes = {name: unquote(value) if "%" in value else value for name, value in attributes.items()}
    return Incoming(
        id=attributes["id"],
        source=attributes.get("source") or fallback.source,
        type=_known_type(attributes.get("type"), fallback),
        payload=body,
        version=_version(attributes.get(VERSION), attributes["id"]),
        key=attributes.get("partitionkey"),
        correlation_id=attributes.get("correlationid"),
        headers=_trace({name: attributes[name] for name in _TRACE if name in attributes}),
    )


def _debezium(headers: Mapping[str, str], body: bytes, fallback: Fallback, *, escaped: bool) -> Incoming:
    named = {name: unquote(value) for name, value in headers.items()} if escaped else headers
    return Incoming(
        id=named["id"],
        source=named.get("ce_source") or fallback.source,
        type=_known_type(named.get("ce_type") or named.get("eventtype"), fallback),
        payload=body,
        correlation_id=named.get("correlation_id"),
    )


def _structured(kind: str, body: bytes) -> Incoming:
    if "json" not in kind:
        raise InvalidEvent("the message", f"its content type is {briefly(kind)}; expected application/cloudevents+json")
    try:
        document = _decode_document(body)
        data = bytes(document.data) if document.data_base64 is None else base64.b64decode(document.data_base64)
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise InvalidEvent("the message", f"it is no CloudEvent in JSON: {error}") from None
    trace = {"traceparent": document.traceparent, "tracestate": document.tracestate}
    return Incoming(
        id=document.id,
        source=document.source,
        type=document.type,
        payload=data,
        version=_version(document.eventversion, document.id),
        key=document.partitionkey,
        correlation_id=document.correlationid,
        headers=_trace({name: value for name, value in trace.items() if value is not None}),
    )


def _known_type(given: str | None, fallback: Fallback) -> str:
    found = given or fallback.type
    if not found:
        raise InvalidEvent(
            f"message {fallback.id!r} of {fallback.source!r}",
            "it names no event type: send the attribute 'type' of CloudEvents, or give the inbox type=",
        )
    return found


def _version(given: str | int | None, id: str) -> int:
    if given is None:
        return 1
    try:
        return int(given)
    except ValueError:
        raise InvalidEvent(f"message {id!r}", f"its {VERSION} is {briefly(given)}; expected a whole number") from None


def _trace(headers: dict[str, str]) -> dict[str, str] | None:
    return headers or None
