"""A fault test: events with ordered keys travel through a broker into a second database.

During the run the broker is restarted twice, the relay process and the inbox process are each killed twice, and
messages are sent again. At the end the histories of both sides are compared: each event once, and the events of each
key in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from outboxio import Event, Outbox
from tests.kit.app import Look, eventually
from tests.kit.broker_kinds import KINDS, Kind
from tests.kit.broker_service import RECEIVER, SENDER

ROOT = Path(__file__).parent.parent.parent
TOGETHER = 100  # events of a commit


class Counted(Event):
    key: str
    number: int
    """Counts the events of a key, from 0."""


class Plan(Struct, frozen=True):
    """The size of a run."""

    events: int = 2000
    keys: int = 50
    sent_again: int = 200
    longest: float = 170.0
    """Seconds."""


class Report(Struct):
    """The result of a run."""

    seconds: float
    steps: list[str]
    violations: list[str]
    duplicates: int
    """Events that were sent more than once, at least."""


def violations(sent: Sequence[tuple[str, int]], received: Sequence[tuple[str, int]]) -> list[str]:
    """List lost, duplicated and misordered events of the received history."""
    problems: list[str] = []
    expected, seen = _by_key(sent), _by_key(received)
    for key in sorted(expected.keys() | seen.keys()):
        numbers, got = expected[key], seen[key]
        if lost := sorted(set(numbers) - set(got)):
            problems.append(f"{key}: lost {lost[:10]}")
        if unknown := sorted(set(got) - set(numbers)):
            problems.append(f"{key}: never sent {unknown[:10]}")
        if double := sorted({number for number in got if got.count(number) > 1} if len(set(got)) < len(got) else ()):
            problems.append(f"{key}: came twice {double[:10]}")
        position = {number: at for at, number in enumerate(numbers)}
        order = [position[number] for number in got if number in position]
        if order != sorted(order):
            at = next(i for i in range(1, len(order)) if order[i] < order[i - 1])
            problems.append(f"{key}: {got[at]} came after {got[at - 1]}")
    return problems


def _by_key(history: Sequence[tuple[str, int]]) -> defaultdict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for key, number in history:
        found[key].append(number)
    return found


class Course:
    """A run with one kind of broker."""

    def __init__(self, kind: str, home: Path, databases: tuple[str, str], plan: Plan) -> None:
        self._kind = kind
        self._plan = plan
        self._home = home
        self._broker: Kind = KINDS[kind](home / "broker")
        self._source, self._target = databases
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._steps: list[str] = []

    async def run(self) -> Report:
        """Run the course."""
        for url, namespace in ((self._source, SENDER), (self._target, RECEIVER)):
            async with Outbox(url, namespace=namespace) as outbox:
                await outbox.migrate()
        self._broker.start()
        try:
            await self._broker.prepare()
            with self._running("relay"), self._running("inbox"):
                started = time.monotonic()
                async with asyncio.timeout(self._plan.longest), asyncio.TaskGroup() as group:
                    group.create_task(self._produce())
                    group.create_task(self._inject_faults())
                seconds = time.monotonic() - started
        finally:
            self._broker.stop()
        sent, received = await self._history(self._source), await self._history(self._target)
        return Report(seconds, self._steps, violations(sent, received), self._plan.sent_again)

    async def _produce(self) -> None:
        """Write the events, rotating through the keys."""
        plan, number = self._plan, 0
        async with Outbox(self._source, namespace=SENDER) as outbox:
            while number < plan.events:
                async with outbox.transaction("count") as tx:
                    for at in range(number, min(number + TOGETHER, plan.events)):
                        key = f"k{at % plan.keys}"
                        tx.emit(Counted(key, at // plan.keys), ordering_key=key)
                number += TOGETHER

    async def _inject_faults(self) -> None:
        """Inject each fault after a share of the events has arrived, then wait for the remaining events."""
        faults: list[tuple[float, str, Callable[[], None]]] = [
            (0.10, "the relay is killed", lambda: self._again("relay")),
            (0.25, "the broker is restarted", self._broker.restart),
            (0.40, "the inbox is killed", lambda: self._again("inbox")),
            (0.55, "the relay is killed", lambda: self._again("relay")),
            (0.70, "the broker is restarted", self._broker.restart),
            (0.85, "the inbox is killed", lambda: self._again("inbox")),
        ]
        for part, name, act in faults:
            count = await self._arrived(int(part * self._plan.events))
            await asyncio.to_thread(act)
            self._steps.append(f"{name} at {count}")
        await self._send_again()
        await self._arrived(self._plan.events)
        await self._all_settled()

    async def _send_again(self) -> None:
        """Make finished notifications due again, so that their messages are sent a second time."""
        look = Look(self._source)
        again = self._plan.sent_again
        ids = await look.fetch(
            f"SELECT id FROM {{events}} WHERE event_type = 'Counted' ORDER BY sequence LIMIT {again}"
        )
        await look.fetch(
            "UPDATE {event_notifications} SET state = 'PENDING', attempts = 0 "
            "WHERE state = 'SUCCEEDED' AND event_id = ANY($1)",
            [row["id"] for row in ids],
        )
        self._again("relay")  # which reads due rows from the start
        self._steps.append(f"{self._plan.sent_again} messages are sent again")

    async def _arrived(self, number: int) -> int:
        look = Look(self._target)
        while (count := int(await look.value(_COUNT))) < number:
            self._refuse_dead_processes()
            await asyncio.sleep(0.05)
        return count

    async def _all_settled(self) -> None:
        """Wait until the relay has nothing left to send, including the repeated messages."""
        look = Look(self._source)

        async def settled() -> bool:
            return set(await look.states()) == {"SUCCEEDED"}

        await eventually(settled)
        await asyncio.sleep(1)  # time for a message that must not be stored; no event signals its absence

    async def _history(self, url: str) -> list[tuple[str, int]]:
        rows = await Look(url).fetch("SELECT payload FROM {events} WHERE event_type = 'Counted' ORDER BY sequence")
        found = [json.loads(row["payload"]) if isinstance(row["payload"], str) else row["payload"] for row in rows]
        return [(payload["key"], payload["number"]) for payload in found]

    @contextmanager
    def _running(self, side: str) -> Iterator[None]:
        self._begin(side)
        try:
            yield
        finally:
            self._processes[side].kill()
            self._processes[side].wait()

    def _begin(self, side: str) -> None:
        database = self._source if side == "relay" else self._target
        command = [sys.executable, "-m", "tests.kit.broker_service", side, self._kind, self._broker.url, database]
        with (self._home / f"{side}.log").open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self._processes[side] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def _again(self, side: str) -> None:
        """Kill a process and start a replacement."""
        self._processes[side].kill()
        self._processes[side].wait()
        self._begin(side)

    def _refuse_dead_processes(self) -> None:
        for side, process in self._processes.items():
            assert process.poll() is None, (self._home / f"{side}.log").read_text()[-3000:]


_COUNT = "SELECT count(*) FROM {events} WHERE event_type = 'Counted'"
