"""Changes of a field's type that make stored rows undecodable are found, for each kind of class."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from msgspec import Meta
from pydantic import AliasChoices, AwareDatetime, BaseModel, Field
from typing_extensions import TypeAliasType

import outboxio
from outboxio import Event
from outboxio.catalogue.compatibility import breaking_changes
from outboxio.catalogue.fields import fields_of
from outboxio.catalogue.lock import decoding_error
from outboxio.catalogue.schemas import examples_of, schema_of
from outboxio.model.payloads.classes import decoder_of, encoder_of
from tests.kit.event_catalogue import types_of


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class OnlyRed(Enum):
    RED = "red"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Part(msgspec.Struct):
    number: str = ""


class Tagged(msgspec.Struct, tag=True):
    when: str


class Timed(msgspec.Struct, tag="Tagged"):
    when: datetime


class Other(msgspec.Struct, tag=True):
    pass


class Untagged(BaseModel):
    v: int


class A(BaseModel):
    kind: Literal["a"] = "a"
    v: int


class B(BaseModel):
    kind: Literal["b"] = "b"
    v: int


class Former(BaseModel):
    a: int


class Aliased(BaseModel):
    b: int = Field(validation_alias=AliasChoices("a", "b"), serialization_alias="a")


Json: Any = TypeAliasType("Json", "dict[str, Json] | list[Json] | int")


def event_with(kind: str, annotation: Any, **namespace: Any) -> Any:
    members = {"__annotations__": {"x": annotation}, "__module__": __name__, **namespace}
    if kind == "struct":
        return type(Event)("X", (Event,), members)
    if kind == "model":
        return outboxio.event(type(BaseModel)("X", (BaseModel,), members))
    return outboxio.event(dataclasses.dataclass(frozen=True)(type("X", (), members)))


def is_read(before: Any, after: Any, value: Any) -> bool:
    stored = encoder_of(before)(before(x=value), "x", stores_nul=True)
    try:
        decoder_of(after)(stored.encode())
    except ValueError:
        return False
    return True


NARROWED = [
    (str, datetime, "soon"),
    (list[str], list[datetime], ["soon"]),
    (str | None, datetime | None, "soon"),
    (int | str, int | datetime, "soon"),
    (str, Decimal, "ten"),
    (date, time, date(2026, 1, 1)),
    (datetime, time, datetime(2026, 1, 1, 12)),
    (dict[str, int], dict[int, int], {"a": 1}),
    (dict[str, int], dict[UUID, int], {"a": 1}),
    (dict[str, int], dict[Colour, int], {"green": 1}),
    (dict[Colour, int], dict[OnlyRed, int], {Colour.BLUE: 1}),
    (dict[Literal["a", "b"], int], dict[Literal["a"], int], {"b": 1}),
    (Literal["abc"], Annotated[str, Meta(max_length=2), Field(max_length=2)], "abc"),
    (Size, Annotated[int, Meta(ge=2), Field(ge=2)], Size.SMALL),
    (Literal["a", None], Literal["a"], None),
]  # fmt: skip
OF_STRUCTS = [
    (datetime, Annotated[datetime, Meta(tz=True)], datetime(2026, 1, 1)),
    (datetime, Annotated[datetime, Meta(tz=False)], datetime(2026, 1, 1, tzinfo=UTC)),
    (date, datetime, date(2026, 1, 1)),  # Pydantic reads dates as times at midnight
    (dict[str, int], dict[Annotated[str, Meta(pattern="^a")], int], {"b": 1}),
    (dict[str, int], Part, {"number": 1}),
    (dict[str, Any], Part, {"number": 1}),
    (Tagged | Other | None, Timed | Other | None, Tagged("soon")),
]  # fmt: skip
OF_MODELS = [
    (datetime, AwareDatetime, datetime(2026, 1, 1)),
    (Decimal, Annotated[Decimal, Field(max_digits=4)], Decimal("123456")),
    (Decimal, Annotated[Decimal, Field(ge=0)], Decimal(-1)),
    (Untagged | B, Annotated[A | B, Field(discriminator="kind")], Untagged(v=1)),
]  # fmt: skip
WIDENED = [
    (Literal["a", None], str | None, "a"),
    (Literal[1, "a"], int | str, 1),
    (tuple[int, str], list[int | str], (1, "a")),
    (int, Decimal, 1),
    (float, Decimal, 1.5),
    (Size, Annotated[int, Meta(ge=1), Field(ge=1)], Size.LARGE),
    (Annotated[int, Meta(gt=1), Field(gt=1)], Annotated[int, Meta(ge=1), Field(ge=1)], 2),
    (dict[Colour, int], dict[str, int], {Colour.RED: 1}),
    (datetime, str, datetime(2026, 1, 1)),
    (dict[int, int], dict[str, int], {1: 1}),
    (
        Annotated[int, Meta(multiple_of=4), Field(multiple_of=4)],
        Annotated[int, Meta(multiple_of=2), Field(multiple_of=2)],
        8,
    ),
]  # fmt: skip


def of_kinds(given: list[Any], *kinds: str) -> list[Any]:
    return [pytest.param(kind, *one, id=f"{kind}-{index}") for kind in kinds for index, one in enumerate(given)]


@pytest.mark.parametrize(
    ("kind", "before", "after", "value"),
    [
        *of_kinds(NARROWED, "struct", "model", "dataclass"),
        *of_kinds(OF_STRUCTS, "struct", "dataclass"),
        *of_kinds(OF_MODELS, "model"),
    ],
)
def test_a_change_that_makes_rows_undecodable_is_found(kind: str, before: Any, after: Any, value: Any) -> None:
    old, new = event_with(kind, before), event_with(kind, after)

    assert not is_read(old, new, value)
    assert breaking_changes(schema_of(old), schema_of(new))


@pytest.mark.parametrize(("kind", "before", "after", "value"), of_kinds(WIDENED, "struct", "model", "dataclass"))
def test_a_wider_type_is_accepted(kind: str, before: Any, after: Any, value: Any) -> None:
    old, new = event_with(kind, before), event_with(kind, after)

    assert is_read(old, new, value)
    assert breaking_changes(schema_of(old), schema_of(new)) == []


def test_an_alias_of_a_nested_model_is_compared() -> None:
    former, aliased = event_with("model", Former), event_with("model", Aliased)

    assert breaking_changes(schema_of(former), schema_of(aliased)) == []


def test_a_removed_alias_of_a_field_breaks_rows() -> None:
    both = {"properties": {"a": {"type": "integer", "x-outboxio-aliases": ["b"]}}, "type": "object"}
    one = {"properties": {"a": {"type": "integer"}}, "type": "object"}

    assert [change.text for change in breaking_changes(both, one)] == ["is no longer read as 'b'"]


def test_a_recursive_alias_is_compared_and_shown() -> None:
    schema = schema_of(event_with("model", Json))

    assert breaking_changes(schema, schema_of(event_with("model", Json))) == []
    assert [field.type for field in fields_of(schema)] == ["mapping to Json or list of Json or integer"]


class Refusing(Event):
    anything: object
    values: dict[str, object]

    def __post_init__(self) -> None:
        raise LookupError(self.anything)


def test_a_class_without_an_example_does_not_stop_the_others() -> None:
    types, classes = types_of(Refusing)

    assert (types[0].examples, set(types[0].schema or ())) == ((), {"title", "type", "properties", "required"})
    fault = decoding_error(classes["Refusing"], 1, b'{"anything": 1, "values": {}}')
    assert isinstance(fault, LookupError)


def test_mutually_recursive_types_are_compared_quickly() -> None:
    names = [f"Node{number}" for number in range(12)]
    space: dict[str, Any] = {"__name__": __name__}
    for name in names:
        fields = {f"to_{other}": f"list[{other}]" for other in names}
        space[name] = type(msgspec.Struct)(
            name, (msgspec.Struct,), {"__annotations__": fields, "__module__": __name__, **{one: [] for one in fields}}
        )
        globals()[name] = space[name]
    cls = event_with("struct", space["Node0"])
    schema = schema_of(cls)

    assert breaking_changes(schema, schema_of(cls)) == []
    assert len(fields_of(schema)) == 500
    assert len(str(examples_of(cls, schema))) < 10_000
