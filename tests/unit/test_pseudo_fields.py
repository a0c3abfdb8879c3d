"""Fields of a dataclass that are not stored: ``ClassVar`` and ``InitVar``."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import pytest
from pydantic.dataclasses import dataclass as pydantic_dataclass

import outboxio
from outboxio import EventEnvelope, InvalidEvent, RegistrationError
from outboxio.testing import emitted, expect_event, memory_outbox


@dataclass
class Base:
    unit: ClassVar[str] = "cent"
    raw: InitVar[int] = 3


@outboxio.event
@dataclass
class Paid(Base):
    number: int = 1
    tags: list[str] = field(default_factory=list)
    version: ClassVar[int] = 3


@outboxio.event
@dataclass(frozen=True, slots=True)
class FrozenPaid:
    number: int
    raw: InitVar[int]
    version: ClassVar[int] = 3


@outboxio.event
@pydantic_dataclass
class PydanticPaid:
    number: int
    raw: InitVar[int] = 3
    version: ClassVar[int] = 3


EVENTS = (Paid(number=7, tags=["a"], raw=5), FrozenPaid(7, raw=5), PydanticPaid(7, raw=5))


@pytest.mark.parametrize("event", EVENTS)
async def test_a_pseudo_field_is_not_stored_and_does_not_prevent_reading(event: Any) -> None:
    seen: list[Any] = []
    async with memory_outbox() as outbox:

        @outbox.handler(type(event), name="reads")
        async def reads(envelope: EventEnvelope[Any]) -> None:
            seen.append(envelope.event)

        async with outbox.transaction("Pay") as tx:
            tx.emit(event)
        assert (await outbox.drain()).succeeded == 1
        assert seen == await emitted(outbox, type(event)) == [event]
        assert seen[0].version == 3
        with pytest.raises(InvalidEvent, match="no field 'version'"):
            await expect_event(outbox, type(event), version=3)


async def test_a_wrong_value_is_refused_despite_a_pseudo_field() -> None:
    async with memory_outbox() as outbox:
        with pytest.raises(InvalidEvent, match="number"):
            async with outbox.transaction("Pay") as tx:
                tx.emit(FrozenPaid("x", raw=5))  # type: ignore[arg-type]  # the point of the test


def test_an_error_in_a_class_with_init_var_names_the_field() -> None:
    @dataclass
    class Part:
        number: int
        raw: InitVar[int] = 3

    @dataclass
    class Whole:
        part: Any

    Whole.__annotations__["part"] = Part
    with pytest.raises(RegistrationError, match=r"field 'part': .*InitVar"):
        outboxio.event(Whole)


@dataclass
class Described:
    number: int
    unit: ClassVar[str] = "\ud800"


def test_a_pseudo_field_is_not_validated_as_a_value() -> None:
    from outboxio.model.payloads.classes import encode_any

    assert encode_any(Described(1), "params", stores_nul=False) == '{"number":1}'
