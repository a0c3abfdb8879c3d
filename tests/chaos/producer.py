"""A producer in a chaos run: executes concurrent actions until SIGTERM, and records how each action ended.

``python -m tests.chaos.producer '{...}'``. Some actions roll back, some are cancelled half-way. An action locks the row
of its key before it emits, as every action must that needs order among transactions.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any, ClassVar

from outboxio import Action, CommitUnknown, Event, Outbox, Settings, Transaction
from tests.chaos.handlers import Happened
from tests.chaos.history import History, keep_log
from tests.chaos.worker import source_of
from tests.flow.worker import report, stop_on_sigterm
from tests.kit.sql import sql

KEYS = 6
ROLLED_BACK, CANCELLED = 0.15, 0.03

LOCK_KEY = "UPDATE chaos_keys SET moved = moved + 1 WHERE id = $1"
OWN_ROW = "INSERT INTO chaos_actions (id) VALUES ($1)"


class Refused(Exception):
    """An action's own reason to roll back."""


class Act(Action):
    """Writes a row, and emits one or several events."""

    event: ClassVar[type[Event]] = Happened
    number: int
    key: str | None
    events: int
    refuses: bool

    async def perform(self, tx: Transaction) -> None:
        if self.key is not None:
            await tx.execute(sql(tx, LOCK_KEY), self.key)
        await tx.execute(sql(tx, OWN_ROW), str(tx.action_id))
        for _ in range(self.events):
            tx.emit(self.event(self.number), ordering_key=self.key)
        ids = [str(event.id) for event in tx.events]
        tx.resources.write("attempt", action=str(tx.action_id), events=ids)
        _of_task[asyncio.current_task()] = tx
        if self.refuses:
            raise Refused


_of_task: dict[asyncio.Task[Any] | None, Transaction] = {}


async def produce(
    outbox: Outbox, history: History, stop: asyncio.Event, seed: int, pause: float, act_class: type[Act] = Act,
    keys: int = KEYS,
) -> None:  # fmt: skip
    chances = random.Random(seed)
    numbers = iter(range(sys.maxsize))
    while not stop.is_set():
        key = str(chances.randrange(keys)) if chances.random() < 0.5 else None
        act = act_class(next(numbers), key, chances.choice((1, 1, 1, 2, 5)), chances.random() < ROLLED_BACK)
        task = asyncio.create_task(execute(outbox, history, act))
        if chances.random() < CANCELLED:
            await asyncio.sleep(chances.random() * 0.02)
            task.cancel()
        await task
        await asyncio.sleep(pause * chances.uniform(0.5, 1.5))


async def execute(outbox: Outbox, history: History, act: Act) -> None:
    """Execute an action to its end, and record its outcome."""
    task = asyncio.current_task()
    try:
        await outbox.executor.execute(act)
        end, why = "commit", ""
    except CommitUnknown as error:
        end, why = "commit_unknown", repr(error)
    except asyncio.CancelledError as error:
        # A cancellation during COMMIT waits until COMMIT has finished.
        tx, is_unknown = _of_task.get(task), isinstance(error.__cause__, CommitUnknown)
        is_committed = tx is not None and tx.is_committed
        end, why = "commit" if is_committed else "commit_unknown" if is_unknown else "rollback", "cancelled"
    except Exception as error:
        end, why = "rollback", repr(error)
    tx = _of_task.pop(task, None)
    if tx is not None:
        history.write(end, action=str(tx.action_id), how=why[:200])


async def main(config: dict[str, Any]) -> None:
    stop = stop_on_sigterm()
    keep_log(Path(config["folder"]), config["name"])
    history = History(Path(config["folder"]), config["name"])
    settings = Settings.load(config["settings"], environ=None)
    async with Outbox(source_of(config), namespace="app", settings=settings, resources=history) as outbox:
        report("running")
        async with asyncio.TaskGroup() as group:
            for number in range(config["tasks"]):
                seed = config["seed"] * 100 + number
                group.create_task(produce(outbox, history, stop, seed, config["tasks"] / config["rate"]))
    history.write("left")
    report("left")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
