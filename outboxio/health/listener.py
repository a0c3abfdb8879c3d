"""A small HTTP listener for the health pages, in the event loop that works.

The listener needs no framework. An event loop that a handler blocks does not answer, which is what a liveness probe
must notice. Each connection is answered once and closed: probes and Prometheus open a connection for each question.
A client has 5 s to send its request, of at most 2 KB, and 5 s to read the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from outboxio.errors import ConfigurationError
from outboxio.health.pages import METHODS, Page, Pages
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

logger = log_of(__name__)

LARGEST_REQUEST = 2048  # bytes, up to the empty line
PATIENCE = 5.0  # seconds for the request, and for the answer
LINGERS = 1.0  # seconds in which a client may go on sending, so that the end does not cut off the answer
MOST_CONNECTIONS = 100  # the oldest connection makes room for a further connection

_END = b"\r\n\r\n"


@asynccontextmanager
async def serve_health(outbox: Outbox, port: int, *, host: str = "127.0.0.1") -> AsyncGenerator[int]:
    """Answer ``/live``, ``/ready``, ``/health`` and ``/metrics`` over HTTP while the block lasts.

    The value of the block is the port. With ``port=0`` the system chooses a free port. Enter the block outside of
    ``running()``: then probes see ``ready`` become false while the last handlers end. The pages have no password, so
    choose a ``host`` that only operators and probes reach.

    Raises :class:`ConfigurationError` if the port cannot be listened on.

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
    """Answers each connection once."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection, within a bounded time. Never raises."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MOST_CONNECTIONS:
            next(iter(self._open)).cancel()
        self._open[task] = writer
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone, is slow, or has to make room; at the end of the listener too
        finally:
            self._open.pop(task, None)
            writer.transport.abort()

    async def close(self) -> None:
        """End every connection."""
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
        """The method and the answer; no answer to a connection that ends before the request does."""
        try:
            head = await reader.readuntil(_END)
        except asyncio.IncompleteReadError:
            return "GET", None
        except asyncio.LimitOverrunError:
            return "GET", _refusal(431, f"a request has at most {LARGEST_REQUEST} bytes")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1.") or not method.isalpha() or not target:
            return "GET", _refusal(400, "expected a request as in GET /live HTTP/1.1")
        return method, await self._pages.answer(method, _path_of(target))


def _path_of(target: str) -> str:
    """The path of a request target, which a proxy may send as a whole URL."""
    try:
        return urlsplit(target).path
    except ValueError:
        return target


def _refusal(status: int, text: str) -> Page:
    return Page(status, f"{text}\n".encode(), "text/plain; charset=utf-8")


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
