"""``outbox.catalogue()``: the document is valid by the public JSON Schema of AsyncAPI 3.0."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import attrs
import jsonschema
import msgspec
import pytest
from pydantic import BaseModel, Field, PositiveInt

import outboxio
from outboxio import Event, EventEnvelope, Outbox
from outboxio.catalogue.lock import Lock, lock_text, locked
from outboxio.integrations.kafka import KafkaRelay
from outboxio.integrations.nats import NatsRelay
from outboxio.integrations.webhooks import Webhooks
from tests.kit.event_catalogue import types_of
from tests.kit.sources import ROOT

ASYNCAPI = json.loads((ROOT / "tests" / "asyncapi" / "3.0.0.json").read_text())


def refuse_invalid(document: dict[str, Any]) -> None:
    """Check the document, the targets of its references, and each example against its schema."""
    assert [error.message for error in jsonschema.Draft7Validator(ASYNCAPI).iter_errors(document)] == []
    for reference in references(document):
        part: Any = document
        for key in reference.removeprefix("#/").split("/"):
            part = part[key]
    for message in document["components"]["messages"].values():
        schema = {**message["payload"], "components": document["components"]}
        for example in message.get("examples", ()):
            jsonschema.Draft7Validator(schema).validate(example["payload"])


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    return [each for value in node for each in references(value)] if isinstance(node, list) else []


def test_the_catalogue_of_the_shop_is_a_valid_document(tmp_path: Path) -> None:
    file = tmp_path / "asyncapi.json"
    shop = ROOT / "examples" / "shop"
    subprocess.run(
        [sys.executable, "-m", "outboxio.cli", "events", "shop.worker:outbox", "--asyncapi", str(file)],
        cwd=shop, env={**os.environ, "PYTHONPATH": f"{ROOT}:{shop}", "DATABASE": ""}, check=True, timeout=60,
    )  # fmt: skip

    document = json.loads(file.read_text())
    refuse_invalid(document)
    assert set(document["channels"]) == {"AddressChanged", "OrderPaid", "OrderPlaced", "PaymentRefused"}
    assert document["operations"]["receive.payment.OrderPlaced"]["action"] == "receive"
    placed = document["components"]["messages"]["OrderPlaced.v2"]
    assert placed["payload"] == {"$ref": "#/components/schemas/OrderPlaced.v2"}
    assert placed["x-outboxio-version"] == 2
    assert placed["examples"] == [{"payload": {"order_id": 1, "email": "text", "sku": "text", "quantity": 1}}]


def test_the_public_schema_refuses_a_wrong_document() -> None:
    document = Outbox("sqlite://", namespace="shop").catalogue()
    document["operations"]["ship"] = {"action": "receive"}

    with pytest.raises(AssertionError):
        refuse_invalid(document)


class Placed(Event):
    order: int


class Second(Event, type_name="Placed", version=2):
    order: int
    email: str


@outboxio.upcaster(Second, from_version=1)
def with_email(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "email": "none"}


class Money(msgspec.Struct):
    amount: Decimal
    currency: Literal["EUR", "USD"]


class Card(msgspec.Struct, tag="card"):
    number: str


class Cash(msgspec.Struct, tag="cash"):
    given: Money


class OfStruct(Event, type_name="shop/of struct", aliases={"Former"}):
    """A struct with parts of every kind."""

    id: UUID
    when: datetime
    took: timedelta
    money: Money
    by: Card | Cash
    place: tuple[float, float]
    totals: dict[str, Money]
    blob: bytes
    tags: frozenset[str] = frozenset()
    before: OfStruct | None = None


class Animal(BaseModel):
    kind: Literal["cat"]


class Robot(BaseModel):
    kind: Literal["robot"]
    parts: list[Robot] = []


@outboxio.event
class OfModel(BaseModel):
    id: UUID
    mail: str = Field("ada@example.org", min_length=3)
    day: date
    price: Decimal = Field(gt=0, decimal_places=2)
    count: PositiveInt
    visitor: Animal | Robot = Field(discriminator="kind")


@outboxio.event
@dataclasses.dataclass
class OfDataclass:
    order: int
    secret: dataclasses.InitVar[str] = ""
    lines: list[str] = dataclasses.field(default_factory=list)


@outboxio.event
@attrs.define
class OfAttrs:
    order: int
    note: str | None = None


class Colour(Enum):
    RED = 1
    BLUE = 2


class OfEkbatan(Event, json_style="ekbatan"):
    unit_price: Decimal
    colour: Colour


def test_every_kind_of_class_has_a_schema_that_accepts_its_example() -> None:
    outbox = Outbox("sqlite://", namespace="shop")
    outbox.register(OfStruct, OfModel, OfDataclass, OfAttrs, OfEkbatan)

    document = outbox.catalogue()

    refuse_invalid(document)
    messages = document["components"]["messages"]
    assert [len(message["examples"]) for message in messages.values()] == [1] * 5
    assert messages["shop-of-struct.v1"]["name"] == "shop/of struct"
    assert document["channels"]["shop-of-struct"]["x-outboxio-aliases"] == ["Former"]
    assert document["channels"]["shop-of-struct"]["description"] == "A struct with parts of every kind."
    ekbatan = document["components"]["schemas"]["OfEkbatan.v1"]["properties"]
    assert ekbatan["unitPrice"]["type"] == "number"
    assert document["components"]["schemas"]["OfEkbatan.v1.Colour"]["enum"] == ["BLUE", "RED"]


def test_a_relay_sends_to_its_address_on_its_own_channel() -> None:
    outbox = Outbox("sqlite://", namespace="shop")
    outbox.add_handler(NatsRelay("nats://localhost", name="to-nats", types=(Placed,), subject="shop.{event_type}"))
    outbox.add_handler(KafkaRelay("localhost:9092", name="to-kafka", types=("Foreign",), topics="all.{model_type}"))
    outbox.add_handler(KafkaRelay("localhost:9092", name="by-code", types=(Placed,), topics=by_code))

    document = outbox.catalogue()

    refuse_invalid(document)
    channels, operations = document["channels"], document["operations"]
    assert channels["to-nats.Placed"]["address"] == "shop.Placed"
    assert channels["to-kafka.Foreign"]["address"] == "all.{model_type}"
    assert list(channels["to-kafka.Foreign"]["parameters"]) == ["model_type"]
    assert channels["by-code.Placed"]["address"] is None
    assert operations["send.to-nats.Placed"] == {
        "action": "send",
        "channel": {"$ref": "#/channels/to-nats.Placed"},
        "messages": [{"$ref": "#/channels/to-nats.Placed/messages/Placed.v1"}],
        "x-outboxio-handler": "to-nats",
    }


def by_code(message: Any) -> str:
    return {"w-1": "first"}[message.subject]


def test_webhook_deliveries_are_not_published() -> None:
    outbox = Outbox("sqlite:///unused.db", namespace="shop")
    outbox.add_handler(Webhooks(name="hooks", types=[Placed], endpoints=lambda envelope: []))

    document = outbox.catalogue()

    assert list(document["channels"]) == ["Placed"]
    assert [one["x-outboxio-handler"] for one in document["operations"].values()] == ["hooks"]


def test_a_topic_handler_receives_on_a_channel_of_the_topic() -> None:
    outbox = Outbox("sqlite://", namespace="shop")

    @outbox.handler(topic="audit", name="archive")
    async def archive(envelope: EventEnvelope[Any]) -> None: ...

    document = outbox.catalogue()

    refuse_invalid(document)
    assert document["channels"]["topic.audit"]["address"] == "audit"
    assert document["operations"]["receive.archive.topic.audit"]["x-outboxio-handler"] == "archive"


def test_webhook_deliveries_are_not_in_the_catalogue() -> None:
    class Paid(Event):
        order: int

    outbox = Outbox("sqlite://", namespace="shop")
    outbox.add_handler(Webhooks(name="hooks", types=[Paid], endpoints=[]))

    document = outbox.catalogue()

    refuse_invalid(document)
    assert list(document["channels"]) == ["Paid"]
    assert list(document["operations"]) == ["receive.hooks.Paid"]


def test_a_lock_file_adds_the_messages_of_older_versions(tmp_path: Path) -> None:
    types, classes = types_of(Placed)
    former = locked(types, Lock({}), classes)
    types, classes = types_of(Second)
    (tmp_path / "events.lock.json").write_bytes(lock_text(locked(types, former, classes)))
    outbox = Outbox("sqlite://", namespace="shop")
    outbox.register(Second)

    document = outbox.catalogue(lock_file=tmp_path / "events.lock.json", version="7", emitted_by={"Placed": ["Place"]})

    refuse_invalid(document)
    assert list(document["channels"]["Placed"]["messages"]) == ["Placed.v1", "Placed.v2"]
    assert list(document["components"]["schemas"]["Placed.v1"]["properties"]) == ["order"]
    assert document["channels"]["Placed"]["x-outboxio-emitted-by"] == ["Place"]
    assert document["info"]["version"] == "7"


class Odd:
    """A type that JSON Schema cannot describe."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        to_text = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(lambda value: cls(), serialization=to_text)


def test_a_field_without_a_json_schema_accepts_any_value() -> None:
    @outboxio.event("Undescribed")
    class Undescribed(BaseModel):
        odd: Odd

    outbox = Outbox("sqlite://", namespace="shop")
    outbox.register(Undescribed)

    document = outbox.catalogue()

    refuse_invalid(document)
    assert "type" not in document["components"]["schemas"]["Undescribed.v1"]["properties"]["odd"]
