"""What clients of the web application get: valid and invalid requests, probes, metrics and the dashboard."""

import httpx
import pytest

from outboxio.testing import EmittedEvents
from service.events import PaymentReceived
from tests.webhooks import send, send_payment


async def test_a_repeated_webhook_is_stored_once(client: httpx.AsyncClient, outbox_events: EmittedEvents) -> None:
    answers = [
        await send_payment(client, 1, 1800),
        await send_payment(client, 1, 1800),
        await send_payment(client, 1, 5),
    ]

    assert [answer.json()["status"] for answer in answers] == ["RECEIVED", "DUPLICATE", "CONFLICT"]
    assert outbox_events.of(PaymentReceived).one().cents == 1800


async def test_a_webhook_with_a_wrong_signature_is_refused(
    client: httpx.AsyncClient, outbox_events: EmittedEvents
) -> None:
    body = '{"order_id": 1, "cents": 1800}'
    forged = await send(client, body, id="m-1", secret="whsec_b3RoZXI=")
    unsigned = await client.post("/webhooks/payments", content=body)

    assert (forged.status_code, unsigned.status_code) == (401, 401)
    outbox_events.none()


NOT_PAYMENTS = [
    "", "[]", "{", "null", "[" * 100_000, '{"order_id": 1}', '{"order_id": "x", "cents": 1}',
    '{"order_id": 0, "cents": 1}', '{"order_id": 99999999999, "cents": 1}', '{"order_id": 1, "cents": NaN}',
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_PAYMENTS, ids=lambda body: body[:40])
async def test_a_signed_webhook_that_is_not_a_payment_is_refused(
    body: str, client: httpx.AsyncClient, outbox_events: EmittedEvents
) -> None:
    assert (await send(client, body, id="m-1")).status_code == 422
    outbox_events.none()


NOT_ORDERS = [
    b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"email": "ada@example.org"}',
    b'{"email": "ada@example.org", "cents": NaN}', b'{"email": "ada@example.org", "cents": 99999999999}',
    b'{"email": "\\u0000@example.org", "cents": 1}', b'{"email": "\\ud800@example.org", "cents": 1}',
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_ORDERS, ids=lambda body: repr(body[:40]))
async def test_an_invalid_order_is_refused(
    body: bytes, client: httpx.AsyncClient, outbox_events: EmittedEvents
) -> None:
    response = await client.post("/orders", content=body, headers={"content-type": "application/json"})

    assert response.status_code in (400, 422)
    outbox_events.none()


@pytest.mark.parametrize(("order_id", "status"), [("7", 404), ("0", 422), ("x", 422), ("9" * 30, 422)])
async def test_an_unknown_order_is_not_found(order_id: str, status: int, client: httpx.AsyncClient) -> None:
    assert (await client.get(f"/orders/{order_id}")).status_code == status


async def test_probes_and_metrics_answer(client: httpx.AsyncClient) -> None:
    for path in ("/ready", "/ops/live", "/ops/metrics"):
        assert (await client.get(path)).status_code == 200, path


async def test_the_dashboard_needs_a_password(client: httpx.AsyncClient) -> None:
    assert (await client.get("/outbox/")).status_code == 401
    assert (await client.get("/outbox/", auth=("ops", "secret"))).status_code == 200
