"""The health pages: over ASGI, mounted in frameworks, and over the listener, with real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from litestar import Litestar, asgi
from starlette.applications import Starlette
from starlette.routing import Mount

from outboxio import ConfigurationError, Outbox, health_app, serve_health
from outboxio.health import pages
from outboxio.testing import memory_outbox
from tests.kit.app import eventually, turns
from tests.kit.ports import free_port

pytestmark = pytest.mark.usefixtures("in_process", "patient_health")


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


# --- ASGI ------------------------------------------------------------------------------------------


def in_fastapi(outbox: Outbox) -> Any:
    app = FastAPI()
    app.mount("/ops", health_app(outbox))
    return app


def in_starlette(outbox: Outbox) -> Any:
    return Starlette(routes=[Mount("/ops", health_app(outbox))])


def in_litestar(outbox: Outbox) -> Any:
    return Litestar([asgi("/ops", is_mount=True, copy_scope=True)(health_app(outbox))])


@pytest.mark.parametrize("mounted", [in_fastapi, in_starlette, in_litestar])
async def test_the_pages_work_under_the_prefix_of_a_framework(mounted: Any) -> None:
    async with memory_outbox() as outbox, client_of(mounted(outbox)) as client:
        async with outbox.running():
            pages = {page: await client.get(f"/ops/{page}") for page in ("live", "ready", "health")}
        after = await client.get("/ops/ready")
        missing = await client.get("/ops/nothing")

    assert {page: answer.status_code for page, answer in pages.items()} == {"live": 200, "ready": 200, "health": 200}
    assert pages["live"].json() == {"live": True, "reasons": []}
    assert pages["health"].json()["status"] == "ok"
    assert pages["health"].headers["cache-control"] == "no-store"
    assert after.status_code == 503
    assert after.json() == {"ready": False, "reasons": ["this process has not entered running()"]}
    assert (missing.status_code, "/live, /ready" in missing.text) == (404, True)


@pytest.mark.parametrize("path", ["/ops/live", "/proxy/ops/live", "/live", "/live/"])
async def test_the_pages_work_behind_a_proxy_with_or_without_prefix_removal(path: str) -> None:
    async with memory_outbox() as outbox:
        transport = httpx.ASGITransport(health_app(outbox), root_path="/proxy/ops")
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            assert (await client.get(path)).status_code == 200
            assert (await client.get(f"/more{path}")).status_code == 404


async def test_the_pages_work_without_a_framework_and_without_a_prefix() -> None:
    async with memory_outbox() as outbox, client_of(health_app(outbox)) as client:
        head = await client.head("/live")
        post = await client.post("/live")
        root = await client.get("/")

    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "27")
    assert (post.status_code, post.headers["allow"]) == (405, "GET, HEAD")
    assert root.status_code == 404


@pytest.mark.parametrize(("kind", "answers"), [("lifespan", 2), ("websocket", 1)])
async def test_a_lifespan_is_answered_and_a_websocket_is_closed(kind: str, answers: int) -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    if kind == "websocket":
        messages = [{"type": "websocket.connect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async with memory_outbox() as outbox:
        await health_app(outbox)({"type": kind}, receive, send)

    assert (len(sent), messages) == (answers, [])


async def test_a_failing_page_is_a_server_error_without_the_error_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*args: Any, **options: Any) -> None:
        raise ValueError("a secret")

    async with memory_outbox() as outbox, client_of(health_app(outbox)) as client:
        monkeypatch.setattr(outbox._health, "probe", fails)
        answer = await client.get("/health")

    assert answer.status_code == 500
    assert "ValueError" in answer.text
    assert "secret" not in answer.text


async def test_metrics_are_in_the_prometheus_text_format() -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("outboxio.integrations.prometheus")
    async with memory_outbox() as outbox, client_of(health_app(outbox)) as client, outbox.running():
        first, second = await client.get("/metrics"), await client.get("/metrics")

    assert (first.status_code, second.status_code) == (200, 200)
    assert first.headers["content-type"].startswith("text/plain")
    assert "# TYPE outboxio_" in first.text


async def test_metrics_without_prometheus_client_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "outboxio.integrations.prometheus", raising=False)

    async with memory_outbox() as outbox, client_of(health_app(outbox)) as client:
        answers = [await client.get("/metrics") for _ in range(2)]

    assert {answer.status_code for answer in answers} == {404}
    assert "pip install 'outboxio[prometheus]'" in answers[0].text


async def test_a_probe_binds_an_unused_outbox_to_no_event_loop() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    async with client_of(health_app(outbox)) as client:
        answers = [(await client.get(page)).status_code for page in ("/live", "/ready", "/health")]

    assert answers == [200, 503, 200]
    assert not outbox._guard.is_bound


# --- the listener ----------------------------------------------------------------------------------


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    async with memory_outbox() as outbox, serve_health(outbox, 0) as port:
        yield port


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = dict(line.lower().split(": ", 1) for line in lines)


async def sent(port: int, *chunks: bytes, ends: bool = False) -> bytes:
    """Send the chunks over one connection and return everything that the listener answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await turns()  # the listener has the same event loop, and reads what has arrived
        if ends:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.transport.abort()


