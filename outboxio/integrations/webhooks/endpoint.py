"""Endpoints, and their state in this process: running requests, failures, and when to retry."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from msgspec import Struct
from msgspec.structs import force_setattr
from standardwebhooks import Webhook

from outboxio.errors import ConfigurationError, RetryAfter
from outboxio.model.event import NAME_LENGTH, Event
from outboxio.support.duration import jittered, pause_after
from outboxio.support.text import briefly

MODEL = "WebhookEndpoint"
"""The model type of deliveries; the model id is the id of the endpoint."""

LANES = 10_000  # endpoints that a process remembers; more only while they are in use
REQUESTS = 4  # concurrent requests per endpoint and process
FAST, MOST_INSIDE = 0.1, 32  # for an endpoint that responds within FAST seconds, deliveries may wait for a free request
OPENS_AFTER = 2  # failures in a row
LONGEST_PAUSE, LONGEST_WAIT, DISABLED_FOR = 60.0, 1800.0, 600.0  # seconds: of an open circuit, and of a delivery


class Endpoint(Struct, frozen=True):
    """A receiver of webhooks.

    ``url``: supplied by a customer, and treated as untrusted. ``secrets``: the signing keys, ``"whsec_..."`` in base64.
    Each request is signed with all of them, so a customer can switch to a new secret while both are valid. ``id``:
    identifies the endpoint in the tables, so use the primary key of your row; by default a hash of the URL.

    Raises :class:`~outboxio.ConfigurationError` if the id or the secrets have the wrong type, or a secret is not
    base64. The URL is checked at delivery, so that one bad URL does not affect other endpoints of the event.

    Example::

        Endpoint("https://hooks.example.com/orders", secrets=["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], id="42")
    """

    url: str
    secrets: Sequence[str]
    id: str | None = None

    def __post_init__(self) -> None:
        untyped: Any = self  # callers may not be typed
        if not isinstance(untyped.url, str):
            raise ConfigurationError(f"url of endpoint {self.id!r} is {briefly(self.url)}; expected a string")
        secrets: Any = untyped.secrets
        is_list = isinstance(secrets, Iterable) and not isinstance(secrets, str | bytes)
        listed = tuple(cast("Iterable[str]", secrets)) if is_list else ()  # an iterator is read once
        if not listed:
            raise ConfigurationError(f"endpoint {self!r} needs a list of at least one secret, as in secrets=[secret]")
        force_setattr(self, "secrets", listed)
        for secret in self.secrets:
            try:
                Webhook(secret)
            except Exception:
                raise ConfigurationError(
                    f"endpoint {self!r} has a secret that is not 'whsec_' followed by base64"
                ) from None
        if untyped.id is not None and (not isinstance(untyped.id, str) or not 0 < len(untyped.id) <= NAME_LENGTH):
            raise ConfigurationError(
                f"id of endpoint {self!r} is {briefly(self.id)}; expected text of 1 to {NAME_LENGTH} characters"
            )
        force_setattr(self, "id", self.id or hashlib.sha256(self.url.encode(errors="replace")).hexdigest()[:24])

    @property
    def key(self) -> str:
        """The id, never ``None`` after construction."""
        assert self.id is not None
        return self.id

    def signature(self, message_id: str, now: datetime, body: str) -> str:
        """Return the value of ``webhook-signature``, with a signature for each secret."""
        return " ".join(Webhook(secret).sign(message_id, now, body) for secret in self.secrets)

    def __repr__(self) -> str:  # only the host: the rest of the URL may contain secrets
        host = re.split(r"[/?#\\]", self.url.partition("//")[2])[0].rpartition("@")[2]
        return f"<Endpoint {self.id} of {host[-80:]!r}>"


class WebhookEndpointDisabled(Event, frozen=True):
    """An endpoint responded with 410, its URL is not allowed, or a delivery failed after all retries.

    Handle this event to update your row of the endpoint, so that ``endpoints`` no longer returns it. ``reason`` is a
    sentence that you can show to the customer.

    Example::

        @outbox.handler(WebhookEndpointDisabled, name="disable-endpoint", delivery="transactional")
        async def disable(envelope: EventEnvelope[WebhookEndpointDisabled]) -> None:
            await envelope.tx.execute("UPDATE endpoints SET is_on = false WHERE id = $1", envelope.event.endpoint_id)
    """

    endpoint_id: str
    reason: str


class DeliveryPostponed(RetryAfter):
    """A delivery is postponed: the endpoint requested it, is failing, or is busy."""

    def __init__(self, seconds: float, reason: str, *, count_attempt: bool) -> None:
        super().__init__(round(max(seconds, 0.01), 3), count_attempt=count_attempt)
        self.args = (f"{reason}; next attempt in {self.delay} s",)


class Lane:
    """The state of an endpoint in this process: running requests, and a circuit breaker.

    A delivery that may not start is postponed, which neither counts as an attempt nor occupies the handler. Postponed
    deliveries are scheduled one after the other, so that few of them are postponed again.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.succeeded_date: datetime | None = None
        """The date of the newest event delivered to the endpoint."""
        self._inside = 0
        self._requests = asyncio.Semaphore(REQUESTS)
        self._pace = 1.0  # recent seconds per request
        self._open_until = 0.0
        self._pause = self._planned = 0.0
        self._reason = ""
        self._disabled_by: UUID | None = None

    def is_idle(self) -> bool:
        """True if the object can be discarded: no running requests, no pause, no scheduled deliveries."""
        return not self._inside and max(self._open_until, self._planned) <= _now()

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[None]:
        """Make a request within the block. Raises :class:`DeliveryPostponed` if none may be sent now."""
        self._inside += 1
        try:
            self._refuse_open()
            most = 1 if self.failures >= OPENS_AFTER else MOST_INSIDE if self._pace < FAST else REQUESTS
            if self._inside > most:
                raise self._later(self._reason if most == 1 else f"{REQUESTS} requests to the endpoint are in progress")
            async with self._requests:
                self._refuse_open()
                yield
        finally:
            self._inside -= 1

    def _refuse_open(self) -> None:
        if self._open_until > _now():
            raise self._later(f"the endpoint is failing: {self._reason}")

    def _later(self, reason: str) -> DeliveryPostponed:
        now = _now()
        # While the circuit is open, retrying each delivery in every pause would cost more than the requests.
        self._planned = max(self._planned, self._open_until, now) + (self._pause / 2 or self._pace / REQUESTS)
        wait = self._planned - now
        return DeliveryPostponed(
            wait if wait < LONGEST_WAIT else jittered(LONGEST_WAIT, 0.5), reason, count_attempt=False
        )

    def succeeded(self, seconds: float, event_date: datetime) -> None:
        self._pace = seconds if self.succeeded_date is None else 0.8 * self._pace + 0.2 * seconds
        self.failures, self._disabled_by = 0, None
        self._open_until = self._pause = self._planned = 0.0
        self.succeeded_date = max(event_date, self.succeeded_date or event_date)

    def failed(self, error: Exception) -> None:
        self.failures += 1
        self._reason = str(error)
        pause = float(cast(float, error.delay)) if isinstance(error, DeliveryPostponed) else 0.0
        if self.failures >= OPENS_AFTER:
            self._pause = pause_after(self.failures - OPENS_AFTER + 1, first=1.0, longest=LONGEST_PAUSE)
            pause = max(pause, self._pause)
        self._open_until = max(self._open_until, _now() + pause)

    def disable(self, by: UUID, reason: str) -> bool:
        """Send nothing for 10 min. Return False if another notification has already disabled the endpoint."""
        if self._disabled_by not in (None, by) and self._open_until > _now():
            return False
        self._disabled_by, self.failures, self._reason = by, max(self.failures, OPENS_AFTER), reason
        self._open_until = _now() + DISABLED_FOR
        return True


def _now() -> float:
    return asyncio.get_running_loop().time()
