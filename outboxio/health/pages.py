"""The pages ``/live``, ``/ready``, ``/health`` and ``/metrics``: the same answers over ASGI and over the listener."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.health.reader import HealthReader
from outboxio.health.values import Health
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

# pyright: reportPrivateUsage=false

logger = log_of(__name__)

METHODS = ("GET", "HEAD")
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_NAMES = "/live, /ready, /health and /metrics"


class Page(Struct, frozen=True):
    """An answer over HTTP. The body of a HEAD request is left out by the server."""

    status: int
    body: bytes
    content_type: str = _JSON
    allow: bool = False
    """True if the answer lists the allowed methods."""


class Pages:
    """Answers requests for the health of an outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._metrics: Callable[[], Page] | None = None

    @property
    def _reader(self) -> HealthReader:
        return self._outbox._health

    async def answer(self, method: str, path: str) -> Page:
        """The answer to a request. Never raises."""
        pages = {"/live": self._live, "/ready": self._ready, "/health": self._health, "/metrics": self._numbers}
        page = pages.get(path)
        if page is None:
            return _text(404, f"there is no page {path[:100]!r}; the pages are {_NAMES}")
        if method not in METHODS:
            return _text(405, f"the pages answer {' and '.join(METHODS)} only", allow=True)
        try:
            return await page()
        except Exception as error:
            logger.exception("the page %s has failed", path)
            return _text(500, f"the page has failed: {type(error).__name__}; see the log")

    async def _live(self) -> Page:
        health = await self._reader.probe(asks=False)
        return _answer("live", health.live, health)

    async def _ready(self) -> Page:
        health = await self._reader.probe(asks=False)
        return _answer("ready", health.ready, health)

    async def _health(self) -> Page:
        health = await self._reader.probe(asks=True)
        return _json(503 if health.status == "down" else 200, health)

    async def _numbers(self) -> Page:
        if self._metrics is None:
            self._metrics = _exposition(self._outbox)
        return self._metrics()


def _exposition(outbox: Outbox) -> Callable[[], Page]:
    """A function that writes the metrics in the text format of Prometheus."""
    try:
        prometheus: Any = importlib.import_module("outboxio.integrations.prometheus")
    except (ImportError, ConfigurationError):
        return lambda: _text(404, "there are no metrics without prometheus-client: pip install 'outboxio[prometheus]'")
    return lambda: Page(200, prometheus.metrics_text(outbox), prometheus.CONTENT_TYPE)


def _answer(question: str, is_true: bool, health: Health) -> Page:
    """The reasons are those of a no."""
    return _json(200 if is_true else 503, {question: is_true, "reasons": [] if is_true else health.reasons})


def _json(status: int, value: object) -> Page:
    return Page(status, msgspec.json.encode(value) + b"\n")


def _text(status: int, text: str, *, allow: bool = False) -> Page:
    return Page(status, f"{text}\n".encode(), _TEXT, allow)
