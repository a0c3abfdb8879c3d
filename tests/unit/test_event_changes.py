"""Changes of event classes against a lock file: compatible and breaking ones."""

# ruff: noqa: RUF012  # defaults of structs are copied
from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from msgspec import Meta
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

import outboxio
from outboxio import Event
from outboxio.catalogue.lock import BreakingChange, Lock, check, locked, read_lock
from outboxio.errors import ConfigurationError
from tests.kit.event_catalogue import types_of


def lock_of(*classes: Any, former: Lock | None = None) -> Lock:
    types, by_name = types_of(*classes)
    return locked(types, former or Lock({}), by_name)


def changes(before: Any, *after: Any) -> list[BreakingChange]:
    types, by_name = types_of(*after)
    return check(types, lock_of(before), by_name)


class Line(msgspec.Struct):
    sku: str
    price: int | None = None


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Placed(Event):
    order: int
    email: str
    colour: Colour = Colour.RED
    quantity: Annotated[int, Meta(ge=1)] = 1
    note: Annotated[str, Meta(max_length=100)] | None = None
    lines: list[Line] = []


# --- ten breaking changes -------------------------------------------------------------------------


class WithoutEmail(Event, type_name="Placed"):
    order: int
    colour: Colour = Colour.RED
    quantity: Annotated[int, Meta(ge=1)] = 1
    note: Annotated[str, Meta(max_length=100)] | None = None
    lines: list[Line] = []


class WithMail(WithoutEmail, type_name="Placed", kw_only=True):
    mail: str


class WithShop(Placed, type_name="Placed", kw_only=True):
    shop: str


class RequiredColour(Placed, type_name="Placed", kw_only=True):
    colour: Colour


class TextOrder(Placed, type_name="Placed", kw_only=True):
    order: str  # type: ignore[assignment]  # the change of type is the point


class NoBlue(Placed, type_name="Placed"):
    colour: Literal["red"] = "red"  # type: ignore[assignment]


class AtLeastTwo(Placed, type_name="Placed"):
    quantity: Annotated[int, Meta(ge=2)] = 2


class ShortNote(Placed, type_name="Placed"):
    note: Annotated[str, Meta(max_length=50)] | None = None


class NeverNullNote(Placed, type_name="Placed"):
    note: Annotated[str, Meta(max_length=100)] = ""


class PricedLine(msgspec.Struct):
    sku: str
    price: int = 0


class PricedLines(Placed, type_name="Placed"):
    lines: list[PricedLine] = []  # type: ignore[assignment]


class Renamed(Event):
    order: int
    email: str
    colour: Colour = Colour.RED
    quantity: Annotated[int, Meta(ge=1)] = 1
    note: Annotated[str, Meta(max_length=100)] | None = None
    lines: list[Line] = []


class SecondWithoutUpcaster(Placed, type_name="Placed", version=2):
    pass


BREAKING = [
    (WithoutEmail, "email", "was removed", "keep the field, or set version=2"),
    (WithMail, "email", "was renamed to 'mail'", "msgspec.field(name='email')"),
    (WithShop, "shop", "was added and is required", "give the field a default"),
    (RequiredColour, "colour", "was made required", "give the field a default"),
    (TextOrder, "order", "accepted integer, but now accepts only string", "keep accepting the old values"),
    (NoBlue, "colour", "no longer accepts 'blue'", "keep 'blue'"),
    (AtLeastTwo, "quantity", "minimum is 2 (was 1)", "keep accepting the old values"),
    (ShortNote, "note", "maxLength is 50 (was 100)", "keep accepting the old values"),
    (NeverNullNote, "note", "no longer accepts null", "keep accepting null"),
    (PricedLines, "lines[].price", "no longer accepts null", "keep accepting null"),
    (Renamed, None, "was renamed to Renamed without an alias", "give Renamed aliases={'Placed'}"),
    (SecondWithoutUpcaster, None, "rows of version 1 have no upcaster from version 1", "@outboxio.upcaster(Placed"),
]


