"""Dispatch: from notifications to handlers and outcomes, on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any

import pytest

from outboxio import (
    Action,
    Event,
    EventEnvelope,
    Outbox,
    RetryAfter,
    RetryPolicy,
    Settings,
    Transaction,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.hostile import changed

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]

WEEK = timedelta(days=7)


class Noted(Event):
    number: int


class Note(Action):
    number: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Noted(self.number))


def always_fails(envelope: EventEnvelope[Any]) -> BaseException:
    return ValueError(f"attempt {envelope.attempt}")


async def only_record(outbox: Outbox, handler: str | None = None) -> Any:
    (record,) = await outbox.admin.list(handler=handler)
    return record


async def states(outbox: Outbox) -> dict[str, str]:
    """The state of each handler's only notification."""
    return {record.handler_name: str(record.state) for record in await outbox.admin.list()}


# --- success and failure -------------------------------------------------------------------------


async def test_every_handler_gets_every_event_once(outbox: Outbox, look: Look) -> None:
    first, second = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    outbox.handler(MoneyDeposited, name="second")(second)
    await outbox.executor.execute(Emit((1, 2, 3)))

    drained = await outbox.drain()

    assert (drained.fanned_out, drained.succeeded) == (3, 6)
    assert first.amounts == second.amounts == [1, 2, 3]
    assert await look.states() == {"SUCCEEDED": 6}
    assert await look.value("SELECT count(*) FROM {events} WHERE delivered AND event_type IS NOT NULL") == 3


async def test_events_and_their_chains_stay_on_their_shard(database_url: str, second_url: str) -> None:
    journal, chained = Journal(), Journal()
    async with Outbox({"one": database_url, "two": second_url}, namespace="app") as outbox:
        await outbox.migrate()

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await journal(envelope)
            await envelope.execute(Note(int(envelope.event.amount)))

        outbox.handler(Noted, name="of-notes")(chained)
        for amount, shard in ((1, "one"), (2, "two"), (3, "two")):
            await outbox.executor.execute(Emit((amount,)), shard=shard)

        drained = await outbox.drain()

        assert (drained.fanned_out, drained.succeeded) == (6, 6)
        where = {(int(e.event.amount), e.shard) for e in journal.envelopes}
        assert where == {(e.event.number, e.shard) for e in chained.envelopes} == {(1, "one"), (2, "two"), (3, "two")}
        assert len(await outbox.admin.list(shard="one")) == 2
        assert len(await outbox.admin.list(shard="two")) == 4


async def test_a_handler_that_fails_twice_succeeds_at_the_third_call(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(lambda envelope: ValueError("not yet") if envelope.attempt <= 2 else None)
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1,)))

    outcomes = []
    for _ in range(5):
        drained = await outbox.drain()
        outcomes.append((drained.succeeded, drained.failed))
        clock.advance("5m")

    assert outcomes == [(0, 1), (0, 1), (1, 0), (0, 0), (0, 0)]
    assert [envelope.attempt for envelope in journal.envelopes] == [1, 2, 3]
    assert len({envelope.notification_id for envelope in journal.envelopes}) == 1
    record = await only_record(outbox)
    assert (record.state, record.attempts) == ("SUCCEEDED", 3)
    assert [error["attempt"] for error in record.errors] == [1, 2]


async def test_handlers_of_one_event_fail_independently(outbox: Outbox, clock: MovableClock) -> None:
    fails, succeeds = Journal(always_fails), Journal()
    outbox.handler(MoneyDeposited, name="fails")(fails)
    outbox.handler(MoneyDeposited, name="succeeds")(succeeds)
    await outbox.executor.execute(Emit((1,)))

    await outbox.drain()
    clock.advance("5m")
    await outbox.drain()

    assert (len(fails), len(succeeds)) == (2, 1)
    assert await states(outbox) == {"fails": "FAILED", "succeeds": "SUCCEEDED"}


