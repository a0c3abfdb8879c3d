"""The health pages as an ASGI application, for a web application that runs the outbox."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.outbox import Outbox


_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
ASGIApp = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


def health_app(outbox: Outbox) -> ASGIApp:
    """Return an ASGI application with the pages ``/live``, ``/ready``, ``/health`` and ``/metrics`` of an outbox.

    It responds to GET and HEAD with 200 or 503 and JSON, and on ``/metrics`` with the Prometheus text format. It needs
    no framework and may be mounted under any prefix. If it runs in a separate event loop, it also detects that the
    outbox's event loop is blocked.

    The pages show the names of handlers and shards without authorization: mount them where only operators and probes
    can reach them.

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
    """Return the path below the mount point, without a trailing slash.

    Depending on the framework, ``path`` starts with ``root_path``, with the last part of ``root_path`` (behind a proxy
    that strips a prefix), or with the name of the page.
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
    """Complete the lifespan protocol without starting or stopping anything: your application runs the outbox."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


# --- the pages ``/live``, ``/ready``, ``/health`` and ``/metrics`` --------------------------------
#
# The responses are the same over ASGI and over the listener.


# pyright: reportPrivateUsage=false

logger = log_of(__name__)

METHODS = ("GET", "HEAD")
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
PAGES = frozenset(("/live", "/ready", "/health", "/metrics"))
_NAMES = "/live, /ready, /health and /metrics"


class Page(Struct, frozen=True):
    """An HTTP response. The server omits the body for a HEAD request."""

    status: int
    body: bytes
    content_type: str = _JSON
    allow: bool = False
    """True if the response lists the allowed methods."""


class Pages:
    """Responds to requests for the health of an outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._metrics: Callable[[], Page] | None = None

    async def answer(self, method: str, path: str) -> Page:
        """Return the response to a request. Never raises."""
        if path not in PAGES:
            return _text(404, f"page {path[:100]!r} not found; the pages are {_NAMES}")
        if method not in METHODS:
            return _text(405, f"method not allowed; use {' or '.join(METHODS)}", allow=True)
        try:
            return await self._page(path)
        except Exception as error:
            logger.exception("page %s failed", path)
            return _text(500, f"page failed: {type(error).__name__}; see the log")

    async def _page(self, path: str) -> Page:
        if path == "/metrics":
            if self._metrics is None:
                self._metrics = _exposition(self._outbox)
            return self._metrics()
        health = await self._outbox._health.probe(queries_database=path == "/health")
        if path == "/health":
            return _json(503 if health.status == "down" else 200, health)
        is_true = health.live if path == "/live" else health.ready
        return _json(200 if is_true else 503, {path[1:]: is_true, "reasons": [] if is_true else health.reasons})


def _exposition(outbox: Outbox) -> Callable[[], Page]:
    """Return a function that exports the metrics in the Prometheus text format."""
    try:
        prometheus: Any = importlib.import_module("outboxio.integrations.prometheus")
    except (ImportError, ConfigurationError):
        return lambda: _text(404, "metrics need prometheus-client: pip install 'outboxio[prometheus]'")
    return lambda: Page(200, prometheus.metrics_text(outbox), prometheus.CONTENT_TYPE)


def _json(status: int, value: object) -> Page:
    return Page(status, msgspec.json.encode(value) + b"\n")


def _text(status: int, text: str, *, allow: bool = False) -> Page:
    return Page(status, f"{text}\n".encode(), _TEXT, allow)


# --- a small HTTP listener for the health pages ---------------------------------------------------
#
# The listener needs no framework and runs in the outbox's event loop. If a handler blocks that loop, the listener does
# not respond, which is what a liveness probe must detect. Each connection serves one request, as probes and Prometheus
# open a connection per request. A client has 5 s to send a request of at most 2 KB, and 5 s to read the response.

LARGEST_REQUEST = 2048  # bytes, up to the empty line
PATIENCE = 5.0  # seconds for the request, and for the response
LINGERS = 1.0  # seconds in which a client may continue sending, so that closing does not cut off the response
MOST_CONNECTIONS = 100  # beyond this, a new connection closes the oldest

_END = b"\r\n\r\n"


@asynccontextmanager
async def serve_health(outbox: Outbox, port: int, *, host: str = "127.0.0.1") -> AsyncGenerator[int]:
    """Serve ``/live``, ``/ready``, ``/health`` and ``/metrics`` over HTTP inside the ``async with`` block.

    Yields the port; with ``port=0`` the system chooses a free one. Enter the block outside ``running()``, so that
    probes see ``ready`` become false while the last handlers finish. The pages have no password, so choose a ``host``
    that only operators and probes can reach.

    Raises :class:`ConfigurationError` if it cannot listen on the port.

    Example::

        async with serve_health(outbox, 8080, host="0.0.0.0"), outbox.running():
            await stop.wait()
    """
    listener = Listener(Pages(outbox))
    try:
        server = await asyncio.start_server(listener.connected, host, port, limit=LARGEST_REQUEST)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"the health pages cannot listen on {host}:{port}: {error}") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await listener.close()


class Listener:
    """Serves one request per connection."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection within a bounded time. Never raises."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MOST_CONNECTIONS:
            next(iter(self._open)).cancel()
        self._open[task] = writer
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone or slow, a newer connection needs its place, or the listener closes
        finally:
            self._open.pop(task, None)
            writer.transport.abort()

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(PATIENCE):
            method, page = await self._answer(reader)
        if page is None:
            return
        writer.write(_response(method, page))
        async with asyncio.timeout(PATIENCE):
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGERS):
                while await reader.read(LARGEST_REQUEST):
                    pass

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Page | None]:
        """Return the method and the response; ``None`` if the connection ends before the request is complete."""
        try:
            head = await reader.readuntil(_END)
        except asyncio.IncompleteReadError:
            return "GET", None
        except asyncio.LimitOverrunError:
            return "GET", _text(431, f"request too large: at most {LARGEST_REQUEST} bytes")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1.") or not method.isalpha() or not target:
            return "GET", _text(400, "malformed request; expected, for example, GET /live HTTP/1.1")
        return method, await self._pages.answer(method, _path_of(target))


def _path_of(target: str) -> str:
    """Return the path of a request target, which a proxy may send as a full URL."""
    try:
        return urlsplit(target).path
    except ValueError:
        return target


def _response(method: str, page: Page) -> bytes:
    lines = [
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if page.allow:
        lines.append(f"Allow: {', '.join(METHODS)}")
    head = "\r\n".join(lines).encode("latin-1") + _END
    return head if method == "HEAD" else head + page.body
