"""The health pages as an ASGI application, for a web application that runs the outbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from outboxio.health.pages import METHODS, Page, Pages

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
ASGIApp = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


def health_app(outbox: Outbox) -> ASGIApp:
    """An ASGI application with the pages ``/live``, ``/ready``, ``/health`` and ``/metrics`` of an outbox.

    The application answers GET and HEAD, with 200 or 503 and JSON; ``/metrics`` answers in the text format of
    Prometheus. No framework is needed, and the application may be mounted under any prefix. In an event loop of its
    own, the application notices that the event loop of the outbox does not answer.

    The pages show names of handlers and shards, without any right to be asked for: mount the pages where only
    operators and probes can reach them.

    Example::

        app = FastAPI(lifespan=outbox.lifespan)
        app.mount("/ops", health_app(outbox))           # /ops/live, /ops/ready, /ops/health, /ops/metrics
    """
    pages = Pages(outbox)

    async def app(scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            method = str(scope["method"])
            await _send_page(await pages.answer(method, _path_below(scope)), method, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    return app


def _path_below(scope: _Scope) -> str:
    """The path below the mount, without a slash at the end.

    ``path`` begins with ``root_path``, with an end of ``root_path`` (behind a proxy that removes the rest), or with the
    name of the page, as frameworks differ.
    """
    path = [part for part in str(scope["path"]).split("/") if part]
    prefix = [part for part in str(scope.get("root_path", "")).split("/") if part]
    for start in range(len(prefix)):
        if path[: len(prefix) - start] == prefix[start:]:
            path = path[len(prefix) - start :]
            break
    return f"/{'/'.join(path)}"


async def _send_page(page: Page, method: str, send: _Send) -> None:
    headers = [
        (b"content-type", page.content_type.encode()),
        (b"content-length", str(len(page.body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if page.allow:
        headers.append((b"allow", ", ".join(METHODS).encode()))
    await send({"type": "http.response.start", "status": page.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else page.body})


async def _lifespan(receive: _Receive, send: _Send) -> None:
    """Nothing is started and nothing is stopped: the application runs the outbox."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
