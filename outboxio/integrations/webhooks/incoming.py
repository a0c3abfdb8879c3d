"""Incoming webhooks: the signature of a request is verified before its body is decoded."""

from __future__ import annotations

import hmac
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError, InvalidEvent, InvalidSignature
from outboxio.support import machine
from outboxio.support.duration import DurationLike, format_duration, parse_duration
from outboxio.support.text import briefly, instead_of

Headers = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]
Secret = str | bytes

_is_unix_time = re.compile("[1-9][0-9]{0,9}").fullmatch  # one spelling for each second, up to the year 2286


def verify(
    headers: Headers,
    body: bytes,
    secrets: Secret | Iterable[Secret],
    *,
    scheme: Literal["standard", "stripe", "github", "slack"] = "standard",
    tolerance: DurationLike = "5m",
) -> str:
    """Verify the signature of a webhook, and return its message id, for ``external_id`` of the inbox.

    ``headers``: a mapping, or pairs of str or bytes; names are case-insensitive. ``body``: the raw bytes of the
    request. ``secrets``: one secret, or several during a rotation, as str (as the provider shows it) or bytes.
    ``tolerance``: how far the signing time may be from the current time, in either direction: a ``timedelta``, seconds,
    or a string. GitHub does not sign a time. The message id is

    * ``standard`` (Standard Webhooks): the header ``webhook-id``;
    * ``stripe``: ``id`` in the body;
    * ``github``: the header ``X-GitHub-Delivery``, which GitHub does not sign;
    * ``slack``: ``event_id`` in the body, or the SHA-256 of the body for commands and interactions, which have none.

    Raises :class:`InvalidSignature` (respond with 401); :class:`InvalidEvent` if a body signed by Stripe is not a JSON
    object with an id (respond with 422); and :class:`ConfigurationError` for a decoded ``body``, an empty or malformed
    secret, an unknown scheme, or ``standard`` without the library ``standardwebhooks``.

    Example::

        try:
            id = verify(request.headers, await request.body(), SECRETS, scheme="stripe")
        except InvalidSignature as error:
            raise HTTPException(401) from error
    """
    if not isinstance(body, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise ConfigurationError(
            f"body is a {type(body).__name__}; pass the raw bytes of the request, such as "
            "await request.body(): a decoded body may differ from the bytes that were signed"
        )
    if (verified := _SCHEMES.get(scheme)) is None:
        raise ConfigurationError(f"unknown scheme {briefly(scheme)}: {instead_of(str(scheme), _SCHEMES)}")
    listed = [secrets] if isinstance(secrets, str | bytes) else list(secrets or ())
    if not listed or not all(isinstance(one, str | bytes) and one.strip() for one in listed):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise ConfigurationError("secrets: expected one or more non-empty secrets, as str or bytes")
    return verified(_Request(scheme, _by_name(headers), body, parse_duration(tolerance, key="tolerance")), listed)


class _Request(Struct):
    scheme: str
    headers: Mapping[str, list[str]]
    body: bytes
    tolerance: timedelta

    def header(self, name: str) -> str:
        """Return the value of a header that must occur exactly once, in ASCII."""
        values = self.headers.get(name.lower(), [])
        if len(values) != 1 or not values[0] or not values[0].isascii():
            raise self.invalid(f"the header {name} is missing, was sent more than once, or is not ASCII")
        return values[0]

    def recent(self, timestamp: str) -> int:
        """Return the Unix time of signing if it is within the tolerance; otherwise raise."""
        if not _is_unix_time(timestamp):
            raise self.invalid("the timestamp is not a Unix time in seconds")
        age = machine.time_ns() / 1e9 - int(timestamp)
        if abs(age) > self.tolerance.total_seconds():
            away = f"{abs(age):.0f} s {'ago' if age > 0 else 'in the future'}"
            raise self.invalid(f"it was signed {away}; the tolerance is {format_duration(self.tolerance)}")
        return int(timestamp)

    def require(self, signatures: Iterable[str], valid: Sequence[str]) -> None:
        """Raise :class:`InvalidSignature` unless one of the signatures is valid."""
        if not any(hmac.compare_digest(one, other) for one in signatures for other in valid):
            raise self.invalid("no signature matches the body; check the secret, and that the body was not modified")

    def invalid(self, reason: str) -> InvalidSignature:
        return InvalidSignature(self.scheme, reason)

    def text(self, name: str) -> str | None:
        """Return a string field of the body; ``None`` if the body is not a JSON object with that field."""
        try:
            value = msgspec.json.decode(self.body, type=dict[str, Any]).get(name)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, str) and value.strip() else None


def _standard(request: _Request, secrets: list[Secret]) -> str:
    try:
        from standardwebhooks import Webhook
    except ImportError as error:
        raise ConfigurationError(
            "scheme 'standard' needs standardwebhooks: pip install 'outboxio[webhooks]'"
        ) from error
    try:
        senders = [Webhook(secret) for secret in secrets]
    except Exception:  # from None: no traceback shows the secret
        raise ConfigurationError("secrets: expected base64, with or without whsec_ before it, or bytes") from None
    id, time = request.header("webhook-id"), request.recent(request.header("webhook-timestamp"))
    try:
        body = request.body.decode()
    except UnicodeDecodeError:
        raise request.invalid("the body is not UTF-8") from None
    at = datetime.fromtimestamp(time, tz=UTC)
    request.require(request.header("webhook-signature").split(" "), [sender.sign(id, at, body) for sender in senders])
    return id


def _stripe(request: _Request, secrets: list[Secret]) -> str:
    fields = [field.partition("=") for field in request.header("Stripe-Signature").split(",")]
    time = request.recent(",".join(value for name, _, value in fields if name == "t"))
    signatures = [value for name, _, value in fields if name == "v1"]
    request.require(signatures, _hex(secrets, b"%d.%b" % (time, request.body)))
    if (id := request.text("id")) is None:
        raise InvalidEvent("the signed body of a Stripe webhook", "it is not a JSON object with an id")
    return id


def _github(request: _Request, secrets: list[Secret]) -> str:
    id, signature = request.header("X-GitHub-Delivery"), request.header("X-Hub-Signature-256")
    request.require([signature], _hex(secrets, request.body, "sha256="))
    return id


def _slack(request: _Request, secrets: list[Secret]) -> str:
    time, signature = request.recent(request.header("X-Slack-Request-Timestamp")), request.header("X-Slack-Signature")
    request.require([signature], _hex(secrets, b"v0:%d:%b" % (time, request.body), "v0="))
    return request.text("event_id") or f"sha256-{sha256(request.body).hexdigest()}"


_SCHEMES: dict[str, Callable[[_Request, list[Secret]], str]] = {
    "standard": _standard, "stripe": _stripe, "github": _github, "slack": _slack,
}  # fmt: skip


def _hex(secrets: list[Secret], signed: bytes, prefix: str = "") -> list[str]:
    """Return the signature for each secret."""
    keys = [one.encode() if isinstance(one, str) else one for one in secrets]
    return [prefix + hmac.digest(key, signed, "sha256").hex() for key in keys]


def _by_name(headers: Headers) -> dict[str, list[str]]:
    """Return the values of each header, by lower-case name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    try:
        for pair in cast(Any, headers).items() if hasattr(headers, "items") else headers:
            name, value = (one.decode("latin-1") if isinstance(one, bytes) else one for one in pair)
            found[name.lower()].append(value + "")  # TypeError for a list of values
    except (AttributeError, TypeError, ValueError):
        raise ConfigurationError("headers: expected a mapping of str to str, or pairs of str or bytes") from None
    return found
