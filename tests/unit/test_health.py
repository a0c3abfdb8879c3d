"""``outbox.health()`` in a process: what is read, how often, and from which event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from outboxio import EventEnvelope, Health, Outbox, Settings, health_app
from outboxio.health import reader, rules
from outboxio.health.facts import Facts, HandlerFacts, InstanceFacts, LockFacts, ShardFacts
from outboxio.health.overview import overview_of
from outboxio.health.values import Overview
from outboxio.loops import blocked_loop
from outboxio.storage.protocols import Waiting
from outboxio.testing import memory_outbox
from tests.kit.app import Emit, MoneyDeposited, eventually, hang
from tests.kit.inside import database_of, run_of

pytestmark = pytest.mark.usefixtures("patient_health")
Envelope = EventEnvelope[MoneyDeposited]
NOON = datetime(2030, 1, 1, 12)


class Queries:
    """Counts the queries of a shard, and can delay them or let them fail."""

    def __init__(self, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.error: Exception | None = None
        self.late = 0.0
        monkeypatch.setattr(database_of(outbox).subscriptions, "pauses", self._query, raising=False)

    async def _query(self, namespace: str) -> Any:
        self.number += 1
        await asyncio.sleep(self.late)
        if self.error is not None:
            raise self.error
        return []


async def test_an_outbox_is_live_before_running_and_ready_only_inside() -> None:
    async with memory_outbox() as outbox:
        before = await outbox.health()
        async with outbox.running():
            inside = await outbox.health()
        after = await outbox.health()

    assert [health.phase for health in (before, inside, after)] == ["stopped", "running", "stopped"]
    assert [health.ready for health in (before, inside, after)] == [False, True, False]
    assert {health.live for health in (before, inside, after)} == {True}
    assert {health.status for health in (before, inside, after)} == {"ok"}
    assert inside.reasons == ()


async def test_the_loops_and_the_locks_are_named() -> None:
    async with memory_outbox() as outbox:
        outbox.handler(MoneyDeposited, name="receipt")(_nothing)
        namespace = outbox.namespace
        async with outbox.running():
            await eventually(lambda: len(run_of(outbox).locks.held) == 2)
            health = await outbox.health()

    assert health.shards["default"].locks_held == [f"{namespace}/dispatch/receipt", f"{namespace}/fanout"]
    assert health.shards["default"].locks_lacking == []
    assert {"locks of default", "fan-out of default", "dispatch of default"} <= set(health.loops)
    assert {loop.failures for loop in health.loops.values()} == {0}


async def _nothing(envelope: Envelope) -> None: ...


async def test_missing_tables_make_the_status_down_but_not_the_process_dead() -> None:
    async with Outbox("sqlite://", namespace="app") as outbox:
        health = await outbox.health()

    assert (health.status, health.live, health.shards["default"].schema) == ("down", True, "missing")


# --- the database is queried rarely  --------------------------------------------------------------------


async def test_concurrent_callers_share_one_query_for_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_outbox() as outbox:
        queries = Queries(outbox, monkeypatch)
        queries.late = 0.05

        await asyncio.gather(*(outbox.health() for _ in range(20)))
        await outbox.health()
        assert queries.number == 1

        monkeypatch.setattr(reader, "FRESH", 0.0)
        await outbox.health()
        assert queries.number == 2


async def test_an_unresponsive_database_delays_one_caller_by_one_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with memory_outbox() as outbox:
        pings: list[object] = []

        async def ping(shard: object) -> None:
            pings.append(shard)
            await hang()

        monkeypatch.setattr(outbox._health, "_ping", ping)
        first, second = await outbox._health.read(0.1), await outbox.health()

    assert len(pings) == 1
    assert {first.status, second.status} == {"down"}
    assert first.live


async def test_a_cancelled_caller_leaves_its_query_to_the_next_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_outbox() as outbox:
        queries = Queries(outbox, monkeypatch)
        queries.late = 0.2
        impatient, patient = asyncio.create_task(outbox.health()), asyncio.create_task(outbox.health())
        await eventually(lambda: queries.number == 1)

        impatient.cancel()

        assert (await patient).status == "ok"
        assert queries.number == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "patience", "reason"),
    [
        ("late", 3.0, "the overview was not read within 3 s"),
        ("raises", 60.0, "the overview could not be read: RuntimeError('no right: postgresql://***@db/shop')"),
        ("lacks a shard", 60.0, "refused (shard 'default')"),
        ("no shard answers", 0.1, "no shard has answered within 0.1 s"),
    ],
)
async def test_health_without_table_metrics_is_never_ok(
    fault: str, patience: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read() -> Any:
        if fault == "late":
            await hang()
        if fault == "raises":
            raise RuntimeError("no right: postgresql://shop:secret@db/shop")
        return read_from(ShardFacts(name="default", now=NOON, error="refused"))

    async with memory_outbox() as outbox, outbox.running():
        if fault == "no shard answers":
            Queries(outbox, monkeypatch).late = 60.0
        else:
            monkeypatch.setattr(outbox._health.overviews, "read", read)
        health = await outbox._health.read(patience)

    assert (health.status, health.ready) == ("degraded", True)
    assert health.reasons == (f"could not check the tables: {reason}",)


def read_from(shard: ShardFacts) -> tuple[Facts, Overview]:
    facts = Facts(namespace="app", shards=[shard])
    return facts, overview_of(facts)


async def test_facts_of_the_tables_are_combined_with_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = InstanceFacts(instance="w", version="1", started=NOON, last_seen=NOON, is_alive=True)
    ship = HandlerFacts(
        name="ship", event_types=("Paid",), due=7, oldest_due=NOON - timedelta(seconds=90), last_seen=NOON,
        locks=[LockFacts(owner="w")],
    )  # fmt: skip
    waits = {"Paid": Waiting(1, NOON - timedelta(seconds=2))}
    shard = ShardFacts(name="default", now=NOON, handlers=[ship], instances=[worker], undelivered=waits)

    async def read() -> Any:
        return read_from(shard)

    async with memory_outbox() as outbox:
        monkeypatch.setattr(outbox._health.overviews, "read", read)
        async with outbox.running():
            health = await outbox.health()

    behind = "`ship` is behind: oldest due 90 s, 7 waiting."
    assert (health.status, health.ready, health.reasons) == ("degraded", True, (behind,))
    assert (health.lag, health.oldest_due) == (2.0, {"ship": 90.0})


async def test_unreadable_metrics_are_unknown_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def read() -> Any:
        raise ValueError("no overview")

    monkeypatch.setattr(reader, "FRESH", 0.0)
    async with memory_outbox() as outbox:
        monkeypatch.setattr(outbox._health.overviews, "read", read)
        healths = [await outbox.health() for _ in range(3)]

    assert {(health.status, health.lag, health.unroutable) for health in healths} == {("degraded", None, None)}
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["no overview" in record.getMessage() for record in warnings] == [True]


# --- death -------------------------------------------------------------------------------------------


async def test_a_loop_with_an_externally_cancelled_task_ends_liveness() -> None:
    async with memory_outbox() as outbox, outbox.running():
        await eventually(lambda: run_of(outbox).loops.find.task is not None)
        run = run_of(outbox)
        run.loops.find.task.cancel()
        await asyncio.sleep(0)
        health = await outbox.health()

    assert (health.status, health.live, health.ready) == ("down", False, False)
    assert "'dispatch of default' has ended" in health.reasons[0]


async def test_a_shard_that_failed_ends_liveness(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_outbox() as outbox:
        running = outbox.running()
        await running.__aenter__()
        loop = run_of(outbox).loops.find
        monkeypatch.setattr(loop, "_failed", None)  # a bug in the loop itself
        monkeypatch.setattr(loop, "_run_once", None)
        loop.wake()
        await eventually(lambda: outbox._lifecycle.running.problems)
        health = await outbox.health()
        with pytest.raises(ExceptionGroup):
            await running.__aexit__(None, None, None)

    assert (health.status, health.live, health.ready) == ("down", False, False)
    assert "stopped with an error" in health.reasons[0]


@pytest.mark.slow
@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_blocked_event_loop_is_reported_afterwards_without_ending_liveness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "BLOCKED_FOR", 60.0)
    async with memory_outbox() as outbox, outbox.running():
        await eventually(lambda: outbox._guard.loop in blocked_loop._watches)
        time.sleep(2.0)  # noqa: ASYNC251  # the block is the point
        await eventually(lambda: blocked_loop.last_block_of(asyncio.get_running_loop())[1] > 0)
        health = await outbox.health()

    assert (health.status, health.live, health.ready) == ("degraded", True, True)
    assert "the event loop was blocked for" in health.reasons[0]


# --- a second event loop -------------------------------------------------------------------------------


def called_in_a_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(call())))
    thread.start()
    return thread, answers


async def test_another_event_loop_reads_health_through_the_loop_of_the_outbox() -> None:
    async with memory_outbox() as outbox, outbox.running():
        thread, answers = called_in_a_thread(outbox.health)
        await eventually(lambda: answers)
        thread.join()

    assert (answers[0].status, answers[0].ready) == ("ok", True)


@pytest.mark.real_time("the event loop is truly blocked")
async def test_another_event_loop_sees_a_blocked_event_loop_as_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LONGEST_BLOCK", 0.5)

    async def over_http() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(health_app(outbox)), base_url="http://x") as client:
            return await client.get("/live")

    async with memory_outbox() as outbox, outbox.running():
        assert (await outbox.health()).live
        thread, answers = called_in_a_thread(outbox.health)
        pages, answered = called_in_a_thread(over_http)
        deadline = time.monotonic() + 10
        while not (answers and answered) and time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: ASYNC251  # the block is the point
        thread.join()
        pages.join()
        recovered = await outbox.health()

    health: Health = answers[0]
    assert (health.status, health.live, health.ready) == ("down", False, False)
    assert "has not responded" in health.reasons[0]
    assert health.phase == "running"
    assert answered[0].status_code == 503
    assert recovered.live


async def test_reading_health_after_the_event_loop_closed_binds_no_loop() -> None:
    outbox = Outbox("sqlite://", namespace="app", settings=Settings())
    loop_ended = threading.Thread(target=lambda: asyncio.run(outbox.migrate()))  # type: ignore[arg-type]
    loop_ended.start()
    await asyncio.to_thread(loop_ended.join)

    health = await outbox._health.probe(queries_database=True)

    assert (health.live, health.ready) == (True, False)
    assert not outbox._guard.is_bound


async def test_handlers_run_during_health_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "FRESH", 0.0)
    async with memory_outbox() as outbox:
        done: list[int] = []

        @outbox.handler(MoneyDeposited, name="receipt")
        async def receipt(envelope: Envelope) -> None:
            done.append((await outbox.health()).live)

        async with outbox.running():
            await outbox.execute(Emit(tuple(range(20))))
            await eventually(lambda: len(done) == 20)

    assert set(done) == {True}
