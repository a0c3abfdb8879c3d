"""Numbers are stored unchanged, or refused with their field, on every database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pymysql
import pytest

from outboxio import Event, EventEnvelope, InvalidEvent, Outbox
from outboxio.sync import Producer
from tests.kit import mysql
from tests.kit.app import Look
from tests.kit.probes import written

LARGE = 2**64
NUMBERS: tuple[Any, ...] = (
    0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, LARGE, -(2**63) - 1, 10**30, 10**400,
    0.0, -0.0, 0.1, 100.0, -0.5, 1e15, 1e16, 1.5e16, 123456789012345680.0, 1e22, 1e23, 1.7976931348623157e308,
    5e-324, 1e-7, 0.30000000000000004, 2.2250738585072014e-308,
)  # fmt: skip
CHANGED = {
    "postgres": (-0.0,),
    "mysql": (LARGE, -(2**63) - 1, 10**30, 10**400),
    "mariadb": (),
    "sqlite": (),
}


class Untyped(Event):
    value: Any = None
    deep: Any = None


class Whole(Event):
    value: int


class Real(Event):
    value: float


class Either(Event):
    value: int | float | str


class Priced(Event, json_style="ekbatan"):
    value: Decimal


def same(one: object, other: object) -> bool:
    """Equal, of the same type and with the same sign: 0.0 and -0.0 differ, as do 1 and 1.0."""
    return type(one) is type(other) and repr(one) == repr(other)


def is_changed(look: Look, number: Any) -> bool:
    return any(same(number, one) for one in CHANGED[look.dialect])


class Seen:
    """Collects what handlers received."""

    def __init__(self, outbox: Outbox, *kinds: type[Event]) -> None:
        self.envelopes: list[EventEnvelope[Any]] = []
        for kind in kinds:
            outbox.handler(kind, name=kind.__name__)(self.handle)

    async def handle(self, envelope: EventEnvelope[Any]) -> None:
        self.envelopes.append(envelope)


def shown(number: Any) -> str:
    return repr(number)[:40]


@pytest.mark.parametrize("number", NUMBERS, ids=shown)
async def test_a_number_is_stored_unchanged_or_refused_with_its_field(outbox: Outbox, look: Look, number: Any) -> None:
    seen = Seen(outbox, Untyped, Whole, Real, Either)
    kinds: list[Callable[[Any], Event]] = [Either, Whole if isinstance(number, int) else Real]
    events = [Untyped(number), Untyped(deep={"a": [number, "1e16,-0.0"]}), *(kind(number) for kind in kinds)]
    fields = ["value", "deep.a[0]", "value", "value"]
    document = {"a": {"b": number}}

    if not is_changed(look, number):
        async with outbox.transaction("Emit", document, headers=document) as tx:
            for event in events:
                tx.emit(event)
        await outbox.inbox.receive(source="s", external_id="1", type="Untyped", payload={"value": number})
        if abs(number) < 10**4300:  # as JSON text from a sender
            text = json.dumps({"value": number})
            await outbox.inbox.receive(source="s", external_id="2", type="Untyped", payload=text)
        await outbox.drain()
        assert len(seen.envelopes) == len(events) + 2
        for envelope in seen.envelopes:
            got = envelope.event
            value = got.deep["a"][0] if isinstance(got, Untyped) and got.deep is not None else got.value
            assert same(value, number)
            if envelope.action_name == "Emit":
                assert same(envelope.action_params["a"]["b"], number)
                assert same(envelope.headers["a"]["b"], number)
        return

    for event, field in zip(events, fields, strict=True):
        async with outbox.transaction("Emit") as tx:
            with refused(field):
                tx.emit(event)
    for options in ({"params": document}, {"headers": document}):
        with refused("a.b"):
            async with outbox.transaction("Emit", **options):  # type: ignore[arg-type]
                pass
    message: dict[str, Any] = {"source": "s", "external_id": "1", "type": "Untyped", "payload": {"value": number}}
    for payload in ({"value": number}, json.dumps({"value": number})):
        given: dict[str, Any] = {**message, "payload": payload}
        with refused("value"):
            await outbox.inbox.receive(**given)
        with refused("value"):
            await outbox.inbox.receive_many([given])
    assert await look.value("SELECT count(*) FROM {events} WHERE event_type IS NOT NULL") == 0


def refused(field: str) -> Any:
    path = field.replace("[", r"\[").replace("]", r"\]")
    return pytest.raises(InvalidEvent, match=rf": {path} is ")


DECIMALS = ("10.50", "-0.5", "0.1234567890123456789", "12345678901234567890", "9007199254740993.5", "1E+400", "1E-400",
            "1E+2", "99999999999999.9")  # fmt: skip
ROUNDED = ("0.1234567890123456789", "9007199254740993.5", "1E+400", "1E-400")


@pytest.mark.parametrize("text", DECIMALS)
async def test_a_decimal_number_keeps_its_value_or_is_refused(outbox: Outbox, look: Look, text: str) -> None:
    number, seen = Decimal(text), Seen(outbox, Priced)
    if look.dialect == "mysql" and text in ROUNDED:
        async with outbox.transaction("Emit") as tx:
            with refused("value"):
                tx.emit(Priced(number))
        return
    async with outbox.transaction("Emit") as tx:
        tx.emit(Priced(number))
    await outbox.drain()
    assert [envelope.event.value for envelope in seen.envelopes] == [number]


@pytest.mark.parametrize("text", ["1E+200000", "1E-20000"])
async def test_a_decimal_number_beyond_every_column_is_refused(outbox: Outbox, look: Look, text: str) -> None:
    if look.dialect not in ("postgres", "mysql"):
        return  # JSON is text there
    async with outbox.transaction("Emit") as tx:
        with refused("value"):
            tx.emit(Priced(Decimal(text)))


async def test_numbers_in_strings_are_not_numbers(outbox: Outbox) -> None:
    texts = ['1e16,"-0.0', ":-0.0,", "[1e16", "\\", '"', f":{LARGE},", "-0.0", "2026-01-05", "{:1e16}"]
    seen = Seen(outbox, Untyped)
    async with outbox.transaction("Emit") as tx:
        tx.emit(Untyped({text: [text, 1e16] for text in texts}))
    await outbox.drain()
    [envelope] = seen.envelopes
    assert envelope.event.value == {text: [text, 1e16] for text in texts}


@pytest.mark.parametrize("number", [LARGE, -0.0, 1e16, 0.1], ids=shown)
async def test_a_synchronous_producer_refuses_the_same_numbers(outbox: Outbox, look: Look, number: Any) -> None:
    seen, producer = Seen(outbox, Untyped), Producer("app")
    connection = blocking(look)
    try:
        if is_changed(look, number):
            with refused("value"):
                producer.record(connection, Untyped(number), action="Emit")
            return
        producer.record(connection, Untyped(number), action="Emit")
        connection.commit()
    finally:
        connection.close()
    await outbox.drain()
    [envelope] = seen.envelopes
    assert same(envelope.event.value, number)


def blocking(look: Look) -> Any:
    if look.is_file:
        return sqlite3.connect(look.url.removeprefix("sqlite:///"))
    if look.driver == "asyncpg":
        return psycopg.connect(look.url)
    options: Mapping[str, Any] = {k: v for k, v in mysql.address(look.url).items() if k != "db"}
    return pymysql.connect(**options, database=mysql.address(look.url).get("db"))


TIMES = (
    datetime(1, 1, 1), datetime(1, 1, 1, 0, 0, 0, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999),
    datetime(9999, 12, 31, 12, tzinfo=UTC),
)  # fmt: skip


@pytest.mark.parametrize("time", TIMES, ids=str)
async def test_the_earliest_and_latest_times_are_stored_unchanged(outbox: Outbox, look: Look, time: datetime) -> None:
    async with outbox.transaction("Emit") as tx:
        tx.emit(Untyped(time), available_at=time)
    [row] = await written(look)
    assert row["available_at"] == time.replace(tzinfo=None)
