"""Versions of events: what is refused at registration, and rows that cannot be upcast to the current version."""

from __future__ import annotations

from typing import Any

import pytest

import outboxio
from outboxio import Event, EventEnvelope, InvalidEvent, Outbox, RegistrationError, RetryPolicy
from outboxio.model.payloads.classes import is_marked, with_own
from outboxio.testing import memory_outbox


def same(stored: dict[str, Any]) -> dict[str, Any]:
    return stored


async def nothing(envelope: Any) -> None: ...


def test_a_gap_between_upcasters_is_refused_at_registration() -> None:
    class Counted(Event, version=4):
        number: int

    class Derived(Counted): ...

    outbox = Outbox("sqlite://", namespace="app")
    outbox.handler(Counted, name="without-upcasters")(nothing)
    outboxio.upcaster(Counted, from_version=1)(same)
    outboxio.upcaster(Counted, from_version=3)(same)
    with pytest.raises(RegistrationError, match=r"version 4, but there is no upcaster from version 2: .*=2"):
        outbox.handler(Counted, name="h")(nothing)
    with pytest.raises(RegistrationError, match="there is no upcaster from version 2"):
        outbox.register(Counted)
    outboxio.upcaster(Counted, from_version=2)(same)
    outbox.handler(Counted, name="h")(nothing)


def test_an_upcaster_without_a_next_version_or_a_duplicate_is_refused() -> None:
    class Counted(Event, version=2):
        number: int

    for version in (0, 2, True, "1"):
        with pytest.raises(RegistrationError, match=r"from_version is .*, and the class has version 2"):
            outboxio.upcaster(Counted, from_version=version)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="expected an event class"):
        outboxio.upcaster(int, from_version=1)  # type: ignore[arg-type]
    outboxio.upcaster(Counted, from_version=1)(same)
    with pytest.raises(RegistrationError, match="two upcasters from version 1"):
        outboxio.upcaster(Counted, from_version=1)(lambda stored: stored)


@pytest.mark.parametrize("version", [0, -1, True, "2", 1.5, 10**9])
def test_an_invalid_version_is_refused(version: Any) -> None:
    with pytest.raises(InvalidEvent, match="version of Counted"):

        class Counted(Event, version=version):
            number: int


async def test_the_version_key_is_reserved() -> None:
    class Counted(Event):
        number: int

    headers = {"outboxio-event-version": 2}
    async with memory_outbox() as outbox:
        with pytest.raises(InvalidEvent, match="reserved"):
            async with outbox.transaction("Do", headers=headers):
                pass
        message: dict[str, Any] = {"source": "s", "external_id": "1", "headers": headers}
        with pytest.raises(InvalidEvent, match="reserved"):
            await outbox.inbox.receive(**message, event=Counted(1))
        with pytest.raises(InvalidEvent, match=r"version of .*None"):
            await outbox.inbox.receive(source="s", external_id="1", type="X", payload={}, version=None)  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent, match="the class of event= already has a version"):
            await outbox.inbox.receive(source="s", external_id="1", event=Counted(1), version=2)


class Versioned(Event, type_name="Versioned", version=3):
    number: int


@outboxio.upcaster(Versioned, from_version=1)
def fails(stored: dict[str, Any]) -> dict[str, Any]:
    if stored["number"] == 1:
        raise ValueError("the secret")
    return None if stored["number"] == 2 else stored  # type: ignore[return-value]


@outboxio.upcaster(Versioned, from_version=2)
def makes_text(stored: dict[str, Any]) -> dict[str, Any]:
    return {"number": "text"}


class Sparse(Event, version=2):
    number: int


@pytest.mark.parametrize(
    ("cls", "number", "message"),
    [
        (Versioned, 1, "Versioned of version 1: the upcaster 'fails' from version 1 raised ValueError: the secret"),
        (Versioned, 2, "Versioned of version 1: the upcaster 'fails' from version 1 returned a NoneType"),
        (
            Versioned,
            3,
            "the upcasters did not produce a valid event of version 3: Expected `int`, got `str` - at `$.number`",
        ),
        (Sparse, 1, "Sparse of version 1: there is no upcaster from version 1; write one with from_version=1"),
    ],
)
async def test_a_row_that_cannot_be_upcast_fails_like_an_undecodable_row(
    cls: type[Event], number: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory_outbox() as outbox:
        outbox.handler(cls, name="h", retry=RetryPolicy(max_attempts=1))(nothing)
        payload = {"number": number}
        await outbox.inbox.receive(source="s", external_id="1", type=cls.__name__, payload=payload)
        assert (await outbox.drain()).dead == 1
        (row,) = await outbox.admin.list("DEAD")
        assert message in row.errors[0]["message"]  # type: ignore[operator]
        assert "the secret" not in caplog.text


async def test_the_hook_of_a_newer_version_row_waits_for_newer_code() -> None:
    class Counted(Event, type_name="Counted"):
        number: int

    class Newer(Event, type_name="Counted", version=2):
        number: int

    hooks: list[Any] = []
    async with memory_outbox() as outbox:

        async def on_dead(envelope: EventEnvelope[Any], error: Exception) -> None:
            hooks.append(envelope.event)

        outbox.handler(Counted, name="h", on_dead=on_dead)(nothing)
        await outbox.inbox.receive(source="s", external_id="1", type="Counted", version=2, payload={"number": 1})
        await outbox.drain()
        (row,) = await outbox.admin.list()
        async with outbox.transaction("Break") as tx:
            await tx.execute("UPDATE eventlog_event_notifications SET state = 'DYING', next_retry_at = created_date")
        await outbox.drain()
        (row,) = await outbox.admin.list()
        assert (str(row.state), hooks) == ("DYING", [])


def test_the_headers_of_an_event_extend_those_of_its_action() -> None:
    own = '{"outboxio-event-version":2}'
    assert with_own(None, own) == own
    assert with_own('{"a":1}', own) == '{"a":1,"outboxio-event-version":2}'
    assert with_own('{"a":1}', None) == '{"a":1}'
    assert is_marked(f"[{own}]")
    assert is_marked(f"[{own}]".encode())
    assert not is_marked(b"[]")
