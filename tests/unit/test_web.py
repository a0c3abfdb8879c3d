"""Web applications: the lifespan, the context of a request, the dependency, and responses for errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import uuid4

import anyio.from_thread
import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, Request
from litestar import Litestar, get
from litestar.di import NamedDependency
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from outboxio import (
    ConfigurationError,
    DatabaseUnavailable,
    EventEnvelope,
    Outbox,
    PoolExhausted,
    SchemaMissing,
    StaleRecord,
)
from outboxio.integrations.asgi import OriginMiddleware
from outboxio.integrations.fastapi import OutboxDep
from outboxio.integrations.litestar import OutboxPlugin
from outboxio.integrations.starlette import add_exception_handlers, get_outbox
from outboxio.model.emitter import current_origin
from outboxio.testing import memory_outbox
from tests.kit.app import Emit, MoneyDeposited, eventually

pytestmark = pytest.mark.usefixtures("in_process")

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

Envelope = EventEnvelope[MoneyDeposited]


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


class Seen:
    """A handler that keeps the origin of each event."""

    def __init__(self, outbox: Outbox) -> None:
        self.origins: list[tuple[str | None, Mapping[str, Any]]] = []
        outbox.handler(MoneyDeposited, name="first")(self.handle)

    async def handle(self, envelope: Envelope) -> None:
        self.origins.append((envelope.correlation_id, envelope.headers))


# --- the lifespan ----------------------------------------------------------------------------------


@asynccontextmanager
async def started(app: Any, **scope: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that a server runs: the lifespan runs in a separate task."""
    received, sent = asyncio.Queue[Any](), asyncio.Queue[Any]()
    lifespan = asyncio.create_task(app({"type": "lifespan", **scope}, received.get, sent.put))
    await received.put({"type": "lifespan.startup"})
    assert await sent.get() == {"type": "lifespan.startup.complete"}

    async def with_state(request: Any, receive: Any, send: Any) -> None:
        await app({**request, **scope}, receive, send)

    async with client_of(with_state) as client:
        yield client
    await received.put({"type": "lifespan.shutdown"})
    await lifespan
    assert await sent.get() == {"type": "lifespan.shutdown.complete"}


def test_the_outbox_runs_during_each_lifespan_of_the_application() -> None:
    outbox = Outbox("sqlite://", namespace="shop")
    seen = Seen(outbox)

    @asynccontextmanager
    async def migrates(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        await outbox.migrate()
        yield {"shop": "books"}

    app = FastAPI(lifespan=outbox.lifespan.within(migrates))

    @app.post("/payments")
    async def pay(outbox: OutboxDep, request: Request) -> str:
        await outbox.execute(Emit((1,)))
        await eventually(lambda: bool(seen.origins))
        shop: str = request.state.shop
        return shop

    async def serve() -> None:
        async with started(app, state={}) as client:
            assert (await client.post("/payments")).json() == "books"
        with pytest.raises(SchemaMissing):  # closed, so the memory is empty
            await outbox.execute(Emit((1,)))
        await outbox.close()

    for _ in range(2):
        seen.origins.clear()
        asyncio.run(serve())
        assert seen.origins == [(None, {})]


async def test_an_application_without_state_starts_on_a_server_without_state() -> None:
    async with memory_outbox() as outbox, started(Starlette(lifespan=outbox.lifespan)):
        pass


async def test_a_failed_start_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_async_engine("mysql+aiomysql://127.0.0.1:1/shop")
    outbox = Outbox(engine, namespace="shop")
    received, sent = asyncio.Queue[Any](), asyncio.Queue[Any]()
    await received.put({"type": "lifespan.startup"})

    with pytest.raises(DatabaseUnavailable) as caught:
        await FastAPI(lifespan=outbox.lifespan)({"type": "lifespan", "state": {}}, received.get, sent.put)

    [entry] = [record for record in caplog.records if record.name.startswith("outboxio")]
    assert entry.levelname == "CRITICAL"
    assert entry.getMessage() == f"the application cannot start: {caught.value}"
    assert entry.exc_info is None
    answer = await sent.get()
    assert answer["type"] == "lifespan.startup.failed"
    assert "aiomysql/connection.py" not in answer["message"]  # the framework's traceback has none of the driver's lines
    assert len(answer["message"].splitlines()) < 25


async def test_an_error_of_the_running_application_keeps_its_cause() -> None:
    async with memory_outbox() as outbox:
        cause = OSError("the driver's")
        with pytest.raises(DatabaseUnavailable) as caught:
            async with outbox.lifespan(FastAPI()):
                raise DatabaseUnavailable("default", "there", "gone") from cause

    assert caught.value.__cause__ is cause


async def test_handlers_finish_before_the_lifespan_of_the_application_closes() -> None:
    calls: list[str] = []

    @asynccontextmanager
    async def mine(app: FastAPI) -> AsyncIterator[None]:
        calls.append("opened")
        yield
        calls.append("closed")

    async with memory_outbox() as outbox:
        app = FastAPI(lifespan=outbox.lifespan.within(mine))
        handling = asyncio.Event()

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Envelope) -> None:
            handling.set()
            await envelope.stopping.wait()
            calls.append("handled")

        async with app.router.lifespan_context(app):
            await outbox.execute(Emit((1,)))
            await handling.wait()

        assert calls == ["opened", "handled", "closed"]
        await outbox.execute(Emit((2,)))  # the outbox was in use before, so the lifespan has not closed it


