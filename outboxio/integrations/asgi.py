"""A middleware in plain ASGI: actions of a request get the correlation id and the trace context of the request."""

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
LONGEST_STATE = 512  # the size that W3C Trace Context promises to be passed on

_ID = re.compile(rb"[\w.:;,/+=@~|#-]{1,%d}" % LONGEST_ID)
_STATE = re.compile(rb"[\x20-\x7e]{1,%d}" % LONGEST_STATE)
_PARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-[!-~]{0,100})?"
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")


class OriginMiddleware:
    """Gives the correlation id and the trace context of an HTTP request to the actions that the request executes.

    ``correlation_headers``: the first of these headers with a valid value becomes the ``correlation_id``. Valid are up
    to 128 letters, digits and ``.:;,/+=@~|#_-``; any other value is ignored, because clients choose the values.
    ``generate``: a request without a valid value gets a new id. ``traceparent`` and ``tracestate`` (W3C Trace
    Context) become ``headers`` of the events.

    ``execute``, ``transaction``, ``record`` and ``inbox.receive`` use the values if the call does not give its own;
    ``headers`` are merged by key. In a handler the values of the handler's event count instead. WebSocket connections
    and the lifespan pass unchanged.

    Raises :class:`ConfigurationError` for a name that is no HTTP header.

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
        given: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            given.setdefault(name.lower(), []).append(value.strip())
        return Origin(self._correlation_id(given), _trace_context(given))

    def _correlation_id(self, given: dict[bytes, list[bytes]]) -> str | None:
        for name in self._names:
            for value in given.get(name, ()):
                if _ID.fullmatch(value):
                    return value.decode("ascii")
        return str(uuid7()) if self._generates else None


def _trace_context(given: dict[bytes, list[bytes]]) -> dict[str, str]:
    """The valid headers of a trace. ``tracestate`` counts only beside a single, valid ``traceparent``."""
    parents = given.get(b"traceparent", [])
    match = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if match is None or (match["version"] == b"00" and match["more"] is not None):
        return {}
    found = {"traceparent": parents[0].decode("ascii")}
    state = b",".join(given.get(b"tracestate", ()))
    if _STATE.fullmatch(state):
        found["tracestate"] = state.decode("ascii")
    return found


def _checked_names(names: Sequence[str]) -> list[bytes]:
    given: Any = [names] if isinstance(names, str) else names  # callers may not be typed
    for name in given:
        if not (isinstance(name, str) and _HEADER_NAME.fullmatch(name)):
            raise ConfigurationError(f"correlation_headers has {briefly(name)}; expected names such as 'X-Request-ID'")
    return [name.lower().encode("ascii") for name in given]
