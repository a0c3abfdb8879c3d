"""Guarantees of delivery, order, batches, hooks and the inbox with many events, crashes and several processes.

``OUTBOXIO_TEST_FULL_SIZE=1`` runs them at the documented size, which takes minutes for each database; ``-s`` prints the
figures. The suite runs them at a small size.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from math import log2
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import (
    Action,
    Batch,
    EventEnvelope,
    HandlerFailed,
    Outbox,
    Received,
    RetryPolicy,
    Settings,
    Transaction,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit.app import WALLETS, Emit, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.processes import Worker
from tests.kit.size import FULL
from tests.kit.sql import sql

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]
StartProgram = Callable[..., Awaitable[Worker]]

WORKER = "tests.flow.delivery_worker"


def size(full: int, small: int) -> int:
    return full if FULL else small


async def make_wallets(look: Look, number: int = 20) -> None:
    if not any(table.rpartition(".")[2] == "wallets" for table in await look.tables()):
        await look.fetch(WALLETS)
    for wallet in range(number):
        await look.fetch("INSERT INTO wallets (id, balance) VALUES ($1, 0)", str(wallet))


async def emit(outbox: Outbox, number: int) -> None:
    for first in range(0, number, 100):
        await outbox.executor.execute(Emit(tuple(range(first, min(first + 100, number)))))


async def is_finished(look: Look, number: int) -> bool:
    states = await look.states()
    return states.get("SUCCEEDED", 0) == number


# --- transactional ---------------------------------------------------------------------------------

BETWEEN_CRASHES = 50 if FULL else 15  # events
MODES: dict[str, dict[str, Any]] = {
    "ok": {},
    "error": {"mode": "error"},
    "crash before commit": {"crash": "before"},
    "crash after commit": {"crash": "after"},
    "stolen lock": {"steals": True},
    "execute inside": {"mode": "execute"},
}


@pytest.mark.real_time("measures a rate")
@pytest.mark.parametrize("mode", MODES)
async def test_a_transactional_effect_exists_exactly_once(
    make_outbox: MakeOutbox, look: Look, start_program: StartProgram, mode: str
) -> None:
    number = size(1000, 40)
    outbox = await make_outbox()
    await make_wallets(look)
    config = {
        "database": look.url,
        "handler": "transactional",
        "mode": "ok",
        "settings": {"lock_heartbeat": 1.0},
        **MODES[mode],
    }
    workers = [await start_program(WORKER, **config, after=BETWEEN_CRASHES) for _ in range(1 + (mode == "stolen lock"))]
    for worker in workers:
        await worker.until("running")
        if mode == "stolen lock":
            await worker.until("stole")
    begun = time.monotonic()

    await emit(outbox, number)
    crashes = await _until_finished(
        look, number, workers, lambda: start_program(WORKER, **config, after=BETWEEN_CRASHES)
    )

    seconds = time.monotonic() - begun
    if "crash" not in config:  # otherwise its last commit may have ended it
        await workers[-1].leave()
    counted = await look.value("SELECT CAST(SUM(balance) AS CHAR(10)) AS n FROM wallets")
    runs = sum(len(worker.of("done")) for worker in workers)
    print(f"\n{look.dialect}, transactional, {mode}: {counted} effects of {number} events in {seconds:.1f} s, "
          f"{crashes} crashes, {runs} runs reported")  # fmt: skip
    assert int(counted) == number
    assert await look.states() == {"SUCCEEDED": number}
    assert (crashes > 0) == mode.startswith("crash")


async def _until_finished(
    look: Look, number: int, workers: list[Worker], start: Callable[[], Awaitable[Worker]]
) -> int:
    """Wait until all work is done, replacing each process that dies; return the number of deaths."""
    deadline, crashes = time.monotonic() + size(600, 60), 0
    while not await is_finished(look, number):
        assert time.monotonic() < deadline, await look.states()
        if workers[-1].is_gone:
            crashes += 1
            workers.append(await start())
        await asyncio.sleep(0.05)
    return crashes


@pytest.mark.real_time("measures a rate")
async def test_the_cost_of_a_transaction(make_outbox: MakeOutbox, look: Look, start_program: StartProgram) -> None:
    """No timing requirement: the same effect, by both kinds of delivery."""
    number = size(1000, 40)
    outbox = await make_outbox()
    await make_wallets(look)
    rates: dict[str, float] = {}
    for round_, handler in enumerate(("plain", "transactional")):
        await emit(outbox, number)
        begun = time.monotonic()
        worker = await start_program(WORKER, database=look.url, handler=handler, mode="ok", settings={})
        await worker.until("running")
        begun = time.monotonic()
        await _until_finished(look, number * (round_ + 1), [worker], lambda: start_program(WORKER))
        rates[handler] = number / (time.monotonic() - begun)
        await worker.leave()

    counted = await look.value("SELECT CAST(SUM(balance) AS CHAR(10)) AS n FROM wallets")
    print(f"\n{look.dialect}: events/s with the effect in an action of its own {rates['plain']:.0f}, in the "
          f"transaction of the delivery {rates['transactional']:.0f}")  # fmt: skip
    assert int(counted) == 2 * number


# --- ordered ---------------------------------------------------------------------------------------


class Post(Action):
    """An entry of an account, whose row is locked until the commit: within a key, the sequence is the commit order."""

    wallet: str
    number: int
    pause: float = 0.0

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(sql(tx, "UPDATE wallets SET balance = balance + 1 WHERE id = $1"), self.wallet)
        tx.emit(MoneyDeposited(uuid4(), Decimal(self.number)), ordering_key=self.wallet)
        await asyncio.sleep(self.pause)


async def post_all(outbox: Outbox, keys: int, each: int) -> None:
    """Transactions of many keys at once; the transactions of a key run in turn."""

    async def post(key: int) -> None:
        for number in range(each):
            await outbox.executor.execute(Post(str(key), key * 1000 + number, random.random() * 0.002))

    async with asyncio.TaskGroup() as group:
        for key in range(keys):
            group.create_task(post(key))


def starts_by_key(workers: Sequence[Worker]) -> dict[str, list[int]]:
    reports = sorted((r for worker in workers for r in worker.of("begun")), key=lambda r: r["at"])
    starts: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        starts[report["key"]].append(report["number"])
    return starts


async def test_order_holds_while_processes_and_handlers_fail(
    make_outbox: MakeOutbox, look: Look, start_program: StartProgram
) -> None:
    keys, each = size(200, 20), size(50, 10)
    poison = 7 * 1000 + each // 2
    outbox = await make_outbox(settings=Settings(notify=False))
    await make_wallets(look, keys)
    config = {
        "database": look.url, "handler": "ordered", "poison": poison, "failing": 0.1, "pause": 0.001,
        "settings": {"lock_heartbeat": 1.0},
    }  # fmt: skip
    first = await start_program(WORKER, **config)
    await first.until("running")
    second = await start_program(WORKER, **config)
    await second.until("running")

    posting = asyncio.create_task(post_all(outbox, keys, each))
    await first.until_it(lambda: len(first.of("done")) + len(second.of("done")) >= keys * each // 2, timeout=120)
    killed, other = (first, second) if first.of("done") else (second, first)
    killed.kill()
    await posting
    parked = each - each // 2  # the poison, and the rows behind it
    await eventually(lambda: is_finished(look, keys * each - parked), timeout=size(300, 60))
    assert await look.states() == {"SUCCEEDED": keys * each - parked, "DEAD": 1, "BLOCKED": parked - 1}

    assert await outbox.admin.resume("ledger", "7") == 1
    await eventually(lambda: is_finished(look, keys * each - 1), timeout=60)
    await other.leave()

    starts = starts_by_key([first, second])
    assert len(starts) == keys
    repeats = Counter[str]()
    for key, numbers in starts.items():
        assert numbers == sorted(numbers), f"key {key} went backwards: {numbers}"
        assert len(set(numbers)) == each
        repeats[key] = len(numbers) - each
    print(f"\n{look.dialect}: {keys} keys x {each} events, {sum(repeats.values())} runs were repeated (10 % of runs "
          "fail), none went backwards; the poison parked its own key")  # fmt: skip


@pytest.mark.real_time("measures how long a backlog takes")
@pytest.mark.above_statements
async def test_a_poison_event_does_not_slow_down_other_keys(
    make_outbox: MakeOutbox, look: Look, start_program: StartProgram
) -> None:
    """No timing requirement: the figures of both, and the rule that all events except the poison key are handled."""
    keys, each = size(200, 10), size(50, 5)
    seconds: dict[bool, float] = {}
    done = 0
    outbox = await make_outbox(settings=Settings(notify=False))
    await make_wallets(look, keys)
    for is_poisoned in (False, True, False, True) if FULL else (False, True):
        poison = 7 * 1000 + 1 if is_poisoned else None
        await post_all(outbox, keys, each)
        behind = each - 1 if is_poisoned else 0
        begun = time.monotonic()
        worker = await start_program(
            WORKER, database=look.url, handler="ordered", poison=poison, failing=0.0, pause=0.0, settings={}
        )
        await worker.until("running")
        begun = time.monotonic()
        done += keys * each - behind
        expected = done
        await eventually(lambda: is_finished(look, expected), timeout=120)  # noqa: B023  # awaited in this turn
        spent = time.monotonic() - begun
        seconds[is_poisoned] = min(spent, seconds.get(is_poisoned, spent))
        if is_poisoned:
            await outbox.admin.resume("ledger", "7")
            done += behind - 1
            expected = done
            await eventually(lambda: is_finished(look, expected), timeout=60)  # noqa: B023
        await worker.leave()

    rate = {kind: (keys * each - (each - 1 if kind else 0)) / spent for kind, spent in seconds.items()}
    print(f"\n{look.dialect}: {rate[False]:.0f} ordered events/s without, {rate[True]:.0f} with a parked key")


@pytest.mark.real_time("measures how long a backlog takes")
async def test_rows_behind_blocked_keys_do_not_slow_down_others(make_outbox: MakeOutbox, look: Look) -> None:
    """No timing requirement: plans are tested elsewhere. The free keys are finished, and rows behind a blocked key
    stay.
    """
    behind, free = size(100_000, 300), size(5000, 100)
    outbox = await make_outbox()
    rounds = size(4, 1)
    begun: dict[str, float] = {}

    @outbox.handler(MoneyDeposited, name="ledger", ordered=True)
    async def ledger(envelope: EventEnvelope[MoneyDeposited]) -> None:
        if envelope.ordering_key in ("bad-1", "bad-2"):
            raise Unprocessable("no")

    async def post(key: Callable[[int], str], number: int) -> None:
        for first in range(0, number, 1000):
            async with outbox.transaction("Post") as tx:
                for n in range(first, min(first + 1000, number)):
                    tx.emit(MoneyDeposited(uuid4(), Decimal(n)), ordering_key=key(n))

    async def timed(name: str) -> None:
        for _ in range(rounds):
            await post(lambda n: f"free-{name}-{n % 500}", free)
            started = time.monotonic()
            drained = await outbox.drain()
            spent = time.monotonic() - started
            begun[name] = min(spent, begun.get(name, spent))
            assert drained.succeeded == free

    await timed("without")
    await post(lambda n: f"bad-{1 + n % 2}", behind)
    await outbox.drain()
    assert await look.states() == {"SUCCEEDED": rounds * free, "DEAD": 2, "BLOCKED": behind - 2}
    await timed("with")

    print(f"\n{look.dialect}: {free / begun['without']:.0f} events/s of free keys alone, {free / begun['with']:.0f} "
          f"beside {behind} rows of two blocked keys")  # fmt: skip
    assert await look.states() == {"SUCCEEDED": 2 * rounds * free, "DEAD": 2, "BLOCKED": behind - 2}


# --- batches ---------------------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_one_poison_event_in_many_batches(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    number, batch, attempts = size(10_000, 400), size(500, 50), 3
    outbox = await make_outbox(clock=clock)
    calls: list[int] = []

    @outbox.handler(
        MoneyDeposited, name="report", batch=Batch(size=batch), retry=RetryPolicy(max_attempts=attempts, base="1s")
    )
    async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        calls.append(len(envelopes))
        if any(envelope.event.amount == number // 3 for envelope in envelopes):
            raise ValueError("poison")

    await emit(outbox, number)
    for _ in range(attempts):
        await outbox.drain()
        clock.advance("1h")

    print(f"\n{look.dialect}: {number} events in {len(calls)} calls of up to {batch}")
    assert await look.states() == {"SUCCEEDED": number - 1, "DEAD": 1}
    assert len(calls) <= number // batch + 2 * log2(batch) * attempts


# --- hooks -----------------------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_every_outcome_is_reported_once_despite_failing_hooks(make_outbox: MakeOutbox, look: Look) -> None:
    number, attempts = size(100, 30), 3
    outbox = await make_outbox(settings=Settings(handling_max_backoff_cap="30ms", handling_poll_delay="50ms"))
    runs, hooks = Counter[int](), Counter[int]()

    async def on_dead(envelope: EventEnvelope[MoneyDeposited], error: HandlerFailed) -> None:
        amount = int(envelope.event.amount)
        hooks[amount] += 1
        envelope.emit(WalletOpened(uuid4()), model_id=amount)
        if amount == 0 or (amount % 10 < 3 and hooks[amount] == 1):
            raise RuntimeError("not now")

    @outbox.handler(
        MoneyDeposited, name="dies", retry=RetryPolicy(max_attempts=attempts, base="10ms", factor=1), on_dead=on_dead
    )
    async def dies(envelope: EventEnvelope[MoneyDeposited]) -> None:
        runs[int(envelope.event.amount)] += 1
        raise ValueError("always")

    async with outbox.running():
        await emit(outbox, number)
        await eventually(lambda: _are_dead(look, number - 1), timeout=60)
        await eventually(lambda: hooks[0] > 2)  # the failure of the second has been stored

    followed = [row["model_id"] for row in await look.events() if row["event_type"] == "WalletOpened"]
    assert sorted(followed, key=int) == [str(amount) for amount in range(1, number)]
    assert set(runs.values()) == {attempts}
    assert await look.states() == {"DEAD": number - 1, "DYING": 1}
    (stubborn,) = await outbox.admin.list(state="DYING")
    assert stubborn.errors[-1]["message"] == "not now"


async def _are_dead(look: Look, number: int) -> bool:
    return (await look.states()).get("DEAD") == number


# --- inbox -----------------------------------------------------------------------------------------


async def test_messages_of_two_sources_that_are_delivered_repeatedly(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    messages, deliveries = size(1000, 50), 5
    outbox = await make_outbox(clock=clock)
    effects = Counter[tuple[str | None, int]]()

    @outbox.handler(MoneyDeposited, name="counts")
    async def counts(envelope: EventEnvelope[MoneyDeposited]) -> None:
        effects[envelope.source, int(envelope.event.amount)] += 1

    async def receive(source: str, number: int, amount: int) -> Received:
        return await outbox.inbox.receive(
            source=source, external_id=f"m-{number}", type="MoneyDeposited",
            payload={"wallet_id": str(UUID(int=7)), "amount": str(amount)},
        )  # fmt: skip

    answers = Counter[Received]()
    everything = [(s, n) for _ in range(deliveries) for s in ("billing", "shop") for n in range(messages)]
    random.shuffle(everything)
    for first in range(0, len(everything), 16):
        some = everything[first : first + 16]
        answers.update(await asyncio.gather(*(receive(source, n, n) for source, n in some)))
    await outbox.drain()

    assert answers == {Received.RECEIVED: 2 * messages, Received.DUPLICATE: 2 * messages * (deliveries - 1)}
    assert len(await look.events()) == 2 * messages
    assert (len(effects), set(effects.values())) == (2 * messages, {1})
    assert await receive("shop", 1, 99) is Received.CONFLICT

    clock.advance("30d")
    removed = await outbox.admin.purge()
    assert (removed.notifications, removed.events, removed.consumed_events) == (2 * messages, 2 * messages, 0)
    assert {await receive("billing", n, n) for n in range(20)} == {Received.DUPLICATE}
    await outbox.drain()
    assert set(effects.values()) == {1}
