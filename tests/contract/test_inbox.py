"""Messages of brokers and webhooks are stored once, however often they are delivered."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import Event, EventEnvelope, Filter, InvalidEvent, Outbox, Received
from tests.kit.app import Journal, Look, MoneyDeposited
from tests.kit.probes import add_wallet, doing, written

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

WALLET = UUID(int=7)
PAYLOAD = {"wallet_id": str(WALLET), "amount": "12"}


async def receive(outbox: Outbox, external_id: str = "m-1", *, source: str = "billing", **given: Any) -> Received:
    if "event" not in given:
        given = {"type": "MoneyDeposited", "payload": PAYLOAD, **given}
    return await outbox.inbox.receive(source=source, external_id=external_id, **given)


async def consumed(look: Look) -> list[dict[str, Any]]:
    return await look.fetch("SELECT * FROM {consumed_events} ORDER BY source, external_id")


async def test_a_received_message_is_handled_like_any_other_event(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)

    assert await receive(outbox, headers={"traceparent": "00-1"}, correlation_id="c-1") is Received.RECEIVED
    assert (await outbox.drain()).succeeded == 1

    (envelope,) = journal.envelopes
    assert envelope.event == MoneyDeposited(WALLET, Decimal(12))
    assert (envelope.headers, envelope.correlation_id) == ({"traceparent": "00-1"}, "c-1")
    assert envelope.action_params == {"source": "billing", "external_id": "m-1"}
    (row,) = await written(look)
    assert (row["source"], row["action_name"], row["event_type"]) == ("billing", "inbox.receive", "MoneyDeposited")


async def test_a_received_event_has_the_model_of_its_message(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    event = MoneyDeposited(WALLET, Decimal(12))

    await receive(outbox, model_type="Wallet", model_id=7)
    await receive(outbox, "m-2", event=event, model_type="Wallet", model_id=7)
    message = {"source": "billing", "external_id": "m-3", "event": event, "model_type": "Wallet", "model_id": 7}
    await outbox.inbox.receive_many([message])
    await outbox.inbox.consume(message, external_id="m-4")
    await outbox.drain()

    assert len(await outbox.admin.list(Filter(model_id="7"))) == 3
    assert {(row["model_type"], row["model_id"]) for row in await written(look)} == {("Wallet", "7")}
    with pytest.raises(InvalidEvent, match="not an object of a class mapped by SQLAlchemy"):
        await receive(outbox, "m-5", model=object())


async def test_a_redelivery_is_a_duplicate_and_changes_nothing(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)

    answers = [await receive(outbox) for _ in range(5)]
    await outbox.drain()

    assert answers == [Received.RECEIVED, *[Received.DUPLICATE] * 4]
    assert (len(await written(look)), len(await consumed(look)), len(journal)) == (1, 1, 1)


@pytest.mark.parametrize(
    "again",
    [
        {"payload": b'{"amount":"12",  "wallet_id":"00000000-0000-0000-0000-000000000007"}'},
        {"payload": '{"amount":"12","wallet_id":"00000000-0000-0000-0000-000000000007"}'},
        {"event": MoneyDeposited(WALLET, Decimal(12))},
    ],
    ids=["bytes", "text", "event"],
)
async def test_the_same_content_in_other_notation_is_a_duplicate(outbox: Outbox, again: dict[str, Any]) -> None:
    assert await receive(outbox) is Received.RECEIVED
    assert await receive(outbox, **again) is Received.DUPLICATE


@pytest.mark.parametrize("other", [{"payload": {**PAYLOAD, "amount": "13"}}, {"type": "MoneyWithdrawn"}], ids=str)
async def test_different_content_under_one_id_is_a_conflict(outbox: Outbox, look: Look, other: dict[str, Any]) -> None:
    assert await receive(outbox) is Received.RECEIVED
    assert await receive(outbox, **other) is Received.CONFLICT
    assert await receive(outbox) is Received.DUPLICATE

    assert outbox.inbox.conflicts == 1
    (row,) = await written(look)
    assert (row["event_type"], row["payload"]["amount"]) == ("MoneyDeposited", "12")


async def test_ids_belong_to_their_source_and_namespace(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, other = await make_outbox(), await make_outbox("another")
    assert await receive(outbox, source="billing") is Received.RECEIVED
    assert await receive(outbox, source="shipping") is Received.RECEIVED
    assert await receive(other, source="billing") is Received.RECEIVED
    assert await receive(other, source="billing") is Received.DUPLICATE
    assert len(await consumed(look)) == 3


async def test_simultaneous_deliveries_of_one_message_are_stored_once(outbox: Outbox, look: Look) -> None:
    answers = await asyncio.gather(*(receive(outbox, f"m-{n % 4}") for n in range(24)))
    assert sorted(answers) == [Received.DUPLICATE] * 20 + [Received.RECEIVED] * 4
    assert len(await written(look)) == 4


async def test_deduplication_outlasts_the_event(outbox: Outbox, look: Look) -> None:
    await receive(outbox)
    await look.fetch("DELETE FROM {events}")
    assert await receive(outbox) is Received.DUPLICATE
    assert await written(look) == []


async def test_many_deliveries_from_two_sources_have_one_effect_each(outbox: Outbox, look: Look) -> None:
    effects: list[tuple[str, str]] = []

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        source = str(envelope.action_params["source"])
        await add_wallet(envelope.tx, hashlib.sha256(f"{source}{envelope.model_id}{uuid4()}".encode()).hexdigest()[:36])
        effects.append((source, str(envelope.action_params["external_id"])))

    for _ in range(5):
        await asyncio.gather(*(receive(outbox, f"m-{n}", source=s) for n in range(20) for s in ("one", "two")))
    await outbox.drain()

    assert len(await written(look)) == len(effects) == len(set(effects)) == 40
    assert await look.value("SELECT count(*) FROM wallets") == 40


async def test_messages_are_stored_in_the_callers_transaction(outbox: Outbox, look: Look) -> None:
    """The message commits with all writes of that transaction, here those of an action."""

    async def receive_and_fail(tx: Any) -> None:
        await receive(outbox, connection=tx.connection)
        assert await receive(outbox, connection=tx.connection) is Received.DUPLICATE
        raise ValueError("and back")

    async def receive_it(tx: Any) -> Received:
        return await receive(outbox, connection=tx.connection)

    with pytest.raises(ValueError, match="and back"):
        await outbox.executor.execute(doing(receive_and_fail))
    assert (await written(look), await consumed(look)) == ([], [])
    assert await outbox.executor.execute(doing(receive_it)) is Received.RECEIVED
    assert await receive(outbox) is Received.DUPLICATE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"external_id": " "}, "external_id of 'billing': ' ' is blank"),
        ({"source": ""}, "source: '' is blank"),
        ({"external_id": "x" * 256}, "has 256 characters; the column holds 255"),
        ({"payload": "{"}, "is not valid JSON"),
        ({"payload": "[1]"}, "not a JSON object"),
        ({"payload": b"\xff"}, "is not valid JSON"),
        ({"payload": {"a": float("nan")}}, "JSON cannot hold"),
        ({"type": None}, "pass either event=, or type= and payload="),
        ({"event": MoneyDeposited(WALLET, Decimal(1)), "payload": {}}, "pass either event=, or type= and payload="),
        ({"event": MoneyDeposited(WALLET, Decimal(1)), "type": "X"}, "pass either event=, or type= and payload="),
        ({"topic": ""}, "is blank"),
        ({"available_at": "tomorrow"}, "is not a datetime"),
    ],
    ids=str,
)
async def test_invalid_messages_are_refused_before_anything_is_written(
    outbox: Outbox, look: Look, given: dict[str, Any], expected: str
) -> None:
    arguments = {"source": "billing", "external_id": "m-1", **given}
    if "event" not in given:
        arguments = {"type": "MoneyDeposited", "payload": PAYLOAD, **arguments}
    with pytest.raises(InvalidEvent, match=expected.replace("(", r"\(")):
        await outbox.inbox.receive(**arguments)
    assert (await written(look), await consumed(look)) == ([], [])


async def test_a_topic_reaches_its_handlers_with_unknown_types(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(name="fraud", topic="FRAUD")(journal)
    await receive(outbox, type="SomethingNew", payload={"a": 1}, topic="FRAUD", ordering_key="u-1")
    await outbox.drain()
    assert [envelope.event for envelope in journal.envelopes] == [{"a": 1}]


class Renamed(Event, type_name="Named"):
    number: int


async def test_an_event_class_provides_its_name(outbox: Outbox, look: Look) -> None:
    await receive(outbox, event=Renamed(3))
    (row,) = await written(look)
    assert (row["event_type"], row["payload"]) == ("Named", {"number": 3})