async def cannot_send(writer: asyncio.StreamWriter) -> bool:
    """True if the other side has closed the connection."""
    try:
        writer.write(b"more")
        await writer.drain()
    except ConnectionError:
        return True
    return False


async def test_a_request_gets_one_complete_response_and_the_connection_closes() -> None:
    async with served() as port:
        answer = Answer(await sent(port, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"))

    assert (answer.status, json.loads(answer.body)) == (200, {"live": True, "reasons": []})
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /ready HTTP/1.1", 503),
        (b"GET /live?verbose=1 HTTP/1.0", 200),
        (b"GET http://shop:8080/live HTTP/1.1", 200),
        (b"GET //live HTTP/1.1", 404),
        (b"GET /live/ HTTP/1.1", 404),
        (b"GET http://[::1 HTTP/1.1", 404),
        (b"POST /live HTTP/1.1", 405),
        (b"DELETE /nothing HTTP/1.1", 404),
        (b"PRI * HTTP/2.0", 400),
        (b"GET /live", 400),
        (b"GET  HTTP/1.1", 400),
        (b"\x16\x03\x01 \x02 \x03", 400),
        (b"", 400),
    ],
)
async def test_every_request_line_gets_a_response(request_line: bytes, status: int) -> None:
    async with served() as port:
        answer = Answer(await sent(port, request_line + b"\r\nHost: x\r\n\r\n"))

    assert answer.status == status
    assert answer.body


async def test_a_head_request_gets_the_same_headers_without_a_body() -> None:
    async with served() as port:
        get = Answer(await sent(port, b"GET /live HTTP/1.1\r\n\r\n"))
        head = Answer(await sent(port, b"HEAD /live HTTP/1.1\r\n\r\n"))

    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


async def test_a_request_in_several_packets_is_one_request() -> None:
    async with served() as port:
        answer = Answer(await sent(port, b"GET /li", b"ve HTTP/1.1\r\nHo", b"st: x\r\n\r", b"\n"))

    assert answer.status == 200


async def test_of_two_pipelined_requests_the_first_is_answered() -> None:
    async with served() as port:
        raw = await sent(port, b"GET /live HTTP/1.1\r\n\r\nGET /ready HTTP/1.1\r\n\r\n")

    assert raw.count(b"HTTP/1.1 ") == 1
    assert Answer(raw).status == 200


async def test_a_request_of_3_kb_is_refused_with_a_response() -> None:
    async with served() as port:
        long = b"GET /live HTTP/1.1\r\nX: " + b"x" * 3000
        answers = [await sent(port, long, b"\r\n\r\n"), await sent(port, long + b"\r\n\r\n")]

    assert [Answer(raw).status for raw in answers] == [431, 431]


async def test_a_connection_closed_before_its_request_is_ignored() -> None:
    async with served() as port:
        assert await sent(port, b"GET /live HT", ends=True) == b""
        assert await sent(port, ends=True) == b""
        assert Answer(await sent(port, b"GET /live HTTP/1.1\r\n\r\n")).status == 200


async def test_a_slow_client_is_cut_off_before_and_after_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PATIENCE", 0.2)
    monkeypatch.setattr(pages, "LINGERS", 0.2)
    async with served() as port:
        assert await sent(port, b"GET /live HT") == b""
        monkeypatch.setattr(pages, "PATIENCE", 60.0)  # for the page itself
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        assert Answer(await reader.read()).status == 200
        await eventually(lambda: cannot_send(writer))  # the client does not end its side: the listener does


async def test_the_oldest_of_many_idle_connections_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_CONNECTIONS", 3)
    async with served() as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        answer = Answer(await sent(port, b"GET /live HTTP/1.1\r\n\r\n"))
        async with asyncio.timeout(4):
            assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.transport.abort()

    assert answer.status == 200


async def test_leaving_the_block_closes_connections_and_frees_the_port() -> None:
    port = free_port()
    async with memory_outbox() as outbox:
        async with serve_health(outbox, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await turns()  # the listener has the same event loop, and accepts the connection
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.transport.abort()
        async with serve_health(outbox, port):
            assert Answer(await sent(port, b"GET /live HTTP/1.1\r\n\r\n")).status == 200


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with memory_outbox() as outbox:
            with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with serve_health(outbox, port):
                    pass
            with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0"):
                async with serve_health(outbox, 0, host="192.0.2.1"):
                    pass
