"""The payment provider in the tests and the demo. It signs its webhooks according to Standard Webhooks."""

from datetime import UTC, datetime

import httpx
from standardwebhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def signature(body: str, *, id: str, secret: str = SECRET) -> dict[str, str]:
    """Return the headers of a signed webhook."""
    now = datetime.now(UTC)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(id, now, body),
    }


async def send(client: httpx.AsyncClient, body: str, *, id: str, secret: str = SECRET) -> httpx.Response:
    headers = signature(body, id=id, secret=secret)
    return await client.post("/webhooks/payments", content=body, headers=headers)


async def send_payment(client: httpx.AsyncClient, order_id: int, cents: int) -> httpx.Response:
    return await send(client, f'{{"order_id": {order_id}, "cents": {cents}}}', id=f"payment-of-{order_id}")
