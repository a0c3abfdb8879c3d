"""An event is validated against its own types before it is written; only undecodable events are refused."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import new_class
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID, uuid4

import msgspec
import pytest

from outboxio import Event, InvalidEvent, Outbox, Settings
from outboxio.model.emitter import Emitter
from outboxio.model.event import EventTypes
from outboxio.testing import memory_outbox

if TYPE_CHECKING:
    from uuid import UUID as OnlyForTypeCheckers


def emitter(*, validates: bool = True) -> Emitter:
    return Emitter(EventTypes(), stores_nul=False, max_hops=32, validates=validates)


def refusal(event: Event) -> str:
    with pytest.raises(InvalidEvent) as caught:
        emitter().record(event)
    return str(caught.value)


# --- what is refused -----------------------------------------------------------------------------


class Line(msgspec.Struct):
    price: Decimal
    count: Annotated[int, msgspec.Meta(gt=0)] = 1


class Placed(Event):
    order_id: UUID
    lines: list[Line] = msgspec.field(default_factory=list)
    by_day: dict[str, int] = msgspec.field(default_factory=dict)


class Renamed(Event, rename="camel"):
    order_id: UUID


class Aware(Event):
    happened: Annotated[datetime, msgspec.Meta(tz=True)]


class Checked(Event):
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise ValueError(f"first is {self.first}, last is {self.last}")


class Grumpy(Event):
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise LookupError


def changed(event: Event, **fields: Any) -> Any:
    """An event that was changed after its ``__post_init__``."""
    for name, value in fields.items():
        msgspec.structs.force_setattr(event, name, value)
    return event


ID = UUID("018f3f9a-0000-7000-8000-000000000000")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            Placed(None),
            "event Placed: its fields do not match their types: Expected `uuid`, got `None` - at `$.order_id`",
        ),
        (Placed("x"), "Invalid UUID - at `$.order_id`"),
        (Placed(7), "Expected `uuid`, got `int` - at `$.order_id`"),
        (Placed(ID, [Line(Decimal(1)), Line(None)]), "got `None` - at `$.lines[1].price`"),
        (Placed(ID, [Line(Decimal(1), 0)]), "Expected `int` >= 1 - at `$.lines[0].count`"),
        (Placed(ID, [], {"a": "b"}), "Expected `int`, got `str` - at `$.by_day[...]`"),
        (Placed(ID, "none"), "Expected `array`, got `str` - at `$.lines`"),
        (Renamed(None), "got `None` - at `$.orderId`"),
        (Aware(datetime(2026, 1, 1)), "at `$.happened`"),
        (changed(Checked(1, 1), first=2), "first is 2, last is 1"),
        (changed(Grumpy(1), value=-1), "its fields do not match their types: LookupError"),
    ],
)  # fmt: skip
def test_an_undecodable_event_is_refused_with_the_path_of_its_field(event: Event, message: str) -> None:
    assert message in refusal(event)


def test_a_validated_class_reports_every_error_again() -> None:
    ours = emitter()
    for _ in range(2):
        ours.record(Placed(ID))
        with pytest.raises(InvalidEvent, match=r"\$\.order_id"):
            ours.record(Placed(None))  # type: ignore[arg-type]  # which is the point


class Unfit(Event):
    line: TypeError


class Unresolved(Event):
    id: OnlyForTypeCheckers


def test_a_class_with_an_unsupported_field_is_refused_at_first_use() -> None:
    assert "event Unfit: its field 'line' is of type builtins.TypeError, which JSON cannot hold" in refusal(Unfit(ID))  # type: ignore[arg-type]  # it never comes to that


def test_a_class_with_unresolvable_types_is_refused_at_first_use() -> None:
    message = refusal(Unresolved(ID))

    assert (
        "event Unresolved: the type of a field cannot be resolved: name 'OnlyForTypeCheckers' is not defined" in message
    )
    assert "import the type at run time" in message


# --- what is not ---------------------------------------------------------------------------------


class Kind(enum.Enum):
    OPEN = "open"


class Level(enum.IntEnum):
    LOW = 1


class Cat(msgspec.Struct, tag=True):
    name: str


class Dog(msgspec.Struct, tag="hound", rename="camel"):
    loud_name: str


class BigDog(Dog):
    size: int = 3


@dataclass
class Data:
    value: int


class Pair(NamedTuple):
    left: int
    right: str


class Typed(TypedDict, total=False):
    value: int


class Tree(msgspec.Struct):
    children: list[Tree] = msgspec.field(default_factory=list)


VALID: list[tuple[Any, Any]] = [
    (float, 1), (float, 1.5), (int, 2**60), (Decimal, Decimal("1.50")), (Decimal, 3),
    (Decimal, 1.5), (Decimal, Decimal("NaN")), (Decimal, "2.5"), (UUID, uuid4()), (UUID, str(uuid4())),
    (datetime, datetime(2026, 1, 1)), (datetime, datetime(2026, 1, 1, tzinfo=UTC)), (datetime, "2026-01-01T00:00:00Z"),
    (date, date(2026, 1, 1)), (time, time(12, 30)), (timedelta, timedelta(days=1, microseconds=3)), (bytes, b"\0\xff"),
    (str, Kind.OPEN), (Kind, Kind.OPEN), (Level, Level.LOW), (Level, 1), (Literal["a", 1], 1), (Any, "text"),
    (Any, {"a": [None, 1.5]}), (Any, None), (object, [1]), (dict[int, str], {1: "a"}), (dict[UUID, int], {uuid4(): 1}),
    (dict[Kind, int], {Kind.OPEN: 1}), (dict[date, int], {date(2026, 1, 1): 1}), (set[int], {1, 2}),
    (list[int], (1, 2)),
    (frozenset[str], frozenset({"a"})), (tuple[int, str], (1, "a")), (tuple[int, ...], [1, 2]), (Cat | Dog, Cat("a")),
    (Cat | Dog, Dog("b")), (Dog, BigDog("c")), (Data, Data(1)), (Pair, Pair(1, "a")), (Typed, {"value": 1}),
    (Typed, {}),
    (Tree, Tree([Tree()])), (int | None, None), (Annotated[int, msgspec.Meta(ge=0)], 0),
    (msgspec.Raw, msgspec.Raw(b"1")),
    (int | str, "a"), (bool, True),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VALID)))
def test_a_decodable_event_is_never_refused(number: int) -> None:
    kind, value = VALID[number]
    cls: Any = new_class(f"Of{number}", (Event,), {}, lambda body: body.update(__annotations__={"value": kind}))

    record = emitter().record(cls(value))

    assert msgspec.json.decode(record.payload or "", type=cls).__class__ is cls


class Frugal(Event, omit_defaults=True):
    a: int = 1
    b: list[int] = msgspec.field(default_factory=list)


class Strict(Event, forbid_unknown_fields=True, kw_only=True, tag="strict"):
    a: int


class Upcast(Event):
    """Reads rows of an older version."""

    name: str = ""
    first_name: str | None = None

    def __post_init__(self) -> None:
        if self.first_name is not None and not self.name:
            msgspec.structs.force_setattr(self, "name", self.first_name)


def test_all_ways_to_define_a_class_are_equal() -> None:
    for event in (Frugal(), Frugal(b=[1]), Strict(a=1), Upcast(first_name="Ada"), Renamed(ID)):
        assert emitter().record(event).payload


def test_without_validation_nothing_is_checked() -> None:
    ours = emitter(validates=False)

    assert ours.record(Placed(None)).payload == '{"order_id":null,"lines":[],"by_day":{}}'  # type: ignore[arg-type]
    assert ours.record(Unresolved(ID)).payload
    with pytest.raises(InvalidEvent, match="Encoding objects of type TypeError is unsupported - at `line`"):
        ours.record(Unfit(TypeError()))


# --- where it is set -----------------------------------------------------------------------------


async def test_the_setting_disables_validation() -> None:
    for validates in (True, False):
        async with Outbox("sqlite://", namespace="app", settings=Settings(validate_events=validates)) as outbox:
            await outbox.migrate()
            refused = False
            try:
                async with outbox.transaction("Place") as tx:
                    tx.emit(Placed(None))  # type: ignore[arg-type]  # which is the point
            except InvalidEvent:
                refused = True
            assert refused is validates


async def test_an_outbox_for_tests_always_validates() -> None:
    async with memory_outbox(settings=Settings(validate_events=False, concurrency=7)) as outbox:
        assert outbox.settings.concurrency == 7
        async with outbox.transaction("Place") as tx:
            with pytest.raises(InvalidEvent, match=r"\$\.order_id"):
                tx.emit(Placed(None))  # type: ignore[arg-type]  # which is the point