async def test_an_error_of_the_application_stops_the_outbox_and_propagates() -> None:
    async with memory_outbox() as outbox:
        with pytest.raises(ValueError, match="no"):
            async with outbox.lifespan(FastAPI()):
                raise ValueError("no")
        async with outbox.lifespan(object()):  # an application without app.state
            pass


async def test_a_missing_outbox_is_reported_with_the_fix() -> None:
    app = FastAPI()

    @app.get("/")
    async def index(outbox: OutboxDep) -> None: ...

    async with client_of(app) as client:
        with pytest.raises(ConfigurationError, match=r"lifespan=outbox\.lifespan"):
            await client.get("/")


# --- the context of a request ----------------------------------------------------------------------


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Seen, Outbox]]:
    async with memory_outbox() as outbox:
        seen, app = Seen(outbox), FastAPI()
        app.state.outbox = outbox
        app.add_middleware(OriginMiddleware, **options)

        async def later() -> None:
            await outbox.execute(Emit((1,)))

        @app.post("/execute")
        async def execute(outbox: OutboxDep) -> None:
            await outbox.execute(Emit((1,)))

        @app.post("/explicit")
        async def explicit(outbox: OutboxDep) -> None:
            await outbox.execute(Emit((1,)), correlation_id="mine", headers={"tenant": "a", "tracestate": "mine=1"})

        @app.post("/transaction")
        async def transaction(outbox: OutboxDep) -> None:
            async with outbox.transaction("Pay", headers={"tenant": "a"}) as tx:
                await Emit((1,)).perform(tx)

        @app.post("/background")
        async def background(tasks: BackgroundTasks) -> None:
            tasks.add_task(later)

        @app.post("/thread")
        def thread(outbox: OutboxDep) -> None:
            anyio.from_thread.run(outbox.execute, Emit((1,)))

        @app.post("/received")
        async def received(outbox: OutboxDep) -> None:
            await outbox.inbox.receive(source="shop", external_id="1", event=MoneyDeposited(uuid4(), Decimal(1)))

        async with client_of(app) as client:
            yield client, seen, outbox
        assert current_origin.get() is None


async def origin(path: str, headers: Any, **options: Any) -> tuple[str | None, Mapping[str, Any]]:
    async with serving(**options) as (client, seen, outbox):
        (await client.post(path, headers=headers)).raise_for_status()
        await outbox.drain()
        (found,) = seen.origins
        return found


@pytest.mark.parametrize("path", ["/execute", "/background", "/thread", "/received"])
async def test_an_action_has_the_correlation_id_and_trace_of_its_request(path: str) -> None:
    headers = {"x-request-id": "r-1", "traceparent": PARENT, "tracestate": "vendor=1"}

    assert await origin(path, headers) == ("r-1", {"traceparent": PARENT, "tracestate": "vendor=1"})


async def test_explicit_values_override_those_of_the_request() -> None:
    headers = {"x-request-id": "r-1", "traceparent": PARENT, "tracestate": "vendor=1"}

    assert await origin("/explicit", headers) == (
        "mine",
        {"traceparent": PARENT, "tracestate": "mine=1", "tenant": "a"},
    )
    assert await origin("/transaction", {"traceparent": PARENT}) == (None, {"traceparent": PARENT, "tenant": "a"})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-correlation-id": "c-1", "x-request-id": "r-1"}, "c-1"),
        ({"x-correlation-id": "not valid", "x-request-id": "r-1"}, "r-1"),
        ({"X-Request-ID": "Root=1-67891233-abcdef012345678912345678"}, "Root=1-67891233-abcdef012345678912345678"),
        ({"x-request-id": "x" * 128}, "x" * 128),
        ({"x-request-id": "x" * 129}, None),
        ({"x-request-id": "<script>"}, None),
        ({"x-request-id": ""}, None),
        ({"x-request-id": b"\xe4"}, None),
        ({}, None),
    ],
)
async def test_a_correlation_id_comes_from_the_first_valid_header(headers: Any, expected: str | None) -> None:
    assert (await origin("/execute", headers))[0] == expected


