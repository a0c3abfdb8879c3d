"""Type checkers report mistakes at registration in an application, without false positives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A wrong line has the comment "wrong"; all other lines must be correct.
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


@outbox.handler(Placed, name="j", since=5)  # wrong: it is not a time
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
    number: int = (await perform(Pay(1), answers=[paid.order_id])).result
    placed: Placed = outbox_events.of(Paid)[number]  # wrong: it is a Paid
    text: str = (await perform(Pay(1), answers={"UPDATE": 1})).result  # wrong: it is a number
    print(placed, text)


class Misled(EventHandler[Placed]):
    name = "k"
    delivery = "twice"  # wrong: there is no such delivery

    async def handle(self, envelope: EventEnvelope[Placed]) -> None: ...
"""

# The same file: events and actions of any kind of class, and versions.
APPLICATION += """

from dataclasses import dataclass
from decimal import Decimal

import attrs
import msgspec
import outboxio
from outboxio import AnyEvent, Transaction
from outboxio.testing import emitted
from pydantic import BaseModel


@outboxio.event("order-paid", aliases={"paid"}, version=2)
class OrderPaid(BaseModel):
    order_id: int
    amount: Decimal


@outboxio.event
@dataclass(frozen=True, slots=True)
class OrderSent:
    order_id: int


@outboxio.event()
@attrs.frozen
class OrderLost:
    order_id: int


@outboxio.event
class OrderKept(msgspec.Struct):
    order_id: int


class OrderMoved(Event, version=2):
    order_id: int


@outboxio.upcaster(OrderPaid, from_version=1)
def with_amount(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "amount": "0"}


@outboxio.action(retry=outboxio.Retry(on=KeyError))
class SendOrder(BaseModel):
    order_id: int

    async def perform(self, tx: Transaction) -> int:
        for event in (OrderSent(self.order_id), OrderLost(self.order_id), OrderKept(self.order_id)):
            tx.emit(event)
        tx.emit(OrderPaid(order_id=self.order_id, amount=Decimal(1)), model_id=self.order_id)
        tx.emit("sent")  # wrong: it is no event
        tx.emit(OrderSent)  # wrong: it is a class
        return self.order_id


@outbox.handler(OrderPaid, OrderSent, name="m1")
async def of_two_kinds(envelope: EventEnvelope[OrderPaid | OrderSent]) -> None:
    number: int = envelope.event.order_id
    text: str = envelope.event.order_id  # wrong: it is a number
    number = await envelope.execute(SendOrder(order_id=number))
    text = await outbox.executor.execute(SendOrder(order_id=number))  # wrong: perform returns a number
    envelope.emit(OrderLost(number))
    any_event: EventEnvelope[AnyEvent] = envelope
    print(any_event, text, envelope.event.amuont)  # wrong: there is no such field


class OfModels(EventHandler[OrderPaid]):
    name = "m2"

    async def handle(self, envelope: EventEnvelope[OrderPaid]) -> None:
        lost: list[OrderLost] = list(await emitted(outbox, OrderLost))
        paid: list[OrderLost] = list(await emitted(outbox, OrderPaid))  # wrong: these are other events
        print(lost, paid, envelope.event.amount)


def of_text(envelope: EventEnvelope[str]) -> None: ...  # wrong: a str is not an event


outbox.register(OrderPaid, OrderSent, OrderLost, OrderKept)
outbox.register(str)  # wrong: it is no class of events
outboxio.event("name", aliases=5)  # wrong: it is no set of names
outboxio.event("name", version="2")  # wrong: it is a number
outboxio.upcaster(OrderPaid, from_version="1")  # wrong: it is a number


@outboxio.upcaster(OrderPaid, from_version=1)  # wrong: it takes a dict, and returns one
def without_dict(stored: str) -> str:
    return stored
"""

SHOP = ("shop", "migrations", "tests")
SERVICE = "service"
PYRIGHT = {"include": ["application.py", "shop_mistakes.py", *SHOP, SERVICE], "typeCheckingMode": "strict"}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The applications of this test, beside the shop of the examples as a reader would copy it."""
    (tmp_path / "application.py").write_text(APPLICATION)
    shutil.copy(ROOT / "tests" / "kit" / "shop_mistakes.py", tmp_path)
    for folder in SHOP:
        shutil.copytree(ROOT / "examples" / "shop" / folder, tmp_path / folder)
    shutil.copytree(ROOT / "examples" / "service" / SERVICE, tmp_path / SERVICE)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**PYRIGHT, "extraPaths": [str(ROOT)]}))
    return tmp_path


@pytest.mark.parametrize(
    "checker",
    [
        ("mypy", "--strict", "--config-file=", "--cache-dir=/dev/null", *PYRIGHT["include"]),
        ("pyright", "--project", "pyrightconfig.json", "--pythonpath", sys.executable),
    ],
    ids=lambda checker: str(checker[0]),
)
def test_type_checkers_find_application_mistakes_and_nothing_in_the_shop(checker: Sequence[str], sources: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}

    result = subprocess.run(
        [sys.executable, "-m", *checker], cwd=sources, env=environment, capture_output=True, text=True, check=False
    )

    wrong = {
        (file.name, number)
        for file in sources.glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "# wrong" in line
    }
    found = {(name, int(number)) for name, number in re.findall(r"(\w+\.py):(\d+):.*error", result.stdout)}
    assert found == wrong, result.stdout + result.stderr
