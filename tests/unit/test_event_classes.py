"""Events of any kind of class: Pydantic models, dataclasses, attrs classes and structs."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import attrs
import msgspec
import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    SecretStr,
    ValidationError,
    computed_field,
    field_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

import outboxio
from outboxio import (
    Action,
    AmbiguousTypeName,
    Batch,
    Event,
    EventEnvelope,
    EventHandler,
    InvalidEvent,
    Outbox,
    RegistrationError,
    Retry,
    Transaction,
)
from outboxio.model.payloads.classes import decoder_of
from outboxio.support.log import log_text
from outboxio.testing import emitted, expect_event, memory_outbox

T = TypeVar("T")


class Colour(Enum):
    RED = "red"


class Part(BaseModel):
    count: int


@outboxio.event("model-paid", aliases={"old-model-paid"})
class ModelPaid(BaseModel):
    order_id: UUID
    amount: Decimal
    at: datetime
    raw: bytes = b"x"
    colour: Colour = Colour.RED
    parts: list[Part] = []


@outboxio.event
@dataclass(frozen=True, slots=True)
class DataPaid:
    order_id: UUID
    amount: Decimal
    at: datetime
    raw: bytes = b"\xff"
    colour: Colour = Colour.RED
    parts: list[int] = field(default_factory=list)


@outboxio.event()
@attrs.frozen
class AttrsPaid:
    order_id: UUID
    amount: Decimal
    at: datetime
    raw: bytes = b"\xff"
    colour: Colour = Colour.RED
    parts: list[int] = attrs.Factory(list)


@outboxio.event
@pydantic_dataclass
class PydanticDataPaid:
    order_id: UUID
    amount: Decimal
    at: datetime


@outboxio.event(type_name="struct-paid")
class StructPaid(msgspec.Struct):
    order_id: UUID
    amount: Decimal
    at: datetime


CLASSES = (ModelPaid, DataPaid, AttrsPaid, PydanticDataPaid, StructPaid)
VALUES: dict[str, Any] = {
    "order_id": UUID(int=7),
    "amount": Decimal("10.00"),
    "at": datetime(2026, 1, 2, 3, 4, 5),
}


@pytest.mark.parametrize("cls", CLASSES)
async def test_an_event_of_any_class_reaches_its_handler_as_emitted(cls: Any) -> None:
    seen: list[Any] = []
    async with memory_outbox() as outbox:

        @outbox.handler(cls, name="single")
        async def single(envelope: EventEnvelope[Any]) -> None:
            seen.append(envelope.event)

        @outbox.handler(cls, name="batch", batch=Batch(max_wait=0))
        async def batch(envelopes: list[EventEnvelope[Any]]) -> None:
            seen.extend(envelope.event for envelope in envelopes)

        event = cls(**VALUES)
        async with outbox.transaction("Pay") as tx:
            tx.emit(event)
        assert (await outbox.drain()).succeeded == 2
        assert seen == [event, event]
        assert type(seen[0]) is cls
        assert await emitted(outbox, cls) == [event]
        assert await expect_event(outbox, cls, amount=Decimal("10.00")) == event
        with pytest.raises(InvalidEvent, match="no field 'amonut'"):
            await expect_event(outbox, cls, amonut=1)


async def test_handlers_of_any_class_emit_receive_and_execute() -> None:
    seen: list[str] = []

    @outboxio.action("pay-by-model", retry=Retry(on=KeyError, attempts=2))
    class PayByModel(BaseModel):
        amount: Decimal

        async def perform(self, tx: Transaction) -> Decimal:
            if not seen:
                seen.append("failed once")
                raise KeyError
            tx.emit(DataPaid(UUID(int=1), self.amount, VALUES["at"]))
            return self.amount

    class OnModelPaid(EventHandler[ModelPaid]):
        name = "on-model"

        async def handle(self, envelope: EventEnvelope[ModelPaid]) -> None:
            assert await envelope.execute(PayByModel(amount=envelope.event.amount)) == Decimal("10.00")
            envelope.emit(AttrsPaid(**VALUES))

    async with memory_outbox() as outbox:
        outbox.add_handler(OnModelPaid())

        @outbox.handler(DataPaid, AttrsPaid, name="rest")
        async def rest(envelope: EventEnvelope[DataPaid | AttrsPaid]) -> None:
            seen.append(f"{type(envelope.event).__name__} by {envelope.action_name} {envelope.action_params}")

        message = {"source": "s", "external_id": "1", "event": ModelPaid(**VALUES)}
        await outbox.inbox.receive(**message)
        await outbox.drain()
        assert seen[0] == "failed once"
        assert sorted(seen[1:])[1] == "DataPaid by pay-by-model {'amount': '10.00'}"
        assert len(seen) == 3
        consumed = await outbox.inbox.consume({**message, "external_id": "2"})
        assert consumed.succeeded == ("on-model",)


async def test_aliased_rows_of_a_model_are_read_and_malformed_ones_fail() -> None:
    seen: list[Any] = []
    async with memory_outbox() as outbox:

        @outbox.handler(ModelPaid, name="on-model")
        async def on_model(envelope: EventEnvelope[ModelPaid]) -> None:
            seen.append(envelope.event)

        payload = {"order_id": str(UUID(int=7)), "amount": "1", "at": "2026-01-01T00:00:00"}
        await outbox.inbox.receive(source="s", external_id="1", type="old-model-paid", payload=payload)
        wrong = {**payload, "parts": [{"count": "secret text"}]}
        await outbox.inbox.receive(source="s", external_id="2", type="model-paid", payload=wrong)
        drained = await outbox.drain()
        assert (drained.succeeded, drained.failed) == (1, 1)
        assert seen[0].amount == 1
        (row,) = await outbox.admin.list("FAILED")
        assert row.errors[0]["type"] == "pydantic.ValidationError"
        assert "parts.0.count\n  Input should be a valid integer" in str(row.errors[0]["message"])
        assert "secret text" not in str(row.errors)


def test_a_pydantic_error_is_kept_and_its_values_are_not_logged() -> None:
    written = '{"number": "secret 1", "text": 2, "anything": 3, "checked": "secret 4"}'
    with pytest.raises(ValidationError) as refused:
        decoder_of(Strict)(written)

    assert [(one["loc"], one["type"]) for one in refused.value.errors()] == [
        (("number",), "float_parsing"), (("text",), "string_type"), (("checked",), "value_error"),
    ]  # fmt: skip
    assert "errors.pydantic.dev" not in str(refused.value)
    assert "".join(traceback.format_exception(refused.value)).count("secret") == 1  # by the check of the class itself
    assert "Input should be a valid number" in log_text(refused.value)
    assert "rejected by a validator of its class - at `$.checked`" in log_text(refused.value)
    assert "secret" not in log_text(refused.value)


def test_a_class_instead_of_an_event_is_named_in_the_error() -> None:
    assert "ModelPaid is a class; emit an instance, as in `ModelPaid(...)`" in outcome_of_emit(ModelPaid)


def outcome_of_emit(event: Any) -> str:
    """The text of the error that refuses an event; ``""`` if the event is recorded."""
    outbox = Outbox("sqlite://", namespace="app")
    emitter = outbox.executor.shard(None).emitter
    emitter.stores_nul = False
    try:
        emitter.record(event)
    except InvalidEvent as error:
        return str(error)
    return ""


@outboxio.event
class Loose(BaseModel):
    number: float = 0.0
    text: str | None = None
    anything: Any = None


class Strict(Loose):
    checked: str

    @field_validator("checked")
    @classmethod
    def refuses(cls, value: str) -> str:
        raise ValueError(f"it is {value}")


@outboxio.event
class NanAsConstant(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    number: float = math.nan
    values: list[float] = []


@outboxio.event
class NanAsText(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    number: float = math.nan
    nothing: None = None


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ModelPaid.model_construct(**{**VALUES, "order_id": None}), "`$.order_id`"),
        (ModelPaid.model_construct(amount=Decimal(1)), "Field required - at `$.order_id`"),
        (ModelPaid(**VALUES, parts=[Part.model_construct(count="many")]), "`$.parts[0].count`"),
        (DataPaid(**{**VALUES, "order_id": None}), "Expected `uuid`, got `None` - at `$.order_id`"),
        (DataPaid(**VALUES, parts=["x"]), "`$.parts[0]`"),  # type: ignore[list-item]
        (AttrsPaid(**{**VALUES, "amount": "ten"}), "`$.amount`"),
        (ModelPaid(**VALUES, raw=b"\xff"), "cannot be encoded as JSON"),
        (Loose(number=math.nan), "number is nan, which JSON cannot hold"),
        (Loose(anything={"a": [math.inf]}), "anything.a[0] is inf"),
        (NanAsConstant(), "a number is NaN or infinite - at `number`"),
        (NanAsConstant(number=1, values=[math.inf]), "at `values[0]`"),
        (NanAsText(), ""),
        (Loose(text="a\0b"), "contains NUL"),
        (Loose(text="\ud800"), "Unicode"),
        (Loose(anything=object()), "at `anything`"),
        (Loose(text="plain"), ""),
        (Part(count=1), "decorate its class with `@outboxio.event`"),
    ],
)
def test_an_event_that_no_handler_could_decode_is_refused_by_name(event: Any, text: str) -> None:
    refused = outcome_of_emit(event)
    assert (text in refused) if text else not refused


class Aliased(BaseModel):
    order_id: int = Field(alias="orderId")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> int:
        return 2 * self.order_id


outboxio.event(Aliased)


@outboxio.event
class Forbidding(Aliased):
    model_config = ConfigDict(extra="forbid")


@outboxio.event
class Either(BaseModel):
    class Cat(BaseModel):
        kind: Literal["cat"] = "cat"
        lives: int = 9

    class Dog(BaseModel):
        kind: Literal["dog"] = "dog"

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Box(BaseModel, Generic[T]):
    value: T


IntBox = outboxio.event("int-box")(Box[int])


@pytest.mark.parametrize(
    ("event", "stored"),
    [
        (Aliased(orderId=1), {"orderId": 1}),
        (Forbidding(orderId=1), {"orderId": 1}),
        (Either(pet=Either.Cat()), {"pet": {"kind": "cat", "lives": 9}}),
        (IntBox(value=1), {"value": 1}),
    ],
)
async def test_a_model_is_stored_by_its_aliases_without_computed_fields(event: Any, stored: dict[str, Any]) -> None:
    seen: list[Any] = []
    async with memory_outbox() as outbox:

        @outbox.handler(type(event), name="h")
        async def handle(envelope: EventEnvelope[Any]) -> None:
            seen.append(envelope.event)

        async with outbox.transaction("Do") as tx:
            tx.emit(event)
        await outbox.drain()
        assert seen == [event]
        assert (await outbox.admin.list())[0].payload == stored


async def test_a_decorated_subclass_of_an_event_reaches_handlers_of_the_base() -> None:
    @outboxio.event
    class Base(BaseModel):
        number: int

    @outboxio.event("derived")
    class Derived(Base): ...

    class Undecorated(Base): ...

    seen: list[Any] = []
    async with memory_outbox() as outbox:

        @outbox.handler(Base, name="base")
        async def base(envelope: EventEnvelope[Base]) -> None:
            seen.append(envelope.event)

        async with outbox.transaction("Do") as tx:
            tx.emit(Derived(number=1))
            with pytest.raises(InvalidEvent, match="decorate its class"):
                tx.emit(Undecorated(number=2))
        await outbox.drain()
        assert seen == [Derived(number=1)]


class Foreign:
    """A class that JSON cannot hold."""


class Holder(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    parts: list[Foreign]


class Readable(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    part: Annotated[Foreign, PlainSerializer(lambda _: "x"), outboxio.Clock]


@dataclass
class WithInitVar:
    number: int
    other: InitVar[int] = 1

    def __post_init__(self, other: int) -> None:
        self.number += other


@pydantic_dataclass
class PydanticWithInitVar:
    number: int
    other: InitVar[int]


@dataclass
class WithForeign:
    parts: list[Foreign]


@attrs.define
class Private:
    _number: int = 1


class Root(RootModel[dict[str, int]]): ...


class Login(BaseModel):
    password: SecretStr | None = None


class LoginWithin(BaseModel):
    login: Login


class Renamed(BaseModel):
    order_id: int = Field(serialization_alias="orderId")


class Plain:
    pass


class Known(Event):
    number: int


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Holder, "field 'parts' is of type Foreign"),
        (WithInitVar, "field 'other' is an InitVar, whose value is not stored, but `__post_init__` needs it"),
        (
            PydanticWithInitVar,
            "field 'other' is an InitVar, whose value is not stored, but the class cannot be instantiated",
        ),
        (WithForeign, r"field 'parts\[...\]' is of type .*Foreign"),
        (Private, "field '_number' is private"),
        (Root, "RootModel"),
        (Login, "field 'password' is a SecretStr"),
        (LoginWithin, "field 'login.password' is a SecretStr"),
        (Renamed, "is written as 'orderId' and read as"),
        (Plain, "is none of them; .* above that decorator"),
        (Known, "is already an event"),
        (ModelPaid, "is already an event"),
        ("ModelPaid", "decorates a class"),
    ],
)
def test_an_unsupported_event_class_is_refused_by_the_decorator(cls: Any, text: str) -> None:
    with pytest.raises(RegistrationError, match=text):
        outboxio.event()(cls)


def test_names_and_versions_of_decorated_classes_are_validated_like_events() -> None:
    def decorated(decorate: Callable[[Any], Any]) -> None:
        decorate(type("Any", (BaseModel,), {}))

    with pytest.raises(InvalidEvent, match="blank"):
        decorated(outboxio.event(" "))
    with pytest.raises(InvalidEvent, match="one string"):
        decorated(outboxio.event(aliases="Old"))
    for version in (0, True, "2"):
        with pytest.raises(InvalidEvent, match="version of Any"):
            decorated(outboxio.event(version=version))  # type: ignore[arg-type]


def test_duplicate_names_and_undecorated_classes_are_refused_at_registration() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    @outboxio.event("model-paid")
    class Other(BaseModel): ...

    outbox.register(ModelPaid)
    with pytest.raises(AmbiguousTypeName):
        outbox.register(Other)
    with pytest.raises(RegistrationError, match="not an Event class"):
        outbox.handler(Part, name="h")(nothing)
    with pytest.raises(RegistrationError, match="annotated to take"):

        @outbox.handler(ModelPaid, name="h")
        async def of_data(envelope: EventEnvelope[DataPaid]) -> None: ...


async def nothing(envelope: Any) -> None: ...


def test_an_action_needs_perform_and_exactly_one_decorator() -> None:
    with pytest.raises(RegistrationError, match="no method `async def perform"):
        outboxio.action(Part)

    class Own(Action):
        async def perform(self, tx: Transaction) -> None: ...

    with pytest.raises(RegistrationError, match="is already an action"):
        outboxio.action(Own)
