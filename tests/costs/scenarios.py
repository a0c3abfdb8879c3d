"""What is counted: an event of a plain handler, an event of a handler with one feature, an action, an idle second.

An event costs the difference between a drain of many events and a drain of few, so that what a drain itself costs
cancels out. The difference is 1,000 events: as many as fan-out takes in a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

import outboxio
from outboxio import Action, Batch, Event, EventEnvelope, Outbox, Settings, Transaction
from outboxio.integrations.opentelemetry import OpenTelemetry
from tests.costs.still import StillLoop

KEYS = 100  # ordering keys of the events
ACTIONS = 100
IDLE = 60  # seconds, because some work is done once a minute

# Wake-ups for other processes are sent when nobody is looking. A server ends the session of the cluster locks if real
# time passes without a heartbeat, and during a drain the clock of the event loop is frozen.
SETTINGS = Settings(notify=False, lock_heartbeat="60s")


class Deposited(Event):
    number: str
    amount: int


class Paid(Event):
    number: str
    amount: int


class PaidInEuros(Event, type_name="Paid", version=2):
    number: str
    amount: int
    currency: str


@outboxio.upcaster(PaidInEuros, from_version=1)
def with_currency(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "currency": "EUR"}


class Deposit(Action):
    number: str

    async def perform(self, tx: Transaction) -> None:
        await tx.fetchval("SELECT 1")
        tx.emit(Deposited(self.number, 1), model_id=self.number, model_type="Wallet")


async def handle(envelope: EventEnvelope[Any]) -> None: ...


async def handle_many(envelopes: list[EventEnvelope[Any]]) -> None: ...


Counting = Callable[[int], AbstractContextManager[None]]
"""Counts what is done within, for so many events, actions or seconds."""


@dataclass(frozen=True)
class Scenario:
    """An outbox with a handler, and what it does."""

    name: str
    play: Callable[[Outbox, Scenario, str, Counting], Awaitable[None]]
    dialects: tuple[str, ...] = ("sqlite", "postgres", "mariadb")
    handler: Mapping[str, Any] = field(default_factory=dict)
    """The options of the handler."""
    function: Callable[[Any], Awaitable[None]] = handle
    emits: Callable[[str, int], Any] = Deposited
    handles: type[Any] = Deposited
    outbox: Callable[[], Mapping[str, Any]] = dict
    """The options of the outbox."""
    sizes: tuple[int, int] = (200, 1200)
    """Few events and many."""
    settings: Settings = SETTINGS

    async def run(self, database: str, counting: Counting) -> None:
        async with self.open(database, **self.outbox()) as outbox:
            outbox.handler(self.handles, name="h", **self.handler)(self.function)
            await self.play(outbox, self, database, counting)

    def open(self, database: str, **options: Any) -> Outbox:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        return Outbox(database, namespace=self.name, settings=self.settings, clock=loop.utc, **options)

    async def fill(self, producer: Outbox, first: int, events: int) -> None:
        """Commit events. The texts of each have the same length, and so have their bytes."""
        async with producer.transaction("Fill") as tx:
            for number in range(first, first + events):
                text = f"{number:06}"
                key = f"{number % KEYS:03}"
                tx.emit(self.emits(text, 1), model_id=text, model_type="Wallet", ordering_key=key)


async def drain(outbox: Outbox, scenario: Scenario, database: str, counting: Counting) -> None:
    first = 0
    async with scenario.open(database) as producer:
        few, many = scenario.sizes
        for is_counted, events in ((False, few), (True, few), (True, many)):  # the first opens connections
            await scenario.fill(producer, first, events)
            first += events
            with counting(events) if is_counted else nullcontext():
                drained = await outbox.drain()
            assert drained.succeeded == events, drained


async def act(outbox: Outbox, scenario: Scenario, database: str, counting: Counting) -> None:
    for _ in range(10):
        await outbox.executor.execute(Deposit("000001"))
    for actions in (0, ACTIONS):
        with counting(actions):
            for _ in range(actions):
                await outbox.executor.execute(Deposit("000001"))


async def idle(outbox: Outbox, scenario: Scenario, database: str, counting: Counting) -> None:
    async with outbox.running():
        await asyncio.sleep(IDLE)
        for seconds in (0, IDLE):
            with counting(seconds):
                await asyncio.sleep(seconds)


def traced() -> Mapping[str, Any]:
    return {"telemetry": OpenTelemetry(TracerProvider())}


SCENARIOS = (
    Scenario("event", drain),
    Scenario("event-ordered", drain, handler={"ordered": True}),
    Scenario("event-transactional", drain, handler={"delivery": "transactional"}, sizes=(50, 100)),
    Scenario("event-batch", drain, ("sqlite", "postgres"), {"batch": Batch(size=100)}, handle_many),
    Scenario("event-partitions", drain, ("postgres",), {"partitions": 4}),  # a file has no partitions
    Scenario("event-upcast", drain, ("sqlite",), emits=Paid, handles=PaidInEuros),
    Scenario("event-traced", drain, ("sqlite",), outbox=traced),
    Scenario("action", act),
    Scenario("idle-second", idle, settings=Settings(notify=False)),
)
