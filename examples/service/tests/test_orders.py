"""Orders, from the request to the last handler. The fixtures whose names begin with ``outbox_`` come from outboxio."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from outboxio import Outbox, Unprocessable
from outboxio.testing import Drain, EmittedEvents, MovableClock, run_job
from service.database import Sessions
from service.events import OrderCancelled, OrderPlaced
from service.models import DailySales, Order, utc_now
from tests.conftest import FakeMailer
from tests.webhooks import send_payment


async def order(client: httpx.AsyncClient, **headers: str) -> int:
    """Place an order of 18.00, and return its id."""
    response = await client.post("/orders", json={"email": "ada@example.org", "cents": 1800}, headers=headers)
    response.raise_for_status()
    return int(response.json()["id"])


async def read(client: httpx.AsyncClient, path: str) -> Any:
    return (await client.get(path)).raise_for_status().json()


async def test_an_order_is_confirmed_paid_and_counted(
    client: httpx.AsyncClient, outbox_drain: Drain, mailer: FakeMailer
) -> None:
    order_id = await order(client)
    assert (await send_payment(client, order_id, 1800)).json() == {"status": "RECEIVED"}

    await outbox_drain()

    assert mailer.sent == [f"ada@example.org: we received order {order_id}"]
    assert await read(client, f"/orders/{order_id}") == {
        "id": order_id, "state": "paid", "cents": 1800, "timeline": ["placed: 18.00", "paid: 18.00"],
    }  # fmt: skip
    [sales] = await read(client, "/sales")
    assert (sales["orders"], sales["cents"]) == (1, 1800)


async def test_only_the_failed_mail_is_retried(
    client: httpx.AsyncClient, outbox_drain: Drain, outbox_clock: MovableClock, mailer: FakeMailer
) -> None:
    order_id = await order(client)
    mailer.is_down = True
    with pytest.raises(ConnectionError):
        await outbox_drain()

    mailer.is_down = False
    outbox_clock.advance("2s")
    await outbox_drain()

    assert len(mailer.sent) == 1
    assert (await read(client, f"/orders/{order_id}"))["timeline"] == ["placed: 18.00"]


@pytest.mark.parametrize("method", [(Order, "pay"), (DailySales, "add")], ids=lambda method: str(method[1]))
async def test_a_crash_after_the_write_counts_nothing_twice(
    method: tuple[type, str], client: httpx.AsyncClient, outbox_drain: Drain, outbox_clock: MovableClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original = getattr(*method)

    def crash(*arguments: Any) -> None:
        original(*arguments)
        raise ConnectionError("the power went out")

    order_id = await order(client)
    await send_payment(client, order_id, 1800)
    with monkeypatch.context() as patch:
        patch.setattr(*method, crash)
        with pytest.raises(ConnectionError):
            await outbox_drain()

    outbox_clock.advance("5m")
    await outbox_drain()

    assert [(one["orders"], one["cents"]) for one in await read(client, "/sales")] == [(1, 1800)]
    assert (await read(client, f"/orders/{order_id}"))["timeline"] == ["placed: 18.00", "paid: 18.00"]


async def test_a_payment_of_the_wrong_amount_is_a_dead_letter(
    client: httpx.AsyncClient, outbox_for_tests: Outbox, outbox_drain: Drain
) -> None:
    order_id = await order(client)
    await send_payment(client, order_id, 100)
    with pytest.raises(Unprocessable):
        await outbox_drain()

    [letter] = await outbox_for_tests.admin.list(state="DEAD")
    assert letter.handler_name == "record-payment"
    assert (await read(client, f"/orders/{order_id}"))["state"] == "placed"


async def test_an_order_that_is_not_paid_within_a_day_is_cancelled(
    client: httpx.AsyncClient, outbox_for_tests: Outbox, outbox_events: EmittedEvents, sessions: Sessions
) -> None:
    old, new = await order(client), await order(client)
    async with sessions.begin() as session:
        (await session.get_one(Order, old)).created_at = utc_now() - timedelta(days=2)

    await run_job(outbox_for_tests, "cancel-unpaid-orders")

    assert outbox_events.of(OrderCancelled).one().order_id == old
    assert (await read(client, f"/orders/{new}"))["state"] == "placed"


async def test_an_event_has_the_id_of_its_request(client: httpx.AsyncClient, outbox_events: EmittedEvents) -> None:
    await order(client, **{"X-Request-ID": "request-7"})

    assert outbox_events.of(OrderPlaced).one_row().correlation_id == "request-7"
