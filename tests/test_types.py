"""The errors of a type checker in an application: mistakes at registration, and no false alarms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A wrong line says so; all remaining lines must be right.
APPLICATION = """
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from fastapi import FastAPI

from outboxio import (
    Action,
    Batch,
    Delivery,
    Event,
    EventEnvelope,
    EventHandler,
    Handlers,
    Outbox,
    Settings,
    Transaction,
)
from outboxio.integrations.fastapi import OriginMiddleware, OutboxDep, add_exception_handlers
from outboxio.testing import EmittedEvents, perform


class Placed(Event):
    order_id: int


class Paid(Event):
    order_id: int


outbox = Outbox("sqlite://", namespace="app")


@outbox.handler(Placed, name="a", delivery="transactional", ordered=True, on_dead_key="park", since="now")
async def single(envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, Paid, name="b", batch=None, since=datetime(2026, 1, 1))
async def of_both(envelope: EventEnvelope[Placed | Paid]) -> None: ...


@outbox.handler(Placed, name="c", batch=Batch(size=10), partitions=4, total_concurrency=8)
async def batch(envelopes: list[EventEnvelope[Placed]]) -> list[EventEnvelope[Placed]]:
    return envelopes


class Handles(EventHandler[Placed]):
    name = "d"
    delivery = "transactional"
    on_dead_key = "continue"
    ordered = True
    since = "now"
    partitions = 16
    total_concurrency = 40

    async def handle(self, envelope: EventEnvelope[Placed]) -> None: ...


class HandlesByName(EventHandler[Placed]):
    name = "e"
    delivery = Delivery.AT_MOST_ONCE
    since = datetime(2026, 1, 1)

    async def handle(self, envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="plain")
def plain(envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="plain-batch", batch=Batch())
def plain_batch(envelopes: list[EventEnvelope[Placed]]) -> list[EventEnvelope[Placed]]:
    return envelopes


class HandlesInThread(EventHandler[Placed]):
    name = "plain-class"

    def handle(self, envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="plain-wrong", batch=Batch())  # wrong: it takes one
def plain_takes_one(envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="f", batch=Batch())  # wrong: it takes one
async def takes_one(envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="g")  # wrong: it takes a list
async def takes_list(envelopes: list[EventEnvelope[Placed]]) -> None: ...


class Mailer: ...


@outbox.handler(Placed, name="h")
async def with_resource(envelope: EventEnvelope[Placed], mailer: Mailer) -> None: ...


handlers = Handlers()


@handlers.handler(Placed, name="h2", batch=Batch(), ordered=False)
def batch_with_resource(envelopes: list[EventEnvelope[Placed]], *, mailer: Mailer | None = None) -> None: ...


class HandlesWithResource(EventHandler[Placed]):
    name = "h3"

    async def handle(self, envelope: EventEnvelope[Placed], mailer: Mailer) -> None: ...


@handlers.handler(Placed, name="h4")  # wrong: it takes a list
async def list_with_resource(envelopes: list[EventEnvelope[Placed]], mailer: Mailer) -> None: ...


@handlers.handler(Placed, name="h5", batch=Batch())  # wrong: it takes one
async def one_with_resource(envelope: EventEnvelope[Placed], mailer: Mailer) -> None: ...


@handlers.handler(Placed, name="h6")  # wrong: it takes no envelope
async def without_envelope(*, mailer: Mailer) -> None: ...


@handlers.handler(Placed, name="h7", delivry="transactional")  # wrong: there is no such option
async def misspelt(envelope: EventEnvelope[Placed]) -> None: ...


outbox.include(handlers)
outbox.include(outbox)  # wrong: it is no router


@asynccontextmanager
async def tenant(envelope: EventEnvelope[Any]) -> AsyncGenerator[None]:
    yield


async def no_context(envelope: EventEnvelope[Any]) -> None: ...


Outbox("sqlite://", namespace="app", around=tenant, resources={Mailer: Mailer})


class Count(Action):
    async def perform(self, tx: Transaction) -> int:
        return 1


async def counts() -> int:
    text: str = await outbox.execute(Count())  # wrong: it is a number
    return await outbox.execute(Count(), correlation_id=text)


@asynccontextmanager
async def mine(app: FastAPI) -> AsyncGenerator[dict[str, int]]:
    yield {"shop": 1}


app = FastAPI(lifespan=outbox.lifespan)
FastAPI(lifespan=outbox.lifespan.within(mine))
FastAPI(lifespan=outbox.lifespan.within(counts))  # wrong: it is no lifespan
app.add_middleware(OriginMiddleware, generate=True)
app.add_middleware(OriginMiddleware, generates=True)  # wrong: there is no such option
add_exception_handlers(app)


@app.get("/")
async def index(outbox: OutboxDep) -> int:
    wrong: str = await outbox.execute(Count())  # wrong: it is a number
    return len(wrong)


Outbox("sqlite://", namespace="app", around=no_context)  # wrong: it is no context manager


@outbox.handler(Placed, name="i", delivery="twice")  # wrong: there is no such delivery
async def twice(envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="j", since=5)  # wrong: it is no moment
async def since(envelope: EventEnvelope[Placed]) -> None: ...


@outbox.handler(Placed, name="l", partitions="all")  # wrong: it is a number
async def shared(envelope: EventEnvelope[Placed]) -> None: ...


Settings(balance="all")


class Pay(Action):
    order_id: int

    async def perform(self, tx: Transaction) -> int:
        return await tx.execute("UPDATE orders SET paid = 1")


async def tested(outbox_events: EmittedEvents) -> None:
    paid: Paid = outbox_events.of(Paid).one(order_id=1)
    number: int = (await perform(Pay(1), given=[paid.order_id])).result
    placed: Placed = outbox_events.of(Paid)[number]  # wrong: it is a Paid
    text: str = (await perform(Pay(1), given={"UPDATE": 1})).result  # wrong: it is a number
    print(placed, text)


class Misled(EventHandler[Placed]):
    name = "k"
    delivery = "twice"  # wrong: there is no such delivery

    async def handle(self, envelope: EventEnvelope[Placed]) -> None: ...
"""

PYRIGHT = '{"include": ["application.py"], "typeCheckingMode": "strict", "extraPaths": ["%s"]}'


@pytest.mark.parametrize(
    "checker",
    [
        ("mypy", "--strict", "--config-file=", "--cache-dir=cache", "application.py"),
        ("pyright", "--project", "pyrightconfig.json", "--pythonpath", sys.executable),
    ],
    ids=lambda checker: str(checker[0]),
)
def test_mistakes_at_registration_are_errors_of_type_checkers(checker: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "application.py").write_text(APPLICATION)
    (tmp_path / "pyrightconfig.json").write_text(PYRIGHT % ROOT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}

    told = subprocess.run(
        [sys.executable, "-m", *checker], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    lines = APPLICATION.splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    found = {int(number) for number in re.findall(r"application\.py:(\d+):.*error", told.stdout)}
    assert found == wrong, told.stdout + told.stderr