class Worse(BaseException):
    pass


DEATHS = (SystemExit("bye"), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), Worse(), TimeoutError())


async def test_any_exception_fails_only_its_own_notification(outbox: Outbox) -> None:
    journal = Journal(lambda envelope: None if envelope.event.amount < 0 else DEATHS[int(envelope.event.amount)])
    outbox.handler(MoneyDeposited, name="first", concurrency=1)(journal)
    sibling = Journal()
    outbox.handler(MoneyDeposited, name="sibling")(sibling)
    await outbox.executor.execute(Emit((*range(len(DEATHS)), -1)))

    drained = await outbox.drain(timeout=20)

    assert (drained.failed, drained.succeeded) == (len(DEATHS), len(DEATHS) + 2)
    failed = await outbox.admin.list(state="FAILED")
    types = [str(r.errors[0]["type"]).rpartition(".")[2] for r in sorted(failed, key=lambda r: r.sequence)]
    assert types == [type(d).__name__ for d in DEATHS]
    assert {(r.handler_name, r.attempts) for r in failed} == {("first", 1)}


async def test_a_cancelled_error_from_an_awaited_task_is_a_failure(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="first")
    async def first(envelope: EventEnvelope[Any]) -> None:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).failed == 1


async def test_context_variables_of_a_handler_do_not_reach_the_next(outbox: Outbox) -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    seen = []

    @outbox.handler(MoneyDeposited, name="first", concurrency=1)
    async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
        seen.append(variable.get())
        variable.set(int(envelope.event.amount))

    await outbox.executor.execute(Emit((1, 2, 3, 4)))
    await outbox.drain()

    assert seen == [0, 0, 0, 0]


# --- expiry --------------------------------------------------------------------------------------


async def test_rows_older_than_their_retention_expire_without_a_run(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    async with outbox.running(handling=False):
        await outbox.executor.execute(Emit((1, 2, 3)))
        await eventually(lambda: outbox.admin.list())
    clock.advance(WEEK)
    await outbox.executor.execute(Emit((4,)))
    clock.advance("1s")

    drained = await outbox.drain()

    assert (drained.expired, drained.succeeded) == (3, 1)
    assert journal.amounts == [4]
    assert [(r.state, r.attempts) for r in await outbox.admin.list()][1:] == [("EXPIRED", 0)] * 3


async def test_a_failing_handler_is_called_until_its_retention_ends(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(always_fails)
    outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(base="2d", cap="2d", jitter=0))(journal)
    await outbox.executor.execute(Emit((1, 2)))

    outcomes = []
    for _ in range(8):
        drained = await outbox.drain()
        outcomes.append((drained.failed, drained.expired))
        clock.advance("2d")

    assert outcomes == [(2, 0), (2, 0), (2, 0), (0, 2), (0, 0), (0, 0), (0, 0), (0, 0)]
    assert len(journal) == 8
    for record in await outbox.admin.list():
        assert (record.state, record.attempts, len(record.errors)) == ("EXPIRED", 4, 4)


async def test_expiry_is_decided_by_the_clock_after_the_run(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="slow")
    async def slow(envelope: EventEnvelope[Any]) -> None:
        clock.advance(WEEK)
        raise ValueError

    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).expired == 1


async def test_the_backoff_counts_from_the_end_of_the_run(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="slow", retry=RetryPolicy(base="1m", jitter=0))
    async def slow(envelope: EventEnvelope[Any]) -> None:
        clock.advance("1h")
        raise ValueError

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    assert (await only_record(outbox)).next_retry_at == clock.now() + timedelta(minutes=1)


# --- retries -------------------------------------------------------------------------------------


