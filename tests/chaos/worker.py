"""An instance of the application in a chaos run: all handlers, until SIGTERM, and a history of its steps.

``python -m tests.chaos.worker '{...}'``. Where the library has no hook, this module wraps private functions. A line of
JSON on standard input requests a disturbance: ``{"do": "block", "seconds": 2}``; the end of the input means that the
test has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from outboxio import EventEnvelope, HandlerFailed, Outbox, RetryAfter, Settings, Unprocessable
from outboxio.dispatch.scheduler import Scheduler
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.workers import WorkerPool
from outboxio.model.lock_name import LockName
from outboxio.model.outcome import Bucket, Lease
from outboxio.runs.endings import EndUnknown
from outboxio.runs.handler_transactions import HandlerTransactions
from outboxio.runs.opening import RowClaimer
from outboxio.runs.run import Run
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.shard_run import ShardRun
from outboxio.storage import Shard
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.aio import run_to_completion
from tests.chaos.case import hook_of, slot_name
from tests.chaos.handlers import SETS, Followed, Kind
from tests.chaos.history import History, keep_log
from tests.flow.worker import report
from tests.kit.app import eventually
from tests.kit.inside import database_of, run_of
from tests.kit.sql import sql

EFFECT = "INSERT INTO chaos_effects (handler, event) VALUES ($1, $2)"
RARELY, LONG = 0.05, 30  # how often a handler takes so many times as long

Envelope = EventEnvelope[Any]


def slot_of(lease: Lease) -> str:
    return slot_name(lease.handler_name, lease.partition)


class Instance:
    """The handlers' behaviour, and their history."""

    def __init__(self, history: History, seed: int) -> None:
        self.history = history
        self.random = random.Random(seed)
        self.disturbances: deque[dict[str, Any]] = deque()
        self.decided: dict[asyncio.Task[Any], tuple[Run, float]] = {}
        self.ignoring = 0
        """The number of runs that currently ignore their cancellation."""
        self._calls: dict[Run, int] = {}
        self._numbers = iter(range(1, sys.maxsize))

    def number(self) -> int:
        return next(self._numbers)

    def add_handler(self, outbox: Outbox, name: str, kind: Kind) -> None:
        async def one(envelope: Envelope) -> None:
            await self._handle(name, kind, [envelope])

        async def many(envelopes: list[Envelope]) -> list[Envelope]:
            return await self._handle(name, kind, envelopes)

        async def on_dead(envelope: Envelope, error: HandlerFailed) -> None:
            await asyncio.sleep(self.random.random() * kind.sleeps)
            await envelope.tx.execute(sql(envelope.tx, EFFECT), hook_of(name), str(envelope.event_id))
            if kind.hook_fails is not None and self.random.random() < kind.hook_fails:
                raise RetryAfter(0.1)

        hook = {} if kind.hook_fails is None else {"on_dead": on_dead}
        register = outbox.handler(kind.event, name=kind.name or name, **kind.options, **hook)
        register(many if kind.in_batches else one)

    async def _handle(self, name: str, kind: Kind, envelopes: list[Envelope]) -> list[Envelope]:
        command = self.disturbances.popleft() if self.disturbances else {"do": ""}
        numbers = [self._start(name, envelope, command["do"]) for envelope in envelopes]
        how, returned = "cancelled", list[Envelope]()
        try:
            await self._disturb(command)
            chance = self.random.random()
            long = LONG if self.random.random() < RARELY and not kind.is_steady else 1
            await asyncio.sleep(max(kind.at_least, chance * kind.sleeps * long))
            if chance < kind.fails:
                raise ValueError(f"{name} fails now and then")
            if chance > 1 - kind.dies:
                raise Unprocessable(f"{name} will never take this")
            if chance < kind.fails + kind.returns:
                returned = self.random.sample(envelopes, self.random.randint(1, len(envelopes)))
            for number, envelope in zip(numbers, envelopes, strict=True):
                if envelope not in returned:
                    await self._take_effect(number, name, kind, envelope)
            how = "done"
            return returned
        except Exception as error:
            how = f"failed: {error!r}"
            raise
        finally:
            for number in numbers:
                self.history.write("finish", run=number, how=how)

    def _start(self, name: str, envelope: Envelope, how: str) -> int:
        task = asyncio.current_task()
        assert task is not None
        number, (run, decided) = self.number(), self.decided[task]
        call = self._calls.setdefault(run, number)
        [row] = [row for row in run.undone if row.notification.id == envelope.notification_id]
        self.history.write(
            "start", run=number, call=call, event=str(envelope.event_id), notification=str(row.notification.id),
            handler=name, partition=row.lease.partition, key=envelope.ordering_key or "",
            sequence=row.notification.sequence, attempt=envelope.attempt, term=row.lease.term,
            decided=int(decided * 1e9), how=how, slot=slot_of(row.lease),
        )  # fmt: skip
        return number

    async def _take_effect(self, number: int, name: str, kind: Kind, envelope: Envelope) -> None:
        if kind.in_transaction:
            await envelope.tx.execute(sql(envelope.tx, EFFECT), name, str(envelope.event_id))
        if kind.emits:
            envelope.emit(Followed(envelope.event.number))
        self.history.write("effect", run=number, handler=name, event=str(envelope.event_id))

    async def _disturb(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "block":
                self.history.write("blocking", until=time.monotonic_ns() + int(command["seconds"] * 1e9))
                time.sleep(command["seconds"])  # noqa: ASYNC251  # the event loop is what is blocked
            case "ignore":
                self.ignoring += 1
                try:
                    await run_to_completion(asyncio.sleep(command["seconds"]))
                finally:
                    self.ignoring -= 1
            case "exit":
                os._exit(9)


# --- what the library does -----------------------------------------------------------------------


def watch_locks(history: History, stop: asyncio.Event) -> None:
    taken, lost, proven = ShardRun.lock_taken, ShardRun.lock_lost, ShardRun.locks_proven_until
    release, give_back = LockManager.release, LockManager._release_names

    def lock_taken(self: ShardRun, name: LockName, lease: Lease) -> None:
        history.write("taken", lock=name.lease, term=lease.term)
        taken(self, name, lease)

    def lock_lost(self: ShardRun, name: LockName) -> None:
        history.write("lost", lock=name.lease)
        lost(self, name)

    def locks_proven_until(self: ShardRun, until: float) -> None:
        history.write("proven", until=max(0, int(until * 1e9)) if until > 0 else 0)
        proven(self, until)

    async def release_all(self: LockManager) -> None:
        history.write("released", locks=[name.lease for name in self._leases if self.holds(name)], how="leaving")
        await release(self)

    async def give(self: LockManager, names: Sequence[LockName]) -> None:
        history.write("released", locks=[name.lease for name in names], how="leaving" if stop.is_set() else "given")
        await give_back(self, names)

    ShardRun.lock_taken, ShardRun.lock_lost = lock_taken, lock_lost  # type: ignore[method-assign]
    ShardRun.locks_proven_until = locks_proven_until  # type: ignore[method-assign]
    # mypy accepts no new method of a class; the history needs the time before the lock is released.
    LockManager.release, LockManager._release_names = release_all, give  # type: ignore[method-assign]


def watch_numbers(history: History) -> None:
    """Automatic changes of partition counts."""
    change = PartitionTables.set_automatic

    async def watched(self: PartitionTables, *args: Any, **values: Any) -> bool:
        if is_changed := await change(self, *args, **values):
            history.write("spread", number=args[2])
        return is_changed

    PartitionTables.set_automatic = watched  # type: ignore[method-assign]


def watch_runs(instance: Instance) -> None:
    """What each worker decided to run, and when."""
    has_time, next_run, decided_at = WorkerPool._has_time, Scheduler.next_run, 0.0

    def has_time_now(self: WorkerPool, now: float, loop: asyncio.AbstractEventLoop) -> bool:
        nonlocal decided_at
        decided_at = now
        return has_time(self, now, loop)

    def decide(self: Scheduler) -> Run | None:
        run, task = next_run(self), asyncio.current_task()
        if run is not None and task is not None:
            instance.decided[task] = run, decided_at
        return run

    WorkerPool._has_time, Scheduler.next_run = has_time_now, decide  # type: ignore[method-assign]


def watch_outcomes(instance: Instance, outbox: Outbox) -> None:
    """Outcomes that are written later, and how many of each bucket the database accepted."""
    notifications = database_of(outbox).notifications

    def watched(settle: Callable[[Bucket, datetime], Awaitable[int]]) -> Callable[[Bucket, datetime], Awaitable[int]]:
        async def recorded(bucket: Bucket, now: datetime) -> int:
            number = instance.number()
            rows = [(str(o.notification_id), slot_of(o.lease), o.lease.term) for o in bucket.outcomes]
            instance.history.write("settling", run=number, state=bucket.state, rows=rows)
            written = await settle(bucket, now)
            instance.history.write("settled", run=number, number=written)
            return written

        return recorded

    for name in ("settle", "settle_emitting"):
        setattr(notifications, name, watched(getattr(notifications, name)))


def watch_transactions(instance: Instance) -> None:
    """Outcomes that are committed together with the handler's writes."""
    finish, in_transaction = RowClaimer.finish, HandlerTransactions.run
    settling: dict[asyncio.Task[Any] | None, tuple[int, list[Run]]] = {}

    async def finish_them(self: RowClaimer, session: Any, claimed: Any, ended: Any) -> None:
        await finish(self, session, claimed, ended)
        rows = [row for row in claimed if row not in ended.failed]
        number = instance.number()
        settling[asyncio.current_task()] = number, rows
        config = [(str(row.notification.id), row.notification.handler_name, 0) for row in rows]
        instance.history.write("settling", run=number, state=ended.state, rows=config)

    async def work_in_transaction(self: HandlerTransactions, *args: Any) -> Any:
        try:
            return await in_transaction(self, *args)
        except BaseException as error:
            if type(error) is EndUnknown:
                settling.pop(asyncio.current_task(), None)
            raise
        finally:
            if (mine := settling.pop(asyncio.current_task(), None)) is not None:
                instance.history.write("settled", run=mine[0], number=sum(row.is_settled for row in mine[1]))

    RowClaimer.finish, HandlerTransactions.run = finish_them, work_in_transaction  # type: ignore[method-assign]


def watch_refusals(history: History) -> None:
    refuse = Settler._refuse

    def write_down(self: Settler, bucket: Bucket, number: int, **options: bool) -> None:
        history.write("refusal", number=number, state=bucket.state)
        refuse(self, bucket, number, **options)

    Settler._refuse = write_down  # type: ignore[method-assign]


def shift_clock(by: timedelta) -> None:
    """Every module that reads the wall clock gets a shifted time."""
    for module in [module for name, module in sys.modules.items() if name.startswith("outboxio.")]:
        if (utc_now := getattr(module, "utc_now", None)) is not None:
            module.utc_now = lambda utc_now=utc_now: utc_now() + by


async def exhaust(outbox: Outbox, seconds: float) -> None:
    """Take all connections that actions and transactional handlers could use."""
    database = database_of(outbox)
    async with AsyncExitStack() as stack, asyncio.timeout(seconds):
        while True:
            await stack.enter_async_context(database.session())


# --- the process ---------------------------------------------------------------------------------


def source_of(config: dict[str, Any]) -> str | Shard:
    return Shard(config["database"], direct_url=config["direct"]) if config.get("direct") else config["database"]


async def main(config: dict[str, Any]) -> None:
    loop, stop, bye = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    keep_log(Path(config["folder"]), config["name"])
    history = History(Path(config["folder"]), config["name"])
    instance = Instance(history, config["seed"])
    helpers: set[asyncio.Task[Any]] = set()
    outbox = Outbox(source_of(config), namespace="app", settings=Settings.load(config["settings"], environ=None))

    def read() -> None:
        lines = os.read(0, 65536)
        if not lines:
            os._exit(2)
        for line in lines.splitlines():
            command = json.loads(line)
            if command["do"] == "bye":
                bye.set()
            elif command["do"] == "exhaust":
                helpers.add(asyncio.create_task(_quietly(exhaust(outbox, command["seconds"]))))
            else:
                instance.disturbances.append(command)

    loop.add_reader(0, read)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    watch_locks(history, stop)
    watch_numbers(history)
    watch_runs(instance)
    watch_transactions(instance)
    watch_refusals(history)
    watch_outcomes(instance, outbox)
    if config.get("minutes"):
        shift_clock(timedelta(minutes=config["minutes"]))
    for name, kind in SETS[config["handlers"]].items():
        instance.add_handler(outbox, name, kind)
    async with outbox:
        async with outbox.running() as running:
            work = run_of(running)
            history.write("running")
            report("running")
            await stop.wait()
            history.write("leaving")
        history.write("counters", counters=counted(work))
        await asyncio.gather(*helpers)
    await eventually(lambda: not instance.ignoring)  # no task waits for such handlers, which end later
    helpers.add(asyncio.current_task())  # type: ignore[arg-type]
    for task in asyncio.all_tasks() - helpers:
        history.write("tasks", how=repr(task))
    history.write("left")
    report("left")
    await bye.wait()


def counted(work: ShardRun) -> dict[str, int]:
    counters = work.counters
    return {name: getattr(counters, name) for name in counters.__struct_fields__}


async def _quietly(work: Awaitable[None]) -> None:
    """The work ends by its own timeout, or with the database."""
    try:
        await work
    except Exception as error:
        report("helper", error=repr(error))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
