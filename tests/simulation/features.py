"""Scenarios of other features: jobs, keyed locks, and the inbox."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from msgspec import Struct

from outboxio import (
    CommitUnknown,
    DatabaseUnavailable,
    Event,
    EventEnvelope,
    Job,
    LockLost,
    LockTimeout,
    Outbox,
    PoolExhausted,
    RetryPolicy,
    Transaction,
)
from outboxio.testing.simulation import Process
from outboxio.testing.simulation.machine import Host
from tests.simulation.application import Application

# --- jobs ----------------------------------------------------------------------------------------

FIRST_DATE = """
CREATE TRIGGER first_date AFTER INSERT ON eventlog_jobs BEGIN INSERT INTO job_begins VALUES (new.next_date); END
"""
NUMBER_OF_TIMES = """
SELECT strftime('%s', next_date) - strftime('%s', (SELECT min(date) FROM job_begins)), missed, state FROM eventlog_jobs
"""


class Jobs(Application):
    """Each scheduled time of a job has one effect, or is counted as missed."""

    tables = ("CREATE TABLE job_effects (scheduled TEXT)", "CREATE TABLE job_begins (date TEXT)", FIRST_DATE)

    def register(self, outbox: Outbox, process: Process) -> None:
        super().register(outbox, process)
        chances = process.host.random

        @outbox.job("tick", every="1s", retry=RetryPolicy(max_attempts=None, base="50ms", factor=1))
        async def tick(job: Job, tx: Transaction) -> None:
            await asyncio.sleep(chances.random() * 0.4)
            await tx.execute("INSERT INTO job_effects VALUES (?)", str(job.scheduled_at))
            if chances.random() < 0.2:
                raise ValueError("the job fails now and then")

    async def during(self) -> None:
        await asyncio.sleep(self.world.random.uniform(1, 4))

    async def settle(self) -> None:
        await super().settle()
        began = self._effects()
        assert await self.world.until(lambda: self._effects() > began, 60), "no job runs any more"

    def _effects(self) -> int:
        return int(self.world.fetch("SELECT count(*) FROM job_effects")[0][0])

    def broken(self) -> Iterator[str]:
        effects = Counter(scheduled for (scheduled,) in self.world.fetch("SELECT scheduled FROM job_effects"))
        yield from (
            f"the job has {number} effects for {scheduled}" for scheduled, number in effects.items() if number > 1
        )
        [(times, missed, state)] = self.world.fetch(NUMBER_OF_TIMES)
        unfinished = state != "WAITING"
        if times != len(effects) + missed + unfinished:
            yield f"{times} scheduled times, {len(effects)} effects, {missed} missed, and the job is {state}"


# --- keyed locks ---------------------------------------------------------------------------------


class Held(Struct):
    """A block of a keyed lock."""

    key: str
    host: Host
    began: float
    term: int = 0
    ended: float | None = None

    @property
    def end(self) -> float:
        if self.ended is not None:
            return self.ended
        return float("inf") if self.host.died_at is None else self.host.died_at


class Locks(Application):
    """Two tasks of each worker take two keyed locks."""

    def start_others(self) -> None:
        self.held = list[Held]()

    async def during(self) -> None:
        await asyncio.sleep(self.world.random.uniform(0.5, 3))

    async def stay(self, outbox: Outbox, process: Process) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(self.take(outbox, process))

    async def take(self, outbox: Outbox, process: Process) -> None:
        chances = process.host.random
        while not process.leaving.is_set():
            with suppress(LockTimeout, LockLost, DatabaseUnavailable, PoolExhausted):
                key = f"key {chances.randrange(2)}"
                async with outbox.lock(key, timeout="2s") as lock:
                    held = Held(key, process.host, self.world.now)
                    self.held.append(held)
                    try:
                        if chances.random() < 0.7:
                            held.term = await lock.term()
                        await asyncio.sleep(chances.random() * 0.3)
                    finally:
                        held.ended = self.world.now
            await asyncio.sleep(chances.random() * 0.2)

    def broken(self) -> Iterator[str]:
        keys: dict[str, list[Held]] = defaultdict(list)
        for held in sorted(self.held, key=lambda held: held.began):
            keys[held.key].append(held)
        for key, blocks in keys.items():
            for first, second in pairwise(blocks):
                if second.began < first.end:
                    yield f"{second.host.name} takes {key!r} at {second.began:.6f}, while {first.host.name} has it"
            for first, second in pairwise(block for block in blocks if block.term):
                if second.term <= first.term:
                    yield f"term {second.term} of {key!r} at {second.began:.6f} came after term {first.term}"


# --- the inbox -----------------------------------------------------------------------------------

MESSAGES = 5  # of each source
CHANGED = 0.1  # how often a message is repeated with a different payload
SOURCES = ("received", "consumed")


class Message(Event):
    number: int
    is_changed: bool = False


class Inbox(Application):
    """Two receivers get each message several times, until one of them has acknowledged it."""

    tables = ("CREATE TABLE inbox_effects (handler TEXT, source TEXT, number INTEGER, is_changed INTEGER)",)

    def register(self, outbox: Outbox, process: Process) -> None:
        super().register(outbox, process)
        chances = process.host.random

        @outbox.handler(Message, name="inbox", retry=RetryPolicy(base="50ms", factor=1))
        async def inbox(envelope: EventEnvelope[Message]) -> None:
            await self.handle(chances)
            self.done[str(envelope.source), envelope.event.number] += 1

        @outbox.handler(
            Message, name="inbox-counts", delivery="transactional", retry=RetryPolicy(base="50ms", factor=1)
        )
        async def count(envelope: EventEnvelope[Message]) -> None:
            message = envelope.event
            await envelope.tx.execute(
                "INSERT INTO inbox_effects VALUES ('inbox-counts', ?, ?, ?)", envelope.source, message.number,
                message.is_changed,
            )  # fmt: skip
            await self.handle(chances)

    async def handle(self, chances: random.Random) -> None:
        await asyncio.sleep(chances.random() * 0.05)
        if chances.random() < 0.2:
            raise ValueError("a handler of the inbox fails now and then")

    def start_others(self) -> None:
        self.done: Counter[tuple[str, int]] = Counter()
        self.waiting = [(source, number) for number in range(MESSAGES) for source in SOURCES]
        """What a broker would deliver again."""
        self.accepted: dict[tuple[str, int], bool] = {}
        """By message, whether the payload that was stored is the changed one."""
        for number in range(2):
            self.world.start(f"receiver-{number + 1}", self.receive)

    async def receive(self, process: Process) -> None:
        chances = process.host.random
        async with self.outbox(process) as outbox:
            self.register(outbox, process)
            process.is_ready = True
            while not process.leaving.is_set():
                await asyncio.sleep(chances.random() * 0.1)
                if self.waiting:
                    message = chances.choice(self.waiting[:4])
                    with suppress(
                        DatabaseUnavailable, PoolExhausted, CommitUnknown, ExceptionGroup, sqlite3.OperationalError
                    ):
                        await self.deliver(outbox, message, chances)

    async def deliver(self, outbox: Outbox, message: tuple[str, int], chances: random.Random) -> None:
        source, number = message
        event = Message(number, source == "received" and chances.random() < CHANGED)
        parts: dict[str, Any] = {"source": source, "external_id": f"m-{number}", "event": event}
        if source == "received":
            status = await outbox.inbox.receive(**parts)
        else:
            status = (await outbox.inbox.consume(**parts, on_error=chances.choice(("store", "raise")))).status
        if (
            source == "received"
            and status == "RECEIVED"
            and self.accepted.setdefault(message, event.is_changed) != event.is_changed
        ):
            raise AssertionError(f"message {message} was received with two payloads")
        if (
            status != "CONFLICT" and chances.random() < 0.6 and message in self.waiting
        ):  # otherwise the response is lost
            self.waiting.remove(message)

    async def settle(self) -> None:
        await super().settle()
        assert await self.world.until(lambda: not self.waiting, 60), f"{self.waiting} cannot be received"
        await super().settle()

    def broken(self) -> Iterator[str]:
        effects = Counter(self.world.fetch("SELECT source, number FROM inbox_effects"))
        for message in ((source, number) for number in range(MESSAGES) for source in SOURCES):
            if not self.done[message]:
                yield f"message {message} was acknowledged, and never handled"
            if effects[message] != 1:
                yield f"message {message} has {effects[message]} effects"