async def test_the_default_backoff_doubles_from_30_s_to_5_minutes(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(always_fails))
    await outbox.executor.execute(Emit(tuple(range(20))))
    waits: list[list[float]] = []
    async with outbox.running():
        for _ in range(6):
            await outbox.drain()
            records = await outbox.admin.list()
            waits.append([(record.next_retry_at - clock.now()).total_seconds() for record in records])
            clock.set(max(record.next_retry_at for record in records))

    for found, expected in zip(waits, (30, 60, 120, 240, 300, 300), strict=True):
        assert all(0.9 * expected <= wait <= 1.1 * expected for wait in found)
        assert len(set(found)) > 10


async def test_exhausting_max_attempts_is_dead(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(always_fails)
    outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=3))(journal)
    await outbox.executor.execute(Emit((1,)))
    async with outbox.running():
        for _ in range(5):
            await outbox.drain()
            clock.advance("5m")

    record = await only_record(outbox)
    assert (record.state, record.attempts, len(record.errors), len(journal)) == ("DEAD", 3, 3, 3)


async def test_a_handlers_own_retention_overrides_the_setting(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="short", retry=RetryPolicy(retention="20s"))(Journal(always_fails))
    outbox.handler(MoneyDeposited, name="long", retry=RetryPolicy(retention="30d", cap="20d", base="20d"))(
        Journal(always_fails)
    )
    await outbox.executor.execute(Emit((1,)))

    await outbox.drain()

    assert await states(outbox) == {"short": "EXPIRED", "long": "FAILED"}


async def test_a_callable_chooses_the_backoff_by_attempts_and_error(outbox: Outbox, clock: MovableClock) -> None:
    queries = []

    def backoff(attempts: int, error: BaseException) -> timedelta:
        queries.append((attempts, str(error)))
        return timedelta(hours=attempts)

    outbox.handler(MoneyDeposited, name="first", retry=backoff)(Journal(always_fails))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    clock.advance("1h")
    await outbox.drain()

    assert queries == [(1, "attempt 1"), (2, "attempt 2")]
    assert (await only_record(outbox)).next_retry_at == clock.now() + timedelta(hours=2)


def answers_nonsense(attempts: int, error: BaseException) -> Any:
    return "soon"


def fails_itself(attempts: int, error: BaseException) -> timedelta:
    raise ZeroDivisionError


def exits(attempts: int, error: BaseException) -> timedelta:
    raise SystemExit


async def test_a_broken_backoff_callable_falls_back_to_the_default(outbox: Outbox, clock: MovableClock) -> None:
    for backoff in (answers_nonsense, fails_itself, exits):
        outbox.handler(MoneyDeposited, name=backoff.__name__, retry=backoff)(Journal(always_fails))
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain(timeout=20)).failed == 3

    for record in await outbox.admin.list():
        assert timedelta(seconds=27) <= record.next_retry_at - clock.now() <= timedelta(seconds=33)
        assert record.errors[0]["type"] == "ValueError"


async def test_a_backoff_beyond_the_calendar_expires(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first", retry=lambda attempts, error: timedelta.max)(Journal(always_fails))
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).expired == 1


async def test_unprocessable_is_dead_at_once_without_affecting_siblings(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="refuses")(Journal(lambda envelope: Unprocessable("wallet is closed")))
    outbox.handler(MoneyDeposited, name="sibling")(Journal())
    await outbox.executor.execute(Emit((1,)))

    drained = await outbox.drain()

    assert (drained.dead, drained.succeeded) == (1, 1)
    record = await only_record(outbox, "refuses")
    assert (record.state, record.attempts) == ("DEAD", 1)
    assert (record.errors[0]["type"], record.errors[0]["message"]) == ("Unprocessable", "wallet is closed")


