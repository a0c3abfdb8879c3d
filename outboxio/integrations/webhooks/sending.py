"""A single webhook request: signed, with limits on time and size, and an error that determines what happens next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpcore

from outboxio.errors import Unprocessable
from outboxio.integrations.webhooks.addresses import AllowList, CheckedBackend, checked_url
from outboxio.integrations.webhooks.endpoint import DeliveryPostponed, Endpoint
from outboxio.support.duration import parse_duration
from outboxio.support.log import one_line, type_name
from outboxio.version import __version__

MOST_READ = 16 * 1024  # bytes of an answer
MOST_SHOWN = 500  # characters of an answer in an error
LONGEST_RETRY_AFTER = 3600.0
MOST_POOLS, IDLE = 256, 30.0  # hosts with open connections, and seconds

_FAILURES = (OSError, httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class DeliveryFailed(Exception):
    """An endpoint did not respond with a 2xx status. The delivery is retried."""


class EndpointGone(Unprocessable):
    """An endpoint responded with 410: it accepts no more deliveries."""


class Sender:
    """Sends requests, with a connection pool for each host."""

    def __init__(
        self, timeout: timedelta | float | str, connect_timeout: timedelta | float | str, allow: Iterable[str]
    ) -> None:
        self.timeout = parse_duration(timeout, key="timeout").total_seconds()
        connect = parse_duration(connect_timeout, key="connect_timeout").total_seconds()
        self._limits = {"timeout": {"connect": connect, "read": self.timeout, "write": self.timeout}}
        self._allowed = AllowList(allow)
        self._ssl = httpcore.default_ssl_context()  # made once: reading the certificates takes 20 ms
        self._backend = CheckedBackend(self._allowed)
        self._pools: dict[str, httpcore.AsyncConnectionPool] = {}  # the least recently used first

    async def send(self, endpoint: Endpoint, message_id: str, body: str) -> None:
        """Send a message. Returns after a 2xx response, and raises otherwise."""
        url = checked_url(endpoint.url, self._allowed)
        try:
            status, retry_after, text = await self._answer(url, endpoint, message_id, body)
        except _FAILURES as error:
            reason = str(error) or f"no answer within {self.timeout:g} s ({type_name(error)})"
            raise DeliveryFailed(reason) from error
        if 200 <= status < 300:
            return
        reason = f"the endpoint answered {status}" + (f": {text}" if text else "")
        if status == 410:
            raise EndpointGone(reason)
        pause = _seconds(retry_after) if status in (429, 503) and retry_after else None
        raise DeliveryFailed(reason) if pause is None else DeliveryPostponed(pause, reason, count_attempt=True)

    async def _answer(
        self, url: httpcore.URL, endpoint: Endpoint, message_id: str, body: str
    ) -> tuple[int, str | None, str]:
        """Return the status, ``Retry-After``, and the start of the response body."""
        now = datetime.now(UTC)
        headers = [
            ("Host", _host(url)), ("Content-Type", "application/json"), ("Accept-Encoding", "identity"),
            ("User-Agent", f"outboxio/{__version__}"), ("webhook-id", message_id),
            ("webhook-timestamp", str(int(now.timestamp()))),
            ("webhook-signature", endpoint.signature(message_id, now, body)),
        ]  # fmt: skip
        async with asyncio.timeout(self.timeout):
            await self._close_oldest()
            pool, content = self._pool(str(url.origin)), body.encode()  # no await before the request: it looks unused
            async with pool.stream("POST", url, headers=headers, content=content, extensions=self._limits) as response:
                found = {name.lower(): value for name, value in response.headers}
                answer = b""
                async for chunk in response.aiter_stream():
                    answer += chunk
                    if len(answer) >= MOST_READ:
                        break
        retry_after = found.get(b"retry-after")
        text = one_line(answer[: MOST_SHOWN * 4].decode(errors="replace"), MOST_SHOWN)
        return response.status, None if retry_after is None else retry_after.decode("latin-1"), text

    def _pool(self, origin: str) -> httpcore.AsyncConnectionPool:
        """Return the pool of a host. Each host has its own, because a pool scans all of its connections per request."""
        pool = self._pools.pop(origin, None) or httpcore.AsyncConnectionPool(
            network_backend=self._backend, max_connections=None, keepalive_expiry=IDLE, ssl_context=self._ssl
        )
        self._pools[origin] = pool
        return pool

    async def _close_oldest(self) -> None:
        for oldest, idle in list(self._pools.items())[:-MOST_POOLS]:
            is_there = self._pools.get(oldest) is idle  # another task may have closed it
            if is_there and all(connection.is_idle() for connection in idle.connections):
                del self._pools[oldest]
                await idle.aclose()

    async def close(self) -> None:
        pools = list(self._pools.values())
        self._pools.clear()
        await asyncio.gather(*(pool.aclose() for pool in pools))


def _host(url: httpcore.URL) -> str:
    host = url.host.decode()
    name = f"[{host}]" if ":" in host else host
    return name if url.port is None else f"{name}:{url.port}"


def _seconds(retry_after: str) -> float | None:
    """Return the seconds in ``Retry-After``, at most 1 h; ``None`` if it is invalid."""
    try:
        if retry_after.strip().isdecimal():
            seconds = float(retry_after)
        else:
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
