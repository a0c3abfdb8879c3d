"""Handlers with partitions on several processes: who owns what while processes start, leave and die."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple
from uuid import uuid4

import pytest

from outboxio import Outbox
from tests.kit.app import Emit, Look, MoneyDeposited, eventually, opened
from tests.kit.partitions import SHARED_WITHIN
from tests.kit.processes import Worker

pytestmark = pytest.mark.above_statements

StartWorker = Callable[..., Awaitable[Worker]]

PARTITIONS = 8
SLOTS = 4  # runs at once in a process
SCORE = {"name": "score", "partitions": PARTITIONS, "sleep": 0.02, "concurrency": SLOTS}
#: Sooner than the server ends a silent session (9 s), and than a process counts as dead without evidence (10 s).
OWNED_AGAIN_WITHIN = 8.0
LOCKS_LOST = "cluster lock session lost; dispatch paused until the locks are reacquired"


@pytest.fixture
async def producer(server_url: str) -> AsyncIterator[Outbox]:
    """An outbox of this process, which runs no handlers."""
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        yield outbox


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


def owned(worker: Worker, handler: str = "score") -> set[int]:
    """The partitions that a worker owns, according to its reports."""
    lock, found = f"app/dispatch/{handler}", set[int]()
    for report in worker.reports:
        name, _, number = report.get("lock", "").removeprefix(lock).partition("/")
        if name or not report.get("lock", "").startswith(lock):
            continue
        if report["what"] == "taken":
            found.add(int(number or 0))
        else:
            found.discard(int(number or 0))
    return found


async def until_shared(*workers: Worker, shares: Sequence[int], handler: str = "score") -> None:
    """Wait until the partitions are divided into these shares, and none is unowned."""

    def are_shared() -> bool:
        parts = [owned(worker, handler) for worker in workers]
        return sorted(map(len, parts)) == sorted(shares) and set().union(*parts) == set(range(sum(shares)))

    await eventually(are_shared, timeout=SHARED_WITHIN)


async def a_pair(start_worker: StartWorker, url: str) -> tuple[Worker, Worker]:
    """Two workers that share the partitions evenly."""
    first = await start_worker(url, SCORE)
    await until_shared(first, shares=[8])
    second = await start_worker(url, SCORE)
    await until_shared(first, second, shares=[4, 4])
    return first, second


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_joining_and_leaving_processes_share_a_handler_evenly(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    first, second = await a_pair(start_worker, server_url)
    await producer.executor.execute(Emit(tuple(range(100))))
    third = await start_worker(server_url, SCORE)
    await until_shared(first, second, third, shares=[3, 3, 2])
    await producer.executor.execute(Emit(tuple(range(100, 300))))
    await third.until("call", 5, SHARED_WITHIN)

    await third.leave()
    left_at = time.monotonic()

    await until_shared(first, second, shares=[4, 4])
    assert owned_again_at(first, second, after=left_at) - left_at < OWNED_AGAIN_WITHIN
    await eventually(lambda: are(rows, {"SUCCEEDED": 300}))
    await until_done(300, first, second, third)
    assert Counter(first.amounts + second.amounts + third.amounts) == Counter(range(300))
    assert len(third.of("done")) == len(third.amounts), "a handler was cut short"
    assert await rows.value("SELECT count(*) FROM {instances}") == 2


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_partitions_of_a_killed_process_are_owned_at_once(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    survivor, victim = await a_pair(start_worker, server_url)
    await producer.executor.execute(Emit(tuple(range(200))))
    await victim.until("call", 20)
    await eventually(lambda: has_settled(rows, victim))

    settled = await amounts_in(rows, "SUCCEEDED")
    killed_at = time.monotonic()
    victim.kill()

    await until_shared(survivor, shares=[8])
    assert owned_again_at(survivor, after=killed_at) - killed_at < OWNED_AGAIN_WITHIN
    await eventually(lambda: are(rows, {"SUCCEEDED": 200}))
    await until_done(200, survivor, victim)
    assert {*survivor.amounts, *victim.amounts} == set(range(200))
    repeated = set(survivor.amounts) & set(victim.amounts)
    assert not repeated & settled, "a settled row ran again"
    assert len(survivor.amounts) == len(set(survivor.amounts))


async def test_balance_all_spreads_handlers_with_one_partition(
    server_url: str, producer: Outbox, start_worker: StartWorker
) -> None:
    names = [f"h{number}" for number in range(6)]
    workers = [await start_worker(server_url, *({"name": name} for name in names), balance="all") for _ in range(2)]

    def are_spread() -> bool:
        shares = [[name for name in names if owned(worker, name)] for worker in workers]
        return sorted(map(len, shares)) == [3, 3] and sorted(shares[0] + shares[1]) == names

    await eventually(are_spread, timeout=SHARED_WITHIN)
    await producer.executor.execute(Emit(tuple(range(5))))
    await eventually(lambda: sum(len(worker.of("done")) for worker in workers) == 5 * len(names))
    assert Counter((r["handler"], r["amount"]) for worker in workers for r in worker.of("call")) == Counter(
        (name, amount) for name in names for amount in range(5)
    )


@pytest.mark.real_time("keeps a load up while processes come and go")
async def test_a_key_keeps_its_order_while_partitions_and_processes_change(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    ledger = {"name": "ledger", "ordered": True, "partitions": 4, "sleep": 0.003}
    workers = [await start_worker(server_url, ledger) for _ in range(2)]
    for worker in workers:
        await worker.until_running()
    stop = asyncio.Event()
    producing = asyncio.create_task(deposits_of_keys(producer, 40, workers, stop))

    await workers[0].until("call", 50)
    assert await number_of_partitions(rows) == 4
    await producer.admin.partitions("ledger", 16)
    workers.append(await start_worker(server_url, ledger))
    await workers[2].until("call", 20, SHARED_WITHIN)
    await workers[0].leave()
    await producer.admin.partitions("ledger", 8)
    workers.append(await start_worker(server_url, ledger))
    await workers[3].until("call", 20, SHARED_WITHIN)

    stop.set()
    number = await producing
    await eventually(lambda: are(rows, {"SUCCEEDED": number}), timeout=60)
    assert await number_of_partitions(rows) == 8, "a starting process has reset the partition count"
    await until_done(number, *workers)
    runs = runs_of(*workers)
    assert Counter(run.amount for run in runs) == Counter(range(number)), "a row was lost or repeated"
    assert broken_order(runs) == []


async def test_the_cluster_limit_is_reached_and_never_exceeded(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    bank = {"name": "bank", "partitions": 4, "total_concurrency": 5, "sleep": 0.03}
    # A share that rises with the number of partitions counts after two heartbeats.
    workers = [await start_worker(server_url, bank, lock_heartbeat=2) for _ in range(2)]
    await until_shared(*workers, shares=[2, 2], handler="bank")
    number = await emit_until_used_up(producer, 5, workers)
    workers.append(await start_worker(server_url, bank, lock_heartbeat=2))
    number = await emit_until_used_up(producer, 5, workers, number, besides=lambda: bool(owned(workers[2], "bank")))
    await workers[0].leave()
    number = await emit_until_used_up(producer, 5, workers, number)

    await eventually(lambda: are(rows, {"SUCCEEDED": number}))
    await until_done(number, *workers)
    if any(worker.of("log", message=LOCKS_LOST) for worker in workers):
        return  # runs of a process that was blocked until its session ended are repeated
    runs = runs_of(*workers)
    assert Counter(run.amount for run in runs) == Counter(range(number))
    assert most_at_once(runs) == 5


async def emit_until_used_up(
    producer: Outbox,
    total: int,
    workers: Sequence[Worker],
    before: int = 0,
    *,
    besides: Callable[[], bool] = lambda: True,
) -> int:
    """Emit events until this many of their runs are concurrent, and ``besides`` holds; return the number of all events.

    ``before``: the number of the events so far.
    """
    number = before

    async def is_used_up() -> bool:
        nonlocal number
        runs = runs_of(*workers)
        if number - len(runs) < 50:
            await producer.executor.execute(Emit(tuple(range(number, number + 50))))
            number += 50
        return besides() and most_at_once([run for run in runs if run.amount >= before]) >= total

    await eventually(is_used_up, timeout=SHARED_WITHIN)
    return number


# --- what was reported -----------------------------------------------------------------------------


async def until_done(number: int, *workers: Worker) -> None:
    """Wait until the workers have reported the ends of this many rows: the database may have an end earlier."""
    await eventually(lambda: len({r["amount"] for worker in workers for r in worker.of("done")}) >= number)


class Ran(NamedTuple):
    """A finished run."""

    begin: float
    end: float
    amount: int
    key: str


def runs_of(*workers: Worker) -> list[Ran]:
    """All finished runs, in the order of their starts; no row runs twice in a process."""
    found = []
    for worker in workers:
        ends = {report["amount"]: report["at"] for report in worker.of("done")}
        ended = [report for report in worker.of("call") if report["amount"] in ends]
        found += [Ran(r["at"], ends[r["amount"]], r["amount"], r["key"]) for r in ended]
    return sorted(found)


def broken_order(runs: Sequence[Ran]) -> list[tuple[Ran, Ran]]:
    """The pairs of runs of a key that overlap or are in the wrong order."""
    keys = defaultdict[str, list[Ran]](list)
    for run in runs:
        keys[run.key].append(run)
    pairs = [pair for some in keys.values() for pair in pairwise(some)]
    return [(one, next_) for one, next_ in pairs if one.amount > next_.amount or one.end > next_.begin]


def most_at_once(runs: Sequence[Ran]) -> int:
    """The maximum number of concurrent runs in all processes together."""
    changes = sorted([(run.begin, 1) for run in runs] + [(run.end, -1) for run in runs])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def owned_again_at(*workers: Worker, after: float) -> float:
    """When each partition that was taken after a time was first taken."""
    first = dict[str, float]()
    for report in sorted((r for worker in workers for r in worker.of("taken")), key=lambda report: report["at"]):
        if report["at"] > after:
            first.setdefault(report["lock"], report["at"])
    return max(first.values(), default=after)


async def are(rows: Look, states: dict[str, int]) -> bool:
    return await rows.states() == states


async def amounts_in(rows: Look, state: str) -> set[int]:
    found = await rows.fetch("SELECT model_id FROM {event_notifications} WHERE state = $1", state)
    return {int(row["model_id"]) for row in found}


async def has_settled(rows: Look, worker: Worker) -> bool:
    return bool(await amounts_in(rows, "SUCCEEDED") & set(worker.amounts))


async def number_of_partitions(rows: Look) -> int:
    return int(await rows.value("SELECT partitions FROM {handler_partitions} WHERE handler_name = 'ledger'"))


async def deposits_of_keys(outbox: Outbox, keys: int, workers: Sequence[Worker], stop: asyncio.Event) -> int:
    """Commit deposits of several keys in turn, ten at once, until ``stop`` is set; return how many.

    The workers may be slow: no deposit is made while 500 wait.
    """
    number = 0
    while not stop.is_set():
        if number - sum(len(worker.of("done")) for worker in workers) > 500:
            await asyncio.sleep(0.03)
            continue
        async with outbox.transaction("Deposits") as tx:
            for amount in range(number, number + 10):
                tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key=amount % keys)
        number += 10
        await asyncio.sleep(0.03)
    return number
