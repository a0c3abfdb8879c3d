"""Table figures for metrics, on each dialect: due, dead, parked, undelivered and unroutable rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

from outboxio import EventEnvelope, Outbox, RetryPolicy, Unprocessable
from outboxio.statistics.figures import Figures, HandlerFigures
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import run_of, shard_of
from tests.kit.marks import needs_partitions
from tests.kit.probes import doing
from tests.kit.spies import watch

Envelope = EventEnvelope[MoneyDeposited]


async def figures_of(outbox: Outbox, clock: MovableClock) -> Figures:
    """What the process that fans out would read now."""
    figures: Figures = await shard_of(outbox).collector().figures()
    return figures


async def emit(outbox: Outbox, *amounts: int, key: str | None = None) -> None:
    async def perform(tx: Any) -> None:
        for amount in amounts:
            tx.emit(MoneyDeposited(uuid4(), amount), ordering_key=key)

    await outbox.execute(doing(perform))


async def test_due_rows_retries_and_ages_are_counted_by_handler(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="retries", retry=RetryPolicy(base=timedelta(minutes=5), jitter=0))
    async def retries(envelope: Envelope) -> None:
        raise ValueError("no")

    @outbox.handler(MoneyDeposited, name="paused")
    async def paused(envelope: Envelope) -> None: ...

    await outbox.admin.pause("paused")
    await emit(outbox, 1, 2)
    await outbox.drain()
    clock.advance(30)
    await emit(outbox, 3)
    await outbox.drain()
    clock.advance(60)

    found = await figures_of(outbox, clock)
    assert found.handlers["retries"] == HandlerFigures(retrying=3)
    assert found.handlers["paused"] == HandlerFigures(due=3, due_age=90.0)
    assert (found.undelivered, found.undelivered_age, found.unwanted, found.unroutable) == (0, 0.0, 0, 0)
    clock.advance(timedelta(minutes=4))
    assert (await figures_of(outbox, clock)).handlers["retries"] == HandlerFigures(due=3, due_age=30.0)


async def test_dead_and_recently_dead_rows_are_counted_by_handler(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="h")
    async def handle(envelope: Envelope) -> None:
        raise Unprocessable("no")

    await emit(outbox, 1, 2)
    await outbox.drain()
    clock.advance(timedelta(minutes=61))
    await emit(outbox, 3)
    await outbox.drain()

    assert (await figures_of(outbox, clock)).handlers == {"h": HandlerFigures(dead=3, dead_recently=1)}


async def test_parked_keys_and_blocked_rows_count_under_the_current_name(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="ledger", aliases=("book",), ordered=True)
    async def handle(envelope: Envelope) -> None:
        raise Unprocessable("no")

    for key in ("a", "b"):
        await emit(outbox, 1, 2, 3, key=key)
    await outbox.drain()

    [(name, found)] = (await figures_of(outbox, clock)).handlers.items()
    assert (name, found.dead, found.blocked, found.parked_keys) == ("ledger", 2, 4, 2)


async def test_rows_under_an_alias_count_for_the_handler(outbox: Outbox, make_outbox: Any, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="old")
    async def old(envelope: Envelope) -> None: ...

    await outbox.admin.pause("old")
    await emit(outbox, 1)
    await outbox.drain()
    newer = await make_outbox(clock=clock)

    @newer.handler(MoneyDeposited, name="new", aliases=("old",))
    async def new(envelope: Envelope) -> None: ...

    clock.advance(10)
    assert (await figures_of(newer, clock)).handlers["new"] == HandlerFigures(due=1, due_age=10.0)


async def test_waiting_events_are_counted_by_whether_a_handler_subscribes(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="h")
    async def handle(envelope: Envelope) -> None: ...

    await emit(outbox, 1)
    clock.advance(20)
    await emit(outbox, 2, 3)
    await outbox.execute(doing(_open))
    clock.advance(5)

    found = await figures_of(outbox, clock)
    assert (found.undelivered, found.undelivered_age, found.unwanted) == (3, 25.0, 1)


async def _open(tx: Any) -> None:
    tx.emit(WalletOpened(uuid4()))


async def test_rows_of_a_handler_unseen_for_a_week_are_unroutable(
    outbox: Outbox, make_outbox: Any, clock: MovableClock
) -> None:
    @outbox.handler(MoneyDeposited, name="gone")
    async def gone(envelope: Envelope) -> None: ...

    await outbox.admin.pause("gone")
    await emit(outbox, 1, 2)
    await outbox.drain()
    other = await make_outbox(clock=clock)
    assert (await figures_of(other, clock)).unroutable == 0
    clock.advance(timedelta(days=6))
    assert (await figures_of(other, clock)).unroutable == 0
    clock.advance(timedelta(days=2))
    assert (await figures_of(other, clock)).unroutable == 2


@needs_partitions
async def test_every_partition_of_a_handler_counts(make_outbox: Any, look: Look, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)

    @outbox.handler(MoneyDeposited, name="h", partitions=8)
    async def handle(envelope: Envelope) -> None: ...

    await outbox.admin.pause("h")
    await outbox.execute(Emit(tuple(range(40))))
    await outbox.drain()
    clock.advance(3)

    rows = await look.notifications()
    assert len({row["partition_number"] for row in rows}) > 1
    assert (await figures_of(outbox, clock)).handlers["h"] == HandlerFigures(due=40, due_age=3.0)


async def test_a_standby_exports_no_figures_until_it_fans_out(make_outbox: Any, clock: MovableClock) -> None:
    first, second = [await make_outbox(clock=clock) for _ in range(2)]
    for outbox in (first, second):
        outbox.statistics["default"].figures_wanted = True
    async with second.running():
        await eventually(lambda: second.statistics["default"].locks_held["fanout"] == 1)
        async with first.running():
            await eventually(lambda: second.statistics["default"].figures is not None)
            assert first.statistics["default"].locks_held["fanout"] == 0
            assert first.statistics["default"].figures is None
        assert first.statistics["default"].live is None


async def test_figures_that_cannot_be_read_are_not_shown(outbox: Outbox) -> None:
    statistics = outbox.statistics["default"]
    statistics.figures_wanted = True
    async with outbox.running():
        await eventually(lambda: statistics.figures is not None)
        watch(outbox, "probes").trouble["due"] = _refuse
        run_of(outbox).loops.figures.wake()
        await eventually(lambda: statistics.loop_failures["figures"] > 0)
        assert statistics.figures is None


async def _refuse(method: Any, *args: Any) -> Any:
    raise ConnectionResetError("the connection broke")