async def test_retry_after_sets_the_exact_time(outbox: Outbox, clock: MovableClock) -> None:
    at = clock.now() + timedelta(days=1)
    delays = {
        "delay": RetryAfter("90s"),
        "at": RetryAfter(at=at),
        "for-free": RetryAfter(90, count_attempt=False),
        "too-late": RetryAfter("8d"),
        "broken": changed(delay="tomorrow"),
    }
    for name, chosen in delays.items():
        outbox.handler(MoneyDeposited, name=name)(Journal(lambda envelope, chosen=chosen: chosen))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    found = {r.handler_name: (str(r.state), r.attempts, r.next_retry_at) for r in await outbox.admin.list()}
    in_90_seconds = clock.now() + timedelta(seconds=90)
    assert found["delay"] == ("FAILED", 1, in_90_seconds)
    assert found["at"] == ("FAILED", 1, at)
    assert found["for-free"] == ("FAILED", 0, in_90_seconds)
    assert found["too-late"][:2] == ("EXPIRED", 1)
    assert found["broken"][:2] == ("FAILED", 1)


async def test_an_uncounted_retry_after_never_exhausts_max_attempts(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(lambda envelope: RetryAfter(1, count_attempt=False) if len(journal) < 4 else None)
    outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1))(journal)
    await outbox.executor.execute(Emit((1,)))
    async with outbox.running():
        for _ in range(4):
            await outbox.drain()
            clock.advance("1s")

    record = await only_record(outbox)
    assert (record.state, record.attempts, len(journal)) == ("SUCCEEDED", 1, 4)


async def test_a_due_retry_is_found_without_waiting_for_a_poll(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(handling_poll_delay="60s", fanout_poll_delay="60s"))
    journal = Journal(lambda envelope: RetryAfter("50ms") if envelope.attempt == 1 else None)
    outbox.handler(MoneyDeposited, name="first")(journal)

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(2, timeout=10)


# --- stored errors -------------------------------------------------------------------------------


async def test_the_last_ten_errors_are_kept_with_their_details(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(always_fails))
    await outbox.executor.execute(Emit((1,)))
    times = []
    async with outbox.running():
        for _ in range(12):
            clock.advance("6m")  # not after the last: what runs would find it due
            times.append(clock.now())
            await outbox.drain()

    record = await only_record(outbox)
    assert [error["attempt"] for error in record.errors] == list(range(3, 13))
    assert [datetime.fromisoformat(error["time"]) for error in record.errors] == times[2:]
    assert {error["type"] for error in record.errors} == {"ValueError"}
    assert record.errors[-1]["message"] == "attempt 12"
    assert "raise error" in record.errors[-1]["traceback"]
    assert all(0 <= error["ran"] < 60 for error in record.errors), "seconds"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


class UnprintableForGood(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("cannot say")


async def test_every_error_text_can_be_stored(outbox: Outbox) -> None:
    errors = [
        ValueError("a NUL \0 inside"),
        ValueError("a lone surrogate \ud800 inside"),
        ValueError("x" * 10_000_000),
        Unprintable(),
        UnprintableForGood(),
        Unspeakable(Unspeakable()),
        ExceptionGroup("several", [ValueError("one"), Unprintable()]),
    ]
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: errors[int(envelope.event.amount)]))
    await outbox.executor.execute(Emit(tuple(range(len(errors)))))

    assert (await outbox.drain(timeout=20)).failed == len(errors)

    oldest_first = reversed(await outbox.admin.list())
    messages = [str(record.errors[0]["message"]) for record in oldest_first]
    assert messages[0] == "a NUL \N{SYMBOL FOR NULL} inside"
    assert messages[1] == "a lone surrogate \\ud800 inside"
    assert len(messages[2]) == 2000
    assert messages[3] == "<unprintable: RuntimeError>"
    assert messages[6].startswith("several")


# --- malformed rows ------------------------------------------------------------------------------


