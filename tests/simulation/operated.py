"""Scenarios with a further process: an operator, and a caller of drain()."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from uuid import UUID

from outboxio import Filter, Outbox
from outboxio.errors import ConfigurationError, DatabaseUnavailable, PoolExhausted
from outboxio.storage.sqlite.values import as_text
from outboxio.support.clock import utc_now
from outboxio.testing.simulation import Process
from tests.chaos.worker import watch_outcomes
from tests.simulation.application import Application

SINCE = datetime(2000, 1, 1)
# Operations raise the driver's errors. ConfigurationError: no process has the handler yet.
REFUSALS = (DatabaseUnavailable, PoolExhausted, ConfigurationError, sqlite3.OperationalError)
SOME = """
SELECT id FROM eventlog_event_notifications WHERE state IN ('FAILED', 'PENDING', 'DEAD', 'BLOCKED', 'DYING')
ORDER BY sequence LIMIT 2
"""
CHANGES = """
SELECT id, before, after, time FROM simulated_writes WHERE after = 'SKIPPED'
    OR (before = 'FAILED' AND after = 'PENDING') OR (
    before IN ('SUCCEEDED', 'DEAD', 'EXPIRED', 'SKIPPED') AND after NOT IN ('SUCCEEDED', 'DEAD', 'EXPIRED', 'SKIPPED'))
ORDER BY step
"""
WAITING = """
SELECT id FROM eventlog_event_notifications WHERE state NOT IN ('SUCCEEDED', 'DEAD', 'EXPIRED', 'SKIPPED') LIMIT 1
"""
SUCCESSES = """
SELECT handler, event_id FROM simulated_writes JOIN eventlog_event_notifications USING (id) WHERE after = 'SUCCEEDED'
"""
UNDELIVERED = "SELECT sequence, event_type FROM eventlog_events WHERE NOT delivered AND sequence <= ?"
DUE = """
SELECT sequence, handler_name, state FROM eventlog_event_notifications
WHERE sequence <= ? AND (state = 'PENDING' OR state = 'FAILED' AND next_retry_at <= ?)
"""


class Operated(Application):
    """An operator retries, skips, pauses, resumes and replays during the run."""

    def start_others(self) -> None:
        self.is_ending = False
        self.operator = self.world.start("operator", self.operate)

    async def during(self) -> None:
        await asyncio.sleep(self.world.random.uniform(0.5, 3))

    async def settle(self) -> None:
        """The operator ends pauses and lets parked keys continue, until nothing waits for an operator."""
        self.is_ending = True
        await self.world.settle()
        assert await self.world.until(lambda: not self.world.fetch(WAITING), 60), "a key stays parked"
        await self.world.settle()
        for id, _, after, time in self.world.fetch(CHANGES):
            self.history.outside("skipped" if after == "SKIPPED" else "reopened", time, notification=id)

    def broken(self) -> Iterator[str]:
        successes = Counter(self.world.fetch(SUCCESSES))
        effects = Counter(self.world.fetch("SELECT handler, event FROM chaos_effects"))
        for name, kind in self.handlers.items():
            for key in {key for key in (*successes, *effects) if key[0] == name and kind.in_transaction}:
                if effects[key] != successes[key]:
                    yield f"{key} has succeeded {successes[key]} times, and has {effects[key]} effects"

    async def operate(self, process: Process) -> None:
        chances = process.host.random
        operations = (self.retry, self.skip, self.pause, self.replay, self.retry_some, self.resume)
        async with self.outbox(process) as outbox:
            self.register(outbox, process)
            process.is_ready = True
            while not process.leaving.is_set():
                await asyncio.sleep(chances.random() * 0.5)
                operation = self.clear if self.is_ending else chances.choice(operations)
                with suppress(*REFUSALS):
                    await operation(outbox, chances.choice(list(self.handlers)))

    async def retry(self, outbox: Outbox, handler: str) -> None:
        await outbox.admin.retry(Filter(handler=handler))

    async def retry_some(self, outbox: Outbox, handler: str) -> None:
        await outbox.admin.retry(self._some())

    async def skip(self, outbox: Outbox, handler: str) -> None:
        await outbox.admin.skip(self._some())

    async def pause(self, outbox: Outbox, handler: str) -> None:
        await outbox.admin.pause(handler)
        await asyncio.sleep(self.operator.host.random.random())
        await outbox.admin.unpause(handler)

    async def replay(self, outbox: Outbox, handler: str) -> None:
        await outbox.admin.replay(handler, since=SINCE)

    async def resume(self, outbox: Outbox, handler: str) -> None:
        for key in await outbox.admin.keys(handler):
            await outbox.admin.resume(handler, key.ordering_key)

    async def clear(self, outbox: Outbox, handler: str) -> None:
        for name in self.handlers:
            await outbox.admin.unpause(name)
            await self.resume(outbox, name)

    def _some(self) -> list[UUID]:
        return [UUID(id) for (id,) in self.world.fetch(SOME)]


class Drained(Application):
    """A process drains again and again, while the workers only fan out: see :meth:`drain`."""

    handling = False
    pauses = (0.003, 0.01, 0.03)

    def start_others(self) -> None:
        self.left = list[str]()
        self.drainer = self.world.start("drainer", self.drain)

    async def during(self) -> None:
        await asyncio.sleep(self.world.random.uniform(0.3, 1))

    async def drain(self, process: Process) -> None:
        """Drain, and look for rows that were committed before the call and are still due."""
        async with self.outbox(process) as outbox:
            self.register(outbox, process)
            watch_outcomes(self.instance, outbox)
            process.is_ready = True
            while not process.leaving.is_set():
                [(last,)] = self.world.fetch("SELECT coalesce(max(sequence), 0) FROM eventlog_events")
                now = as_text(utc_now())
                with suppress(DatabaseUnavailable):
                    await outbox.drain()
                    self.left += self._left(last, now)
                await asyncio.sleep(process.host.random.random() ** 3 * 0.2)

    def _left(self, last: int, now: str) -> Iterator[str]:
        for number, type in self.world.fetch(UNDELIVERED, last):
            yield f"drain() has left event {number}, {type}, without notifications"
        for number, handler, state in self.world.fetch(DUE, last, now):
            yield f"drain() has left event {number} of {handler}, which is {state}"

    def broken(self) -> Iterator[str]:
        yield from self.left
