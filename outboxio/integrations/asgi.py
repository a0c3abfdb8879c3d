"""ASGI middleware that passes the correlation id and the trace context of a request to its actions."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from outboxio.errors import ConfigurationError
from outboxio.model.emitter import Origin, current_origin
from outboxio.support.ids import uuid7
from outboxio.support.text import briefly

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
ASGIApp = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

LONGEST_ID = 128
LONGEST_STATE = 512  # the minimum that W3C Trace Context requires to be propagated

_ID = re.compile(rb"[\w.:;,/+=@~|#-]{1,%d}" % LONGEST_ID)
_STATE = re.compile(rb"[\x20-\x7e]{1,%d}" % LONGEST_STATE)
_PARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-[!-~]{0,100})?"
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")


class OriginMiddleware:
    """Passes the correlation id and the trace context of an HTTP request to the actions that it executes.

    ``correlation_headers``: the first of these headers with a valid value becomes the ``correlation_id``. A value is
    valid if it has up to 128 letters, digits and ``.:;,/+=@~|#_-``; others are ignored, because clients control them.
    ``generate``: create a new id if the request has none. ``traceparent`` and ``tracestate`` (W3C Trace Context) become
    ``headers`` of the events.

    ``execute``, ``transaction``, ``record`` and ``inbox.receive`` use these values unless the call passes its own;
    ``headers`` are merged by key. Handlers use the values of their event instead. WebSocket connections and lifespan
    events are not affected.

    Raises :class:`ConfigurationError` for an invalid header name.

    Example::

        app.add_middleware(OriginMiddleware, correlation_headers=["X-Request-ID"], generate=True)
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        correlation_headers: Sequence[str] = ("X-Correlation-ID", "X-Request-ID"),
        generate: bool = False,
    ) -> None:
        self._app = app
        self._names = _checked_names(correlation_headers)
        self._generates = generate

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = current_origin.set(self._origin_of(scope["headers"]))
        try:
            await self._app(scope, receive, send)
        finally:
            current_origin.reset(token)

    def _origin_of(self, headers: Sequence[tuple[bytes, bytes]]) -> Origin:
        by_name: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            by_name.setdefault(name.lower(), []).append(value.strip())
        return Origin(self._correlation_id(by_name), _trace_context(by_name))

    def _correlation_id(self, headers: dict[bytes, list[bytes]]) -> str | None:
        for name in self._names:
            for value in headers.get(name, ()):
                if _ID.fullmatch(value):
                    return value.decode("ascii")
        return str(uuid7()) if self._generates else None


def _trace_context(headers: dict[bytes, list[bytes]]) -> dict[str, str]:
    """Return the valid trace headers. ``tracestate`` is used only with a single valid ``traceparent``."""
    parents = headers.get(b"traceparent", [])
    match = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if match is None or (match["version"] == b"00" and match["more"] is not None):
        return {}
    found = {"traceparent": parents[0].decode("ascii")}
    state = b",".join(headers.get(b"tracestate", ()))
    if _STATE.fullmatch(state):
        found["tracestate"] = state.decode("ascii")
    return found


def _checked_names(names: Sequence[str]) -> list[bytes]:
    listed: Any = [names] if isinstance(names, str) else names  # callers may not be typed
    for name in listed:
        if not (isinstance(name, str) and _HEADER_NAME.fullmatch(name)):
            raise ConfigurationError(f"correlation_headers has {briefly(name)}; expected names such as 'X-Request-ID'")
    return [name.lower().encode("ascii") for name in listed]
