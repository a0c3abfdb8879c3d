"""Orders, from the request to the last handler. The fixtures whose names begin with ``outbox_`` come from outboxio."""

from typing import Any

import httpx
import pytest

from outboxio import Outbox, Unprocessable
from outboxio.testing import Drain, EmittedEvents, MovableClock
from shop.events import OrderPlaced, PaymentRefused
from tests.conftest import RememberingMailer


async def order(client: httpx.AsyncClient, *, sku: str = "mug", card: str = "good", **headers: str) -> str:
    """Order two pieces. Return the path of the order."""
    body = {"email": "ada@example.org", "sku": sku, "quantity": 2, "card": card, "address": "1 Main Street"}
    answer = await client.post("/orders", json=body, headers=headers)
    answer.raise_for_status()
    return f"/orders/{answer.json()['id']}"


async def read(client: httpx.AsyncClient, path: str) -> Any:
    return (await client.get(path)).json()


async def test_an_order_is_confirmed_taken_from_the_stock_and_paid(
    client: httpx.AsyncClient, outbox_drain: Drain, mailer: RememberingMailer
) -> None:
    path = await order(client)

    await outbox_drain()

    assert mailer.sent == ["ada@example.org: thank you for order 1: 2 x mug"]
    assert (await read(client, "/products/mug"))["stock"] == 8
    assert (await read(client, path))["state"] == "paid"
    assert (await read(client, path))["history"] == ["placed: 2 x mug", "paid: 18.00"]


async def test_a_payment_is_retried_when_the_bank_does_not_answer(
    client: httpx.AsyncClient, outbox_drain: Drain, outbox_clock: MovableClock, mailer: RememberingMailer
) -> None:
    path = await order(client, card="slow")
    with pytest.raises(ConnectionError):
        await outbox_drain()
    assert (await read(client, path))["state"] == "placed"

    outbox_clock.advance("1s")
    await outbox_drain()

    assert (await read(client, path))["state"] == "paid"
    assert len(mailer.sent) == 1  # only the failed handler ran again


async def test_a_declined_card_is_a_dead_letter_until_there_is_a_new_card(
    client: httpx.AsyncClient, outbox_for_tests: Outbox, outbox_drain: Drain, outbox_events: EmittedEvents
) -> None:
    path = await order(client, card="expired")
    with pytest.raises(Unprocessable):
        await outbox_drain()
    assert (await read(client, path))["state"] == "unpaid"
    assert outbox_events.of(PaymentRefused).one().reason == "the card has expired"

    await client.put(f"{path}/card", json={"card": "good"})
    [letter] = await outbox_for_tests.admin.list(state="DEAD")
    await outbox_for_tests.admin.retry([letter.id])
    await outbox_drain()

    assert (await read(client, path))["history"][1:] == ["not paid: the card has expired", "paid: 18.00"]


async def test_of_two_changes_of_a_version_the_second_is_a_conflict(client: httpx.AsyncClient) -> None:
    path = await order(client)

    first = await client.put(f"{path}/address", json={"address": "2 Hill Street", "version": 1})
    second = await client.put(f"{path}/address", json={"address": "3 Lake Road", "version": 1})

    assert (first.status_code, second.status_code) == (200, 409)
    assert (await read(client, path))["address"] == "2 Hill Street"


async def test_an_order_of_an_unknown_product_emits_nothing(
    client: httpx.AsyncClient, outbox_events: EmittedEvents
) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        await order(client, sku="cup")

    outbox_events.none()


async def test_an_event_has_the_id_and_the_trace_of_its_request(
    client: httpx.AsyncClient, outbox_events: EmittedEvents
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    await order(client, **{"X-Request-ID": "request-7", "traceparent": trace})

    row = outbox_events.of(OrderPlaced).one_row()
    assert row.correlation_id == "request-7"
    assert row.headers["traceparent"] == trace