async def test_an_undecodable_payload_fails_its_own_row_and_names_the_field(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1, 2, 3, 4, 5)))
    damage = {
        1: """'{"wallet_id": "no uuid", "amount": "1"}'""",
        2: """'{"amount": "1"}'""",
        3: "'[1]'",
        4: "NULL",
    }
    for model_id, payload in damage.items():
        await look.fetch(f"UPDATE {{events}} SET payload = {payload} WHERE model_id = '{model_id}'")

    drained = await outbox.drain()

    assert (drained.failed, drained.succeeded) == (4, 1)
    assert journal.amounts == [5]
    records = {int(r.model_id or 0): r for r in await outbox.admin.list(state="FAILED")}
    assert {r.attempts for r in records.values()} == {1}
    messages = {number: str(record.errors[0]["message"]) for number, record in records.items()}
    assert "$.wallet_id" in messages[1]
    assert "wallet_id" in messages[2]
    assert "object" in messages[3]
    assert "NULL" in messages[4]


async def test_malformed_params_and_headers_fail_only_handlers_that_read_them(outbox: Outbox, look: Look) -> None:
    looked = Journal(lambda envelope: envelope.action_params and envelope.headers and None)
    unaffected = Journal()
    outbox.handler(MoneyDeposited, name="looks")(looked)
    outbox.handler(MoneyDeposited, name="does-not")(unaffected)
    await outbox.executor.execute(Emit((1,)))
    await look.fetch("UPDATE {events} SET action_params = '[1]', headers = '\"x\"' WHERE model_id = '1'")

    await outbox.drain()

    assert await states(outbox) == {"looks": "FAILED", "does-not": "SUCCEEDED"}


# --- names ---------------------------------------------------------------------------------------


async def test_a_notification_without_its_handler_uses_no_attempt_and_is_counted(
    outbox: Outbox, make_outbox: MakeOutbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    await look.fetch("UPDATE {event_notifications} SET state = 'PENDING', attempts = 0, handler_name = 'gone'")

    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (0, 0)
    assert [(r.state, r.attempts) for r in await outbox.admin.list()] == [("PENDING", 0)] * 2
    assert (await outbox.admin.counts())["unroutable"] == 2
    assert "'gone'" in caplog.text


async def test_rows_under_an_alias_run_and_wait_once_it_is_removed(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    before = await make_outbox(clock=clock)
    before.handler(MoneyDeposited, name="receipt")(Journal(always_fails))
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance("1m")

    without_alias = Journal()
    without_the_alias = await make_outbox(clock=clock)
    without_the_alias.handler(WalletOpened, name="deposit-receipt")(without_alias)
    await without_the_alias.admin.unsubscribe("receipt")
    await without_the_alias.drain()
    assert len(without_alias) == 0
    assert (await without_the_alias.admin.counts())["unroutable"] == 1

    with_alias = Journal()
    outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})(with_alias)
    await outbox.drain()
    assert [(e.attempt, int(e.event.amount)) for e in with_alias.envelopes] == [(2, 1)]
    assert (await outbox.admin.counts())["unroutable"] == 0


async def test_a_handler_of_another_instance_is_not_unroutable(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    worker = await make_outbox(clock=clock)
    worker.handler(MoneyDeposited, name="new-name", aliases={"old-name"})(Journal())
    await worker.drain()
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    assert (await outbox.admin.counts())["unroutable"] == 0


async def test_unroutable_notifications_expire_by_retention(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    gone = await make_outbox(clock=clock)
    gone.handler(MoneyDeposited, name="gone")(Journal(always_fails))
    await gone.executor.execute(Emit((1,)))
    await gone.drain()
    await outbox.admin.unsubscribe("gone")
    outbox.handler(WalletOpened, name="first")(Journal())

    clock.advance("6d")
    assert (await outbox.drain()).expired == 0
    clock.advance("2d")
    assert (await outbox.drain()).expired == 1

    record = await only_record(outbox)
    assert (record.state, record.attempts) == ("EXPIRED", 1)


async def test_an_event_type_without_a_class_fails_as_undecodable(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await look.fetch("UPDATE {event_notifications} SET state = 'PENDING', attempts = 0, event_type = 'Lost'")

    assert (await outbox.drain()).failed == 1

    assert "'Lost'" in str((await only_record(outbox)).errors[-1]["message"])
