"""Tables and JSON shared with Ekbatan: defaults for external writers, keys, decimals, enums, parameters."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec
import pytest

from outboxio import Event, EventEnvelope, InvalidEvent, Outbox
from outboxio.model.payloads.classes import decoder_of, encoder_of
from outboxio.support.clock import utc_now
from tests.kit.app import Look
from tests.kit.probes import MakeOutbox

LONG = Decimal("1000000000000000000000125.7234000")
FOREIGN = """
INSERT INTO {event_notifications} (id, event_id, handler_name, namespace, action_id, action_name, action_params,
  started_date, completion_date, model_id, model_type, event_type, payload, event_date, state, attempts, next_retry_at,
  created_date, updated_date)
SELECT id, id, 'journal', namespace, action_id, action_name, action_params, started_date, completion_date, model_id,
  model_type, event_type, payload, event_date, 'PENDING', 0, event_date, event_date, event_date FROM {events}
"""


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Painted(Event, json_style="ekbatan"):
    wallet_id: str
    amount: Decimal
    colour: Colour | None
    many: dict[Colour, list[Colour]]


class Named(Event, json_style="ekbatan"):
    model_id: str
    model_name: str
    amount: Decimal


PAINTED = Painted("w", LONG, Colour.RED, {Colour.BLUE: [Colour.RED]})


def test_a_payload_in_ekbatan_style_is_decoded_again() -> None:
    text = encoder_of(Painted)(PAINTED, "event Painted", stores_nul=True)

    assert text == f'{{"walletId":"w","amount":{LONG},"colour":"RED","many":{{"BLUE":["RED"]}}}}'
    assert decoder_of(Painted)(text) == PAINTED


def test_an_unknown_member_name_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="expected one of RED, BLUE"):
        decoder_of(Painted)('{"walletId":"w","amount":1,"colour":"red","many":{}}')


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(InvalidEvent, match="'jackson' is not a style; expected 'ekbatan'"):

        class Other(Event, json_style="jackson"):
            pass


async def test_an_event_in_ekbatan_style_writes_its_model_first(outbox: Outbox, look: Look) -> None:
    seen = list[Any]()

    @outbox.handler(Painted, name="painted")
    async def painted(envelope: EventEnvelope[Painted]) -> None:
        seen.append((envelope.event, envelope.payload))

    @outbox.handler(Named, name="named")
    async def named(envelope: EventEnvelope[Named]) -> None:
        seen.append((envelope.event, envelope.payload))

    painting = Painted("w", Decimal("12.5"), Colour.RED, {})
    async with outbox.transaction("Paint") as tx:
        tx.emit(painting, model_id="7", model_type="Wallet")
        tx.emit(Named("8", "Wallet", Decimal(1)), model_id="other")

    assert (await outbox.drain()).succeeded == 2
    stored = {type(event): msgspec.json.decode(payload) for event, payload in seen}
    assert stored[Painted] == {
        "modelId": "7", "modelName": "Wallet", "walletId": "w", "amount": 12.5, "colour": "RED", "many": {},
    }  # fmt: skip
    assert stored[Named] == {"modelId": "8", "modelName": "Wallet", "amount": 1}
    assert {type(event): event for event, _ in seen}[Painted] == painting


async def test_decimals_of_parameters_are_never_floats(outbox: Outbox, look: Look) -> None:
    class Deposit(msgspec.Struct, rename="camel"):
        wallet_id: str
        amount: Decimal

    seen = list[Any]()

    @outbox.handler(Named, name="named")
    async def named(envelope: EventEnvelope[Named]) -> None:
        seen.extend((envelope.params(Deposit), envelope.params(dict[str, Any])))

    amount = Decimal("25.5") if look.dialect == "mysql" else LONG.normalize()  # MySQL keeps such numbers as doubles
    async with outbox.transaction("Deposit") as tx:
        tx.emit(Named("8", "Wallet", Decimal(1)), model_id="8")
    await look.fetch(f'UPDATE {{events}} SET action_params = \'{{"walletId": "w", "amount": {amount}}}\'')

    assert (await outbox.drain()).succeeded == 1
    assert seen == [Deposit("w", amount), {"walletId": "w", "amount": amount}]
    assert isinstance(seen[1]["amount"], Decimal)


@pytest.mark.not_on("sqlite", why="the tables of Ekbatan have other names on SQLite")
async def test_notifications_of_an_external_fan_out_are_handled(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    called = list[Any]()

    @outbox.handler(Named, name="journal")
    async def journal(envelope: EventEnvelope[Named]) -> None:
        called.append(envelope.event)

    event = Named("8", "Wallet", Decimal(1))
    async with outbox.transaction("Deposit") as tx:
        tx.emit(event, model_id="8")
    await look.fetch(FOREIGN)
    await look.fetch("UPDATE {events} SET delivered = TRUE")

    [row] = await look.fetch("SELECT sequence, retention_from FROM {event_notifications}")
    assert row["sequence"] == 0
    assert abs(row["retention_from"] - utc_now()) < timedelta(minutes=5)
    assert (await outbox.drain()).succeeded == 1
    assert called == [event]