@pytest.mark.parametrize(("after", "field", "change", "fix"), BREAKING, ids=lambda one: getattr(one, "__name__", ""))
def test_a_breaking_change_names_event_field_and_fix(after: Any, field: str | None, change: str, fix: str) -> None:
    found = [one for one in changes(Placed, after) if one.field == field]

    assert [one.event for one in found] == ["Placed"]
    assert change in found[0].change
    assert fix in found[0].fix
    assert str(found[0]).startswith("Placed, field " if field else "Placed ")


def test_each_breaking_change_is_reported_once() -> None:
    assert {after.__name__: len(changes(Placed, after)) for after, *_ in BREAKING} == {
        after.__name__: 2 if after is WithMail else 1 for after, *_ in BREAKING
    }


def test_a_lowered_version_breaks_newer_rows() -> None:
    [found] = changes(SecondWithoutUpcaster, Placed)

    assert found.change == "went from version 2 back to 1"
    assert "set version=2 again" in found.fix


def test_a_removed_alias_breaks_older_rows() -> None:
    [found] = changes(Aliased, Placed)

    assert (found.change, found.fix) == (
        "no longer reads rows of its alias 'Ordered'", "add 'Ordered' to the aliases of Placed",
    )  # fmt: skip


def test_a_removed_class_must_stay_registered() -> None:
    [found] = changes(Placed)

    assert found.change == "was removed"
    assert "outbox.register" in found.fix


# --- ten harmless changes -------------------------------------------------------------------------


class OptionalField(Placed, type_name="Placed"):
    shop: str = "main"


class WiderType(Placed, type_name="Placed", kw_only=True):
    order: int | str  # type: ignore[assignment]


class Fractions(Placed, type_name="Placed", kw_only=True):
    order: float  # type: ignore[assignment]


