"""Scenarios of deployments: workers leave in the middle, or are replaced by processes of the next version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec.structs import replace

import outboxio
from outboxio import Event, Outbox
from outboxio.testing.simulation import Process
from tests.chaos.handlers import Happened, Kind
from tests.chaos.producer import Act
from tests.simulation.application import Application

ENDS_WITHIN = 20.0  # seconds after which a process that received SIGTERM is killed, as by Kubernetes
RESTARTS = 3
NEW = "SELECT id FROM eventlog_events WHERE event_type = 'Happened' AND headers LIKE '%outboxio-event-version%'"
ADDED = "SELECT 1 FROM eventlog_subscriptions WHERE handler_name = ?"
ATTEMPTED = """
SELECT event_id, handler_name, attempts FROM eventlog_event_notifications WHERE attempts > 1 AND NOT EXISTS (
    SELECT 1 FROM json_each(errors) WHERE json_extract(value, '$.type') NOT LIKE '%NewerVersion')
"""
OWED = "SELECT event_id, handler_name FROM eventlog_event_notifications"


class HappenedNow(Event, type_name="Happened", version=2):
    """The event of producers, in its second version."""

    number: int
    why: str = ""


@outboxio.upcaster(HappenedNow, from_version=1)
def with_reason(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "why": "nobody knows"}


class NewAct(Act):
    event: ClassVar[type[Event]] = HappenedNow


class Leaving(Application):
    """Workers are terminated while their handlers run, and are restarted."""

    async def during(self) -> None:
        chances = self.world.random
        for _ in range(RESTARTS):
            await asyncio.sleep(chances.uniform(0.2, 1))
            worker = chances.choice(self.workers)
            worker.request_stop()
            await self.world.until(lambda worker=worker: not worker.is_alive, ENDS_WITHIN)  # type: ignore[misc]
            await self.world.restart(worker)


class Rolling(Application):
    """The workers are replaced one by one. The handlers of the scenario are those of the new version."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.is_new: dict[str, bool] = {}
        """By the name of a process, whether it has the new version when it starts the next time."""
        self.known: dict[str, bool] = {}
        """By the process in the lines, whether it had the new version."""
        self.added_at: dict[str, float] = {}

    def old_kind(self, name: str, kind: Kind) -> Kind | None:
        """A handler in the old version; ``None`` if it has none."""
        if not kind.is_everywhere:
            return None
        options = {option: value for option, value in kind.options.items() if option != "aliases"}
        return replace(kind, name=None, options=options)

    def register(self, outbox: Outbox, process: Process) -> None:
        is_new = self.is_new.get(process.name, False)
        self.known[self.history.name_of(process.host)] = is_new
        for name, kind in self.handlers.items():
            has = kind if is_new else self.old_kind(name, kind)
            if has is not None:
                self.instance.add_handler(outbox, name, has)

    async def during(self) -> None:
        await asyncio.sleep(self.world.random.uniform(0.2, 1))
        for worker in self.workers:
            self.is_new[worker.name] = True
            worker.request_stop()
            if not await self.world.until(lambda worker=worker: not worker.is_alive, ENDS_WITHIN):  # type: ignore[misc]
                await self.world.kill(worker)
            await self.world.restart(worker)
            await asyncio.sleep(self.world.random.uniform(0.05, 0.5))
        for name in self.handlers:
            if await self.world.until(lambda name=name: bool(self.world.fetch(ADDED, name)), 30):  # type: ignore[misc]
                self.added_at[name] = self.world.now
        await asyncio.sleep(self.world.random.uniform(0.1, 0.5))

    def broken(self) -> Iterator[str]:
        owed = set(self.world.fetch(OWED))
        lines = self.history.lines
        events = {line.action: line.events for line in lines if line.what == "attempt"}
        for name in (name for name, kind in self.handlers.items() if not kind.is_everywhere):
            for line in lines:
                if line.what == "commit" and line.at > self.added_at.get(name, 1e9) * 1e9:
                    for event in events[line.action]:
                        if (event, name) not in owed:
                            yield f"event {event} has no notification of {name}, which was there before"


class Versions(Rolling):
    """The new code has a new version of the event. Producers of both versions run from the start."""

    def old_kind(self, name: str, kind: Kind) -> Kind | None:
        return replace(kind, event=Happened)

    def start_others(self) -> None:
        self.new_producer = self.world.start("new-producer", self.produce_new, restarts=False)

    async def during(self) -> None:
        await super().during()
        self.new_producer.request_stop()
        await self.world.until(lambda: not self.new_producer.is_alive, 60)

    async def produce_new(self, process: Process) -> None:
        await self.produce(process, NewAct)

    def broken(self) -> Iterator[str]:
        new = {id for (id,) in self.world.fetch(NEW)}
        for line in (line for line in self.history.lines if line.what == "start" and line.event in new):
            if not self.known[line.process]:
                yield f"{line.process} has run {line.handler} for {line.event}, whose version it cannot decode"
        for event, handler, attempts in self.world.fetch(ATTEMPTED):
            yield f"{handler} has used {attempts} attempts for event {event}, which has only waited for its version"
