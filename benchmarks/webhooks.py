"""``python -m benchmarks.webhooks``: measure how dead and slow endpoints affect deliveries to the others.

Events are committed at a steady rate and sent to local endpoints in turn. In one run, all endpoints are good. In the
other, some are dead (half refuse connections, half accept and never answer) and some answer after 3 s. A latency is the
time from an event's commit to the arrival of its request, at the endpoints that are good in both runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import time
from contextlib import AsyncExitStack
from secrets import token_hex

import msgspec

from benchmarks.meter import percentiles
from outboxio import Event, EventEnvelope, Outbox, Settings
from outboxio.integrations.webhooks import Endpoint, Webhooks

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
STEP, SLOW = 0.05, 3.0  # seconds between commits, and until a slow endpoint answers


class Shipped(Event):
    endpoint: int
    committed_at: float


class Latencies(asyncio.Protocol):
    """One connection to an endpoint, which answers each request after ``wait`` seconds, or never (None)."""

    def __init__(self, arrived: list[float], wait: float | None) -> None:
        self._arrived, self._wait, self._data = arrived, wait, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        self._data = b""
        self._arrived.append(time.monotonic() - msgspec.json.decode(body)["data"]["committed_at"])
        if self._wait is not None:
            asyncio.get_running_loop().call_later(self._wait, self._answer)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


async def latencies(
    url: str, events: int, rate: float, *, endpoints: int = 200, dead: int = 0, slow: int = 0, watched: int
) -> list[float]:
    """Return the latencies of the last ``watched`` endpoints. ``rate``: events per second."""
    arrived: list[float] = []
    loop, found = asyncio.get_running_loop(), list[Endpoint]()
    async with AsyncExitStack() as stack:
        for number in range(endpoints):
            is_watched, is_refusing = number >= endpoints - watched, number < dead // 2
            wait = None if number < dead else SLOW if number < dead + slow else 0.0
            kept = arrived if is_watched else []
            if is_refusing:  # bound, so that no other endpoint gets the port, and not listening
                refusing = stack.enter_context(socket.socket())
                refusing.bind(("127.0.0.1", 0))
                port = refusing.getsockname()[1]
            else:
                server = await loop.create_server(lambda kept=kept, wait=wait: Latencies(kept, wait), "127.0.0.1", 0)
                stack.callback(server.close)
                port = server.sockets[0].getsockname()[1]
            found.append(Endpoint(f"http://127.0.0.1:{port}/", [SECRET], id=str(number)))

        def endpoints_of(envelope: EventEnvelope[Shipped]) -> list[Endpoint]:
            return [found[envelope.event.endpoint]]

        outbox = await stack.enter_async_context(
            Outbox(url, namespace=f"bench-{token_hex(3)}", settings=Settings(shutdown_timeout=2))
        )
        await outbox.migrate()
        outbox.add_handler(
            Webhooks(name="hooks", types=[Shipped], endpoints=endpoints_of, allow=["127.0.0.0/8"], timeout=10)
        )
        expected = sum(number % endpoints >= endpoints - watched for number in range(events))
        await stack.enter_async_context(outbox.running())
        await _commit(outbox, events, rate, endpoints)
        async with asyncio.timeout(120):
            while len(arrived) < expected:  # noqa: ASYNC110  # setting an event per request would cost time
                await asyncio.sleep(0.01)
    return arrived


async def _commit(outbox: Outbox, events: int, rate: float, endpoints: int) -> None:
    begun, sent = time.monotonic(), 0
    while sent < events:
        due = min(events, int((time.monotonic() - begun) * rate) + 1)
        if due > sent:
            async with outbox.transaction("ship") as tx:
                for number in range(sent, due):
                    tx.emit(Shipped(number % endpoints, time.monotonic()))
            sent = due
        await asyncio.sleep(STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=os.environ.get("OUTBOXIO_TEST_POSTGRES_URL"), help="an empty database")
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=150.0, help="events per second")
    parser.add_argument(
        "--bad", type=int, default=10, help="dead endpoints, and as many slow ones; 0 for the reference run"
    )
    options = parser.parse_args()
    logging.disable()
    bad = options.bad
    found = asyncio.run(latencies(options.url, options.events, options.rate, dead=bad, slow=bad, watched=180))
    shown = {name: round(value, 1) for name, value in percentiles(found).items()}
    print(json.dumps({"dead": bad, "slow": bad, "requests": len(found), **shown}))


if __name__ == "__main__":
    main()