class MoreColours(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class NewColour(Placed, type_name="Placed"):
    colour: MoreColours = MoreColours.RED  # type: ignore[assignment]


class AnyQuantity(Placed, type_name="Placed"):
    quantity: int = 1


class LongNote(Placed, type_name="Placed"):
    note: Annotated[str, Meta(max_length=500)] | None = None


class DefaultEmail(Placed, type_name="Placed"):
    email: str = ""


class Aliased(Placed, type_name="Placed", aliases={"Ordered"}):
    pass


class Successor(Placed, aliases={"Placed"}):
    pass


class FieldInCode(WithoutEmail, type_name="Placed", kw_only=True):
    mail: str = msgspec.field(name="email")


class Documented(Placed, type_name="Placed"):
    """An order was placed in the shop."""


class Second(WithoutEmail, type_name="Placed", version=2, kw_only=True):
    mail: str


@outboxio.upcaster(Second, from_version=1)
def with_mail(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "mail": stored["email"]}


@outboxio.event("Placed")
@dataclasses.dataclass
class Reordered:
    lines: list[Line]
    email: str
    order: int
    note: Annotated[str, Meta(max_length=100)] | None = None
    quantity: Annotated[int, Meta(ge=1)] = 1
    colour: Colour = Colour.RED


HARMLESS = [
    OptionalField, WiderType, Fractions, NewColour, AnyQuantity, LongNote, DefaultEmail, Aliased, Successor,
    FieldInCode, Documented, Second,
]  # fmt: skip


@pytest.mark.parametrize("after", HARMLESS)
def test_a_harmless_change_is_accepted(after: Any) -> None:
    assert changes(Placed, after) == []


def test_a_new_event_type_is_harmless() -> None:
    assert changes(Placed, Placed, Other) == []


class Other(Event):
    number: int


def test_a_field_that_lost_its_default_breaks_dataclass_rows() -> None:
    [found] = changes(Placed, Reordered)

    assert (found.field, found.change) == ("lines", "was made required")


# --- Pydantic -------------------------------------------------------------------------------------


@outboxio.event("Paid")
class Paid(BaseModel):
    order: int
    email: str
    by: Literal["card", "cash"] = "card"


@outboxio.event("Paid")
class PaidByCard(BaseModel):
    order: int
    email: str
    by: Literal["card"] = "card"


@outboxio.event("Paid")
class PaidClosed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    order: int
    email: str
    by: Literal["card", "cash"] = "card"


@outboxio.event("Paid")
class PaidAlias(BaseModel):
    order: int
    mail: str = Field(validation_alias=AliasChoices("mail", "email"), serialization_alias="mail")
    by: Literal["card", "cash"] = "card"


def test_a_pydantic_model_is_compared_the_same_way() -> None:
    assert [(one.field, one.change) for one in changes(Paid, PaidByCard)] == [("by", "no longer accepts 'cash'")]
    assert [one.change for one in changes(Paid, PaidClosed)] == ["no longer accepts unknown fields"]
    assert changes(Paid, PaidAlias) == []
    assert changes(Paid, Paid) == []


# --- examples -------------------------------------------------------------------------------------


class Weighed(Event):
    grams: int


class WeighedSecond(Event, type_name="Weighed", version=2):
    kilograms: float


@outboxio.upcaster(WeighedSecond, from_version=1)
def in_kilograms(stored: dict[str, Any]) -> dict[str, Any]:
    return {"kilograms": stored["grammes"] / 1000}


def test_examples_of_older_versions_pass_through_the_upcasters() -> None:
    [found] = changes(Weighed, WeighedSecond)

    assert found.event == "Weighed"
    assert "an example of version 1 can no longer be read" in found.change
    assert "raised KeyError: 'grammes'" in found.change
    assert "@outboxio.upcaster(Weighed, from_version=1)" in found.fix


class Checked(Event):
    number: int


class CheckedInCode(Event, type_name="Checked"):
    number: int

    def __post_init__(self) -> None:
        if self.number < 10:
            raise ValueError("the number is too small")


def test_a_changed_validation_rule_is_found_by_the_examples() -> None:
    [found] = changes(Checked, CheckedInCode)

    assert "the number is too small" in found.change


class Hooked(Event):
    number: Annotated[str, Meta(pattern="^[A-Z]{3}-[0-9]+$")]
    kind: ClassVar[str] = "hooked"

    @classmethod
    def __examples__(cls) -> list[Hooked]:
        return [cls("ABC-1"), cls("XYZ-2")]


class Patterned(Event):
    number: Annotated[str, Meta(pattern="^[A-Z]{3}-[0-9]+$")]


def test_a_class_supplies_its_own_examples() -> None:
    assert types_of(Hooked)[0][0].examples == ({"number": "ABC-1"}, {"number": "XYZ-2"})
    assert types_of(Patterned)[0][0].examples == ()


class Tree(Event):
    name: str
    children: list[Tree] = []
    parent: Tree | None = None


def test_a_recursive_type_has_an_example_and_is_compared() -> None:
    [one], _ = types_of(Tree)

    assert [sorted(example) for example in one.examples] == [["children", "name", "parent"]]
    assert changes(Tree, Tree) == []


def test_writing_keeps_examples_of_older_versions() -> None:
    lock = lock_of(Second, former=lock_of(Placed))

    assert sorted(lock.events["Placed"].versions) == [1, 2]
    assert lock.events["Placed"].versions[1].examples == list(types_of(Placed)[0][0].examples)


def test_writing_accepts_a_breaking_change() -> None:
    lock = lock_of(TextOrder, former=lock_of(Placed))
    types, classes = types_of(TextOrder)

    assert check(types, lock, classes) == []


def test_a_rename_keeps_the_versions_under_the_new_name() -> None:
    lock = lock_of(Successor, former=lock_of(Placed))

    assert list(lock.events) == ["Successor"]
    assert [one.change for one in check(*_swapped(Renamed, lock))] != []


def _swapped(cls: Any, lock: Lock) -> tuple[Any, Lock, Any]:
    types, classes = types_of(cls)
    return types, lock, classes


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 2, "events": {}}',
        "{}",
        '{"asyncapi": "3.0.0"}',
        '{"format": 1, "events": {"Placed": {"version": 2, "aliases": [], "versions": {"1": {}}}}}',
    ],
)
def test_an_unreadable_lock_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "wrong.json").write_text(text)

    with pytest.raises(ConfigurationError, match="is not a lock file"):
        read_lock(tmp_path / "wrong.json")
    with pytest.raises(ConfigurationError, match="outboxio events --write"):
        read_lock(tmp_path / "none.json")
