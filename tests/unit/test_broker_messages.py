"""The messages of relays: destinations, layouts on the wire, and how an inbox reads a message."""

from datetime import datetime

import msgspec
import pytest

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.integrations.brokers import FORMATS, Incoming, Message, Template, Wire, incoming_of, wire_format
from outboxio.integrations.brokers.inbox import Fallback
from outboxio.integrations.brokers.message import percent_encoded

FALLBACK = Fallback(id="7", source="nats:WALLETS")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def message(**changes: object) -> Message:
    parts: dict[str, object] = {
        "id": "018f3d7e-0000-7000-8000-000000000001", "type": "MoneyDeposited", "source": "/wallets", "subject": "w-1",
        "key": "w-1", "time": datetime(2026, 1, 31, 12, 0, 0, 5), "data": b'{"cents":5}',
        "attributes": {"partitionkey": "w-1", "correlationid": "c-9", "modeltype": "Wallet", "traceparent": TRACE},
    }  # fmt: skip
    return Message(**(parts | changes))  # type: ignore[arg-type]


def received(wire: Wire, *, escaped: bool = False, **given: str) -> Incoming:
    headers = {**wire.headers, "content-type": wire.content_type}
    return incoming_of(headers, wire.body, fallback=FALLBACK, escaped=escaped, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["ce-", "ce_", "cloudEvents:"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_inbox_reads_every_format_that_a_relay_writes(name: str, prefix: str) -> None:
    sent = message()
    incoming = received(wire_format(name, prefix=prefix)(sent))
    assert incoming.flaw is None
    assert (incoming.id, incoming.type, incoming.correlation_id) == (sent.id, "MoneyDeposited", "c-9")
    assert msgspec.json.decode(incoming.payload) == {"cents": 5}
    if name == "debezium":  # no trace header; the key is that of the record
        assert (incoming.source, incoming.key) == ("wallets", None)
    else:
        assert (incoming.source, incoming.key, incoming.headers) == ("/wallets", "w-1", {"traceparent": TRACE})


def test_binary_mode_has_the_cloudevents_attributes() -> None:
    wire = wire_format("cloudevents", prefix="ce-")(message())
    assert wire == Wire(
        {
            "ce-specversion": "1.0",
            "ce-id": "018f3d7e-0000-7000-8000-000000000001",
            "ce-type": "MoneyDeposited",
            "ce-source": "/wallets",
            "ce-time": "2026-01-31T12:00:00.000005Z",
            "ce-subject": "w-1",
            "ce-partitionkey": "w-1",
            "ce-correlationid": "c-9",
            "ce-modeltype": "Wallet",
            "ce-traceparent": TRACE,
        },
        b'{"cents":5}',
    )


def test_the_debezium_layout_routes_by_model_type() -> None:
    encode = wire_format("debezium", prefix="ce-")
    assert encode(message()).destination == "outbox.event.Wallet"
    with pytest.raises(Unprocessable, match="no model type"):
        encode(message(attributes={}))


def test_a_header_cannot_inject_another_line() -> None:
    odd = "a\r\nNats-Rollup: all\n é%"
    wire = wire_format("cloudevents", prefix="ce-", escape=percent_encoded)(message(subject=odd, type="Ä b"))
    assert wire.headers["ce-subject"] == "a%0D%0ANats-Rollup:%20all%0A%20%C3%A9%25"
    assert received(wire, escaped=True).type == "Ä b"


def test_the_event_version_is_transmitted() -> None:
    for name in ("cloudevents", "structured"):
        wire = wire_format(name, prefix="ce-")(message(attributes={"eventversion": "3"}))
        assert received(wire).version == 3
    wire.headers["ce-id"] = "1"
    assert "eventversion is 'x'" in str(
        incoming_of({"ce-id": "1", "ce-type": "A", "ce-eventversion": "x"}, b"{}", fallback=FALLBACK).flaw
    )


def test_a_message_without_headers_uses_the_fallback() -> None:
    plain = incoming_of(None, b"{}", fallback=Fallback(id="7", source="nats:WALLETS", type="Paid"))
    assert (plain.id, plain.source, plain.type, plain.flaw) == ("7", "nats:WALLETS", "Paid", None)
    assert "it has no event type" in str(incoming_of(None, b"{}", fallback=FALLBACK).flaw)


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"id": "1"}', b"\xff"])
def test_a_malformed_document_is_reported_without_raising(body: bytes) -> None:
    incoming = incoming_of({}, body, fallback=FALLBACK, content_type="application/cloudevents+json")
    assert "it is not a CloudEvent in JSON" in str(incoming.flaw)


def test_a_template_is_filled_with_fields() -> None:
    assert Template("wallets", option="subject")(message()) == "wallets"
    assert Template("{{x}}", option="subject")(message()) == "{x}"
    by_type = Template("wallets.{event_type}", option="subject", fit=str.lower)
    assert [by_type(message()), by_type(message(type="B"))] == ["wallets.moneydeposited", "wallets.b"]
    filled = Template("{namespace}.{model_type}.{model_id}.{key}", option="subject")(message(key="k"))
    assert filled == "wallets.Wallet.w-1.k"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "expected a text"),
        ("wallets.{event_typ}", "did you mean 'event_type'"),
        ("wallets.{", "is not a valid template"),
        ("wallets.{event_type!r}", "a format or a conversion"),
        ("wallets.{}", "has the field ''"),
    ],
)
def test_an_invalid_template_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Template(text, option="subject")


def test_a_message_without_the_value_of_a_field_is_unprocessable() -> None:
    with pytest.raises(Unprocessable, match="emit it with model_type="):
        Template("outbox.{model_type}", option="topic")(message(attributes={}))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected one of 'cloudevents', 'structured', 'debezium'"):
        wire_format("avro", prefix="ce-")
