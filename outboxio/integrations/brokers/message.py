"""What a relay sends: the message of an event, its layout on the wire, and its destination.

The message has the same values for every broker, and nothing is decoded. A layout is a function from a
:class:`Message` to a :class:`Wire`: CloudEvents in binary mode, CloudEvents as one JSON document, or Debezium's.
Brokers differ in the prefix of the attributes' names, and in the characters that a header may have.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.model.envelope import EventEnvelope
from outboxio.support.text import briefly, instead_of

VERSION = "eventversion"
"""The attribute for the version of the event's class. An event of version 1 has no such attribute."""
JSON: Final = "application/json"
CLOUDEVENTS_JSON: Final = "application/cloudevents+json"
FORMATS: Final = ("cloudevents", "structured", "debezium")
"""The values of ``format=``."""


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """An event as a relay sends it. The names are those of CloudEvents 1.0.

    ``id`` is the event's id, and so the same for every attempt; readers and brokers remove duplicates by ``id`` and
    ``source``. ``source`` is ``/<namespace>``. ``subject`` is the ``model_id``. Messages with the same ``key`` keep
    their order if the broker preserves it: the key is the ordering key (only with ``ordered=True``), else the
    ``model_id``, else the event's id. ``time`` is naive UTC. ``data`` is the stored JSON of the event. ``attributes``
    has those of the following that the event has: ``partitionkey``, ``correlationid``, ``causationid``,
    ``modeltype``, ``eventversion``, ``traceparent``, ``tracestate``.
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
    """Return the message for an event.

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


class Wire(Struct, frozen=True, gc=False):
    """A message in the form that a broker stores.

    ``destination`` is the topic, subject or stream that the layout requires; ``None`` leaves the choice to the relay.
    """

    headers: dict[str, str]
    body: bytes
    content_type: str = JSON
    destination: str | None = None


Encode = Callable[[Message], Wire]
"""Converts a message to its wire form. Raises :class:`~outboxio.Unprocessable` if the layout cannot represent it."""

Escape = Callable[[str], str]


def wire_format(name: str, *, prefix: str, escape: Escape = str, fit: Escape = str) -> Encode:
    """Return the layout with this name. Raises :class:`ConfigurationError` for an unknown name.

    ``prefix`` goes before the attributes of CloudEvents in binary mode. ``escape`` makes a value valid in a header, and
    ``fit`` in a part of a destination.
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
    """Encode a value for a header that allows only visible ASCII, as in the HTTP binding of CloudEvents."""
    return value if _is_plain(value) else _ODD.sub(_as_percents, value)


_is_plain = re.compile(r"[!#$&-~]*\Z").match  # without the space, ", %, and all beyond ~
_ODD = re.compile(r"[^!#$&-~]")


def _as_percents(odd: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in odd[0].encode())


def rfc3339(time: datetime) -> str:
    """Format a time in naive UTC, as in ``2026-01-31T12:00:00.000000Z``."""
    return f"{time.isoformat()}Z"


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
                f"event {message.id} of type {message.type!r} has no model type, but format='debezium' derives the "
                "destination from the model type: emit the event with model= or model_type=, or choose another format"
            )
        headers = {"id": message.id, "ce_type": escape(message.type), "ce_source": escape(message.namespace)}
        for header, attribute in (("correlation_id", "correlationid"), ("causation_id", "causationid")):
            if attribute in message.attributes:
                headers[header] = escape(message.attributes[attribute])
        return Wire(headers, message.data, JSON, f"outbox.event.{fit(message.model_type)}")

    return encode


_FIELDS: dict[str, Callable[[Message], str | None]] = {
    "event_type": lambda message: message.type,
    "model_type": lambda message: message.model_type,
    "model_id": lambda message: message.subject,
    "namespace": lambda message: message.namespace,
    "key": lambda message: message.key,
}


class Template:
    """The destination of each message: a text with fields in braces.

    The fields are ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and ``{key}``. ``fit`` makes the
    value of a field valid in the broker's names, and ``fit_whole`` does so for the whole destination. Raises
    :class:`ConfigurationError`, which names ``option``, for a text that is empty, has an unknown field, a conversion or
    a format, or braces that do not close.

    Example::

        subject = Template("wallets.{event_type}", option="subject")
        subject(message)  # "wallets.MoneyDeposited"
    """

    def __init__(
        self, text: str, *, option: str, fit: Callable[[str], str] = str, fit_whole: Callable[[str], str] = str
    ) -> None:
        self.text = text
        self._option = option
        self._fit = fit
        self._fit_whole = fit_whole
        self._parts = self._checked(text)
        self._constant = "".join(literal for literal, _ in self._parts) if self.is_constant else None
        self._by_type: dict[str, str] | None = {} if self.fields == {"event_type"} else None

    @property
    def fields(self) -> set[str]:
        """The names of the fields."""
        return {field for _, field in self._parts if field is not None}

    @property
    def is_constant(self) -> bool:
        """True if every message has the same destination."""
        return not self.fields

    def example(self) -> str:
        """Return the destination with ``x`` in each field, to check the text around the fields."""
        return "".join(literal + ("x" if field is not None else "") for literal, field in self._parts)

    def __call__(self, message: Message) -> str:
        """Return the destination of a message; :class:`Unprocessable` if the message lacks the value of a field."""
        if self._constant is not None:
            return self._constant
        if self._by_type is None:
            return self._filled(message)
        # Types are few, except on a topic, where names are unlimited.
        known = self._by_type.get(message.type)
        if known is None:
            known = self._filled(message)
            if len(self._by_type) < _MOST_KNOWN:
                self._by_type[message.type] = known
        return known

    def _filled(self, message: Message) -> str:
        filled: list[str] = []
        for literal, field in self._parts:
            filled.append(literal)
            if field is not None:
                value = _FIELDS[field](message)
                if not value:
                    raise Unprocessable(
                        f"event {message.id} of type {message.type!r} has no {field}, which {self._option}="
                        f"{self.text!r} needs: emit it with {_KEYWORDS.get(field, field)}=, or change the template"
                    )
                filled.append(self._fit(value))
        return self._fit_whole("".join(filled))

    def _checked(self, text: str) -> list[tuple[str, str | None]]:
        if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(
                f"{self._option} is {briefly(text)}; expected a text such as 'wallets.{{event_type}}'"
            )
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigurationError(f"{self._option}={text!r} is not a valid template: {error}") from None
        for _, field, layout, conversion in parts:
            if field is not None and field not in _FIELDS:
                raise ConfigurationError(
                    f"{self._option}={text!r} has the field {field!r}: {instead_of(field, _FIELDS)}"
                )
            if layout or conversion:
                raise ConfigurationError(
                    f"{self._option}={text!r} has a format or a conversion in {field!r}; write {{{field}}}"
                )
        return [(literal, field) for literal, field, _, _ in parts]


_MOST_KNOWN = 1000
_KEYWORDS = {"model_type": "model_type", "model_id": "model_id", "key": "ordering_key"}