async def test_header_names_are_configurable_and_an_id_can_be_generated() -> None:
    assert (await origin("/execute", {"x-id": "1", "x-request-id": "2"}, correlation_headers=["X-Id"]))[0] == "1"
    first = await origin("/execute", {"x-request-id": "not valid"}, generate=True)
    second = await origin("/execute", {}, generate=True)
    assert len({first[0], second[0], None}) == 3


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")], "a=1,b=2"),
        ([("traceparent", PARENT), ("tracestate", "x" * 513)], None),
        ([("traceparent", PARENT.replace("00-", "cc-", 1) + "-more")], None),
    ],
)
async def test_a_trace_is_passed_on_unchanged(headers: Any, expected: str | None) -> None:
    _, found = await origin("/execute", headers)

    assert found == dict(headers[:1]) | ({} if expected is None else {"tracestate": expected})


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", PARENT.upper())], [("traceparent", PARENT + "-more")], [("traceparent", PARENT[:-1])],
        [("traceparent", PARENT.replace("00-", "ff-", 1))], [("traceparent", PARENT), ("traceparent", PARENT)],
        [("traceparent", "00-" + "0" * 32 + "-00f067aa0ba902b7-01")], [("tracestate", "vendor=1")],
        [("traceparent", PARENT[:36] + "0" * 16 + "-01")], [("traceparent", "none"), ("tracestate", "vendor=1")],
    ],
)  # fmt: skip
async def test_an_invalid_trace_is_ignored(headers: Any) -> None:
    assert await origin("/execute", headers) == (None, {})


async def test_concurrent_requests_keep_their_own_ids() -> None:
    async with serving() as (client, seen, outbox):
        await asyncio.gather(*(client.post("/execute", headers={"x-request-id": f"r-{n}"}) for n in range(20)))
        await client.post("/execute")
        await outbox.drain()

    assert sorted(str(found) for found, _ in seen.origins) == sorted(["None", *(f"r-{n}" for n in range(20))])


async def test_an_action_of_a_handler_has_the_ids_of_its_event() -> None:
    async with memory_outbox() as outbox:
        found: list[str | None] = []

        @outbox.handler(MoneyDeposited, name="first", delivery="transactional")
        async def first(envelope: Envelope) -> None:
            found.append(envelope.correlation_id)
            if len(found) == 1:
                await envelope.execute(Emit((2,)))

        async def drains(scope: Any, receive: Any, send: Any) -> None:
            await outbox.execute(Emit((1,)), correlation_id="of the action")
            await outbox.drain()

        app = OriginMiddleware(drains, generate=True)
        await app({"type": "http", "headers": [(b"x-request-id", b"of-the-request")]}, None, None)  # type: ignore[arg-type]

    assert found == ["of the action", "of the action"]


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_websockets_and_the_lifespan_pass_unchanged(kind: str) -> None:
    passed: list[Any] = []

    async def app(*arguments: Any) -> None:
        passed.append((arguments, current_origin.get()))

    arguments: Any = ({"type": kind, "headers": [(b"x-request-id", b"r-1")]}, object(), object())
    await OriginMiddleware(app, generate=True)(*arguments)
    assert passed == [(arguments, None)]


@pytest.mark.parametrize("names", [["X Request"], [""], [5], "X:Y"])
def test_an_invalid_header_name_is_refused(names: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected names such as 'X-Request-ID'"):
        OriginMiddleware(FastAPI(), correlation_headers=names)


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StaleRecord("Wallet", 7, 1), 409),
        (DatabaseUnavailable("default", "db:5432", "it is down"), 503),
        (PoolExhausted("default", "db:5432", size=5, in_use=5, held=1.0, timeout=30.0), 503),
        (ValueError("no"), None),
    ],
)
async def test_a_retryable_error_has_a_response(error: Exception, status: int | None) -> None:
    async def index(request: Request) -> None:
        raise error

    app = Starlette(routes=[Route("/", index)])
    add_exception_handlers(app)

    async with client_of(app) as client:
        if status is None:
            with pytest.raises(ValueError, match="no"):
                await client.get("/")
            return
        response = await client.get("/")

    assert (response.status_code, response.headers.get("retry-after")) == (status, "1" if status == 503 else None)
    assert "default" not in response.text
    assert response.json()["detail"]


# --- Starlette and Litestar --------------------------------------------------------------------------


async def test_a_starlette_application_has_the_outbox_in_its_state() -> None:
    async def index(request: Request) -> Response:
        return PlainTextResponse(get_outbox(request).namespace)

    async with memory_outbox() as outbox:
        app = Starlette(routes=[Route("/", index)], lifespan=outbox.lifespan)
        async with started(app) as client:
            assert (await client.get("/")).text == outbox.namespace


async def test_a_litestar_application_runs_and_injects_the_outbox() -> None:
    @get("/")
    async def index(outbox: NamedDependency[Outbox]) -> int:
        await outbox.execute(Emit((1,)))
        await eventually(lambda: bool(seen.origins))
        return len(seen.origins)

    async with memory_outbox() as outbox:
        seen = Seen(outbox)
        app = Litestar([index], plugins=[OutboxPlugin(outbox)], middleware=[OriginMiddleware])
        async with started(app, state={}, litestar_app=app) as client:
            response = await client.get("/", headers={"x-request-id": "r-1"})
            assert response.json() == 1

    assert seen.origins == [("r-1", {})]
