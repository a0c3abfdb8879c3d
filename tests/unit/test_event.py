from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec
import pytest

from outboxio import Action, AmbiguousTypeName, Event, InvalidEvent
from outboxio.model.event import (
    NAME_LENGTH,
    ActionRecord,
    EventRecord,
    EventTypes,
    checked_name,
    checked_text,
    type_name,
    type_names,
    with_subclasses,
)


class Opened(Event):
    wallet_id: int


class Renamed(Event, type_name="Old", aliases={"Older", "Oldest"}):
    pass


class Child(Renamed):
    pass


class Grandchild(Child, aliases=["Kid"]):
    pass


# --- classes ------------------------------------------------------------------------------------------


def test_an_event_is_a_frozen_struct() -> None:
    event = Opened(1)
    with pytest.raises(AttributeError):
        event.wallet_id = 2  # type: ignore[misc]
    assert event == Opened(1)
    assert hash(event) == hash(Opened(1))
    assert msgspec.json.decode(msgspec.json.encode(event), type=Opened) == event


def test_the_stored_name_is_the_class_name_or_the_declared_name() -> None:
    assert type_name(Opened) == "Opened"
    assert type_names(Opened) == {"Opened"}
    assert type_name(Renamed) == "Old"
    assert type_names(Renamed) == {"Old", "Older", "Oldest"}


def test_a_subclass_inherits_neither_name_nor_aliases() -> None:
    assert type_names(Child) == {"Child"}
    assert type_names(Grandchild) == {"Grandchild", "Kid"}


def test_actions_are_named_the_same_way() -> None:
    class Open(Action, type_name="OpenWallet"):
        pass

    class Close(Action):
        pass

    assert (Open.__type_name__, Close.__type_name__) == ("OpenWallet", "Close")


def test_struct_options_still_work() -> None:
    class Compact(Event, kw_only=True, omit_defaults=True, rename="camel"):
        wallet_id: int
        note: str = ""

    assert msgspec.json.encode(Compact(wallet_id=1)) == b'{"walletId":1}'


def test_subclasses_are_found_at_every_depth() -> None:
    assert set(with_subclasses(Renamed)) == {Renamed, Child, Grandchild}
    assert list(with_subclasses(Opened)) == [Opened]


# --- the classes of one outbox --------------------------------------------------------------------------


def test_a_class_is_found_by_each_of_its_names() -> None:
    types = EventTypes()
    assert types.register(Renamed) == types.register(Renamed) == "Old"
    assert [types.find(name) for name in ("Old", "Older", "Oldest")] == [Renamed] * 3
    assert types.find("Renamed") is types.find("Opened") is None


def test_a_second_class_with_the_same_name_is_refused_completely() -> None:
    class Other(Event, type_name="Another", aliases={"Oldest"}):
        pass

    types = EventTypes()
    types.register(Renamed)
    with pytest.raises(
        AmbiguousTypeName, match=r"event type 'Oldest': .*\.Renamed and .*\.Other share this name"
    ) as error:
        types.register(Other)
    assert (error.value.name, error.value.first, error.value.second) == ("Oldest", Renamed, Other)
    assert types.find("Another") is None
    assert types.find("Oldest") is Renamed


# --- names ------------------------------------------------------------------------------------------------


def test_a_value_that_fits_its_column_is_returned_unchanged() -> None:
    for text in ("a", " a ", "x" * NAME_LENGTH, "😀" * NAME_LENGTH, "é\n"):
        assert checked_name(text, "name") is text
        assert checked_text(text, "name") is text
    assert checked_text("", "name") == ""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x" * 256, "'" + "x" * 40 + "'... has 256 characters; the column holds 255"),
        ("a\0b", r"'a\x00b' contains NUL (U+0000), which text columns cannot store"),
        ("\ud800", r"'\ud800' contains a lone surrogate, which is not valid Unicode"),
        (None, "None is not a string"),
        (b"a", "b'a' is not a string"),
        (UUID(int=1), "UUID('00000000-0000-0000-0000-000000000001') is not a string"),
    ],
)
def test_a_value_too_long_for_its_column_is_refused_by_name(value: object, reason: str) -> None:
    for check in (checked_name, checked_text):
        with pytest.raises(InvalidEvent) as error:
            check(value, "topic of event X")
        assert str(error.value) == f"topic of event X: {reason}"
        assert (error.value.subject, error.value.reason) == ("topic of event X", reason)


@pytest.mark.parametrize("value", ["", " ", "\n\t"])
def test_a_name_must_not_be_blank(value: str) -> None:
    with pytest.raises(InvalidEvent, match="is blank"):
        checked_name(value, "name")


# --- records ----------------------------------------------------------------------------------------------


def test_a_sentinel_has_only_an_id() -> None:
    sentinel = EventRecord(id=UUID(int=1))
    values = msgspec.structs.asdict(sentinel)
    assert {name for name, value in values.items() if value is not None} == {"id"}


def test_completing_an_action_changes_only_its_completion_date() -> None:
    started, ended = datetime(2030, 1, 1), datetime(2030, 1, 2)
    record = ActionRecord(
        namespace="app", action_id=UUID(int=1), action_name="A", action_params="{}", started_date=started,
        completion_date=started, correlation_id="c", hops=3,
    )  # fmt: skip
    completed = record.completed(ended)
    assert msgspec.structs.asdict(completed) == msgspec.structs.asdict(record) | {"completion_date": ended}
    assert record.completion_date == started
