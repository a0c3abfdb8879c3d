"""Which failures run an action again, how often, and which never do."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg
import pytest
from sqlalchemy.orm.exc import StaleDataError

from outboxio import Action, CommitUnknown, Outbox, OutboxError, Retry, SettingsError, StaleRecord, Transaction
from tests.kit.app import Emit, Look, WalletOpened
from tests.kit.marks import needs_asyncpg, needs_many_writers
from tests.kit.probes import (
    MakeOutbox,
    add_wallet,
    balances,
    doing,
    log_lines,
    nothing_reported,
    open_transactions,
    written,
)
from tests.kit.server_actions import actions_on
from tests.kit.sql import sql

pytestmark = pytest.mark.with_tables


@pytest.fixture(autouse=True)
async def quiet_loop() -> AsyncIterator[None]:
    with nothing_reported():
        yield


class Taken(Exception):
    pass


class SeatTaken(Taken):
    pass


class Unlucky(Exception):
    pass


class Failing:
    """An action whose runs fail with these errors in turn and finally succeed."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.transactions: list[Transaction] = []

    async def __call__(self, tx: Transaction) -> int:
        self.transactions.append(tx)
        await add_wallet(tx, str(uuid4()), balance=self.runs)
        tx.emit(WalletOpened(uuid4()), model_id=self.runs)
        if self.errors:
            raise self.errors.pop(0)
        return self.runs

    @property
    def runs(self) -> int:
        return len(self.transactions)


def raised_from(error: BaseException, *causes: BaseException) -> BaseException:
    """Raise ``error`` from the first cause, that from the next, and so on."""
    current = error
    for cause in causes:
        current.__cause__ = cause
        current = cause
    return error


# --- default retries -------------------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_a_stale_record_runs_the_whole_action_again(outbox: Outbox, look: Look) -> None:
    script = Failing(StaleRecord("Wallet", "w1", 3))

    assert await outbox.executor.execute(doing(script)) == 2

    # The first run leaves neither rows nor events.
    assert await balances(look) == [2]
    assert [row["model_id"] for row in await written(look)] == ["2"]
    first, second = script.transactions
    assert first is not second
    assert first.action_id == second.action_id


@pytest.mark.above_statements
async def test_each_run_starts_at_its_own_time(make_outbox: MakeOutbox, look: Look, clock: Any) -> None:
    outbox = await make_outbox(clock=clock)
    started: list[Any] = []

    async def later(tx: Transaction) -> None:
        started.append(tx.now)
        clock.advance("1m")
        if len(started) == 1:
            raise StaleRecord("Wallet")

    await outbox.executor.execute(doing(later))
    (row,) = await written(look)
    assert started[0] != started[1] == row["started_date"]


@pytest.mark.above_statements
async def test_expect_one_detects_a_newer_version(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Setup") as tx:
        await add_wallet(tx, "w1", 100)
    versions: list[int] = []

    async def withdraw(tx: Transaction) -> None:
        row = await tx.fetchrow("SELECT balance, version FROM wallets WHERE id = 'w1'")
        assert row is not None
        # A version that a second instance has changed in between, on the first run.
        version = row["version"] - (1 if not versions else 0)
        versions.append(version)
        await tx.expect_one(
            sql(tx, "UPDATE wallets SET balance = $1, version = version + 1 WHERE id = 'w1' AND version = $2"),
            row["balance"] - 30, version, model_type="Wallet", model_id="w1", version=version,
        )  # fmt: skip

    await outbox.executor.execute(doing(withdraw))
    assert versions == [0, 1]
    assert await look.fetch("SELECT balance, version FROM wallets") == [{"balance": 70, "version": 2}]


@pytest.mark.above_statements
async def test_expect_one_names_the_stale_row_and_refuses_two_rows(outbox: Outbox) -> None:
    async def none_or_two(tx: Transaction) -> None:
        with pytest.raises(StaleRecord, match=r"Wallet w1 is no longer at version 7, or does not exist") as caught:
            await tx.expect_one(
                "UPDATE wallets SET balance = 1 WHERE id = 'w1'", model_type="Wallet", model_id="w1", version=7
            )
        assert (caught.value.model_type, caught.value.model_id, caught.value.version) == ("Wallet", "w1", 7)
        await add_wallet(tx, "a")
        await add_wallet(tx, "b")
        with pytest.raises(StaleRecord):
            await tx.expect_one("UPDATE wallets SET balance = 1", model_type="Wallet")

    await outbox.executor.execute(doing(none_or_two, retry=Retry(on=StaleRecord, attempts=1)))


async def test_sqlalchemys_stale_data_counts_as_a_stale_record(outbox: Outbox) -> None:
    script = Failing(StaleDataError("UPDATE statement on table 'wallets' expected to update 1 row(s)"))
    assert await outbox.executor.execute(doing(script)) == 2


@pytest.mark.above_statements
async def test_a_stale_record_counts_as_cause_but_not_as_context(outbox: Outbox) -> None:
    script = Failing(raised_from(Unlucky(), ValueError(), StaleRecord("Wallet")))
    assert await outbox.executor.execute(doing(script)) == 2

    unlucky = Unlucky()
    unlucky.__context__ = StaleRecord("Wallet")
    script = Failing(unlucky)
    with pytest.raises(Unlucky):
        await outbox.executor.execute(doing(script))
    assert script.runs == 1


@pytest.mark.above_statements
async def test_after_three_retries_the_last_error_is_raised(outbox: Outbox, look: Look) -> None:
    errors = [StaleRecord("Wallet", n) for n in range(5)]
    script = Failing(*errors)

    with pytest.raises(StaleRecord) as caught:
        await outbox.executor.execute(doing(script))

    assert script.runs == 4
    assert caught.value is errors[3]
    assert await balances(look) == []
    assert await written(look) == []


@pytest.mark.above_statements
async def test_other_errors_are_not_retried(outbox: Outbox) -> None:
    for error in (Unlucky(), ValueError(), ExceptionGroup("several", [StaleRecord("Wallet")])):
        script = Failing(error)
        with pytest.raises(type(error)) as caught:
            await outbox.executor.execute(doing(script))
        assert caught.value is error
        assert script.runs == 1


@pytest.mark.above_statements
async def test_a_transaction_block_is_never_retried(outbox: Outbox) -> None:
    with pytest.raises(StaleRecord):
        async with outbox.transaction("Block"):
            raise StaleRecord("Wallet")


@needs_many_writers
async def test_two_actions_that_lock_rows_in_opposite_order_both_commit(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Setup") as tx:
        await add_wallet(tx, "a", 0)
        await add_wallet(tx, "b", 0)
    both_hold_one = asyncio.Barrier(2)
    runs: list[str] = []

    def crossing(first: str, second: str) -> Action:
        async def run(tx: Transaction) -> None:
            runs.append(first)
            await tx.execute(sql(tx, "UPDATE wallets SET balance = balance + 1 WHERE id = $1"), first)
            if len(runs) <= 2:
                await both_hold_one.wait()
            await tx.execute(sql(tx, "UPDATE wallets SET balance = balance + 1 WHERE id = $1"), second)
            tx.emit(WalletOpened(uuid4()))

        return doing(run)

    async with asyncio.timeout(20):
        await asyncio.gather(outbox.executor.execute(crossing("a", "b")), outbox.executor.execute(crossing("b", "a")))

    assert len(runs) > 2
    assert await balances(look) == [2, 2]
    assert len([row for row in await written(look) if row["event_type"]]) == 2


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_serialization_failure_is_retried(postgres_url: str, level: str) -> None:
    look = Look(postgres_url)
    runs = 0

    async def lose_a_race(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        balance = await tx.fetchval("SELECT balance FROM own WHERE id = 1")
        if runs == 1:
            await look.fetch("UPDATE own SET balance = 100 WHERE id = 1")
        await tx.execute("UPDATE own SET balance = $1 WHERE id = 1", balance + 1)

    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Setup") as tx:
            await tx.execute("CREATE TABLE own (id INT PRIMARY KEY, balance INT)")
            await tx.execute("INSERT INTO own VALUES (1, 0)")
        await outbox.executor.execute(doing(lose_a_race))
    assert runs == 2
    assert await look.value("SELECT balance FROM own") == 101


async def test_a_serialization_failure_at_commit_is_retried(postgres_url: str) -> None:
    """Two serializable transactions that each read rows written by the other: write skew."""
    look = Look(postgres_url)
    runs: list[int] = []
    both_have_read = asyncio.Barrier(2)

    def doctor(own: int) -> Action:
        async def leave(tx: Transaction) -> bool:
            runs.append(own)
            await tx.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            on_call = await tx.fetchval("SELECT count(*) FROM doctors WHERE on_call")
            if len(runs) <= 2:
                await both_have_read.wait()
            if on_call < 2:
                return False
            await tx.execute("UPDATE doctors SET on_call = FALSE WHERE id = $1", own)
            return True

        return doing(leave)

    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Setup") as tx:
            await tx.execute("CREATE TABLE doctors (id INT PRIMARY KEY, on_call BOOLEAN)")
            await tx.execute("INSERT INTO doctors VALUES (1, TRUE), (2, TRUE)")
        left = await asyncio.gather(outbox.executor.execute(doctor(1)), outbox.executor.execute(doctor(2)))
    assert sorted(left) == [False, True]
    assert await look.value("SELECT count(*) FROM doctors WHERE on_call") == 1


async def test_a_busy_file_is_retried_until_it_is_free(sqlite_url: str) -> None:
    other = sqlite3.connect(Path(urlsplit(sqlite_url).path[1:]), isolation_level=None)
    retries: list[str] = []

    def free_it(line: str) -> None:
        retries.append(line)
        other.execute("COMMIT")

    try:
        async with Outbox(sqlite_url, namespace="app") as outbox:
            await outbox.migrate()
            async with outbox.transaction("DoNotWait") as tx:
                await tx.execute("PRAGMA busy_timeout = 0")
            other.execute("BEGIN IMMEDIATE")
            with log_lines("outboxio.actions.executor", free_it):
                await outbox.executor.execute(Emit((1,)))
    finally:
        other.close()
    (line,) = retries
    assert "action 'Emit' failed with OperationalError" in line
    assert "; retrying in" in line


async def test_a_file_that_stays_busy_raises_the_drivers_error(sqlite_url: str) -> None:
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("DoNotWait") as tx:
            await tx.execute("PRAGMA busy_timeout = 0")
        other = sqlite3.connect(Path(urlsplit(sqlite_url).path[1:]), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await outbox.executor.execute(Emit((1,)))
        finally:
            other.close()
        await outbox.executor.execute(Emit((1,)))


# --- requested retries ----------------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_an_actions_own_retry_matches_subclasses(outbox: Outbox) -> None:
    script = Failing(SeatTaken(), Taken(), SeatTaken())
    assert await outbox.executor.execute(doing(script, retry=Retry(on=Taken, attempts=4, delay=0))) == 4


@pytest.mark.above_statements
async def test_an_actions_own_retry_does_not_match_superclasses(outbox: Outbox) -> None:
    script = Failing(Taken())
    with pytest.raises(Taken):
        await outbox.executor.execute(doing(script, retry=Retry(on=SeatTaken, attempts=4, delay=0)))
    assert script.runs == 1


@pytest.mark.above_statements
async def test_attempts_count_every_run(outbox: Outbox) -> None:
    for attempts in (1, 2, 3):
        script = Failing(*(Taken() for _ in range(9)))
        with pytest.raises(Taken):
            await outbox.executor.execute(doing(script, retry=Retry(on=Taken, attempts=attempts, delay=0)))
        assert script.runs == attempts


async def test_retries_match_the_cause_chain_even_if_it_is_circular(outbox: Outbox) -> None:
    retry = Retry(on=Taken, attempts=2, delay=0)
    deep = Failing(raised_from(Unlucky(), ValueError(), KeyError(), SeatTaken()))
    assert await outbox.executor.execute(doing(deep, retry=retry)) == 2

    first, second = Unlucky(), ValueError()
    cyclic = Failing(raised_from(first, second, first))
    with pytest.raises(Unlucky):
        await outbox.executor.execute(doing(cyclic, retry=retry))
    assert cyclic.runs == 1


@pytest.mark.above_statements
async def test_a_retry_option_of_a_call_overrides_that_of_the_action(outbox: Outbox) -> None:
    script = Failing(Taken(), Taken(), Taken())
    action = doing(script, retry=Retry(on=Taken, attempts=2, delay=0))
    assert await outbox.executor.execute(action, retry=[Retry(on=Taken, attempts=4, delay=0)]) == 4


@pytest.mark.above_statements
async def test_each_retry_entry_has_its_own_count(outbox: Outbox) -> None:
    retry = [Retry(on=Taken, attempts=3, delay=0), Retry(on=Unlucky, attempts=3, delay=0)]
    script = Failing(Taken(), Unlucky(), Taken(), Unlucky())
    assert await outbox.executor.execute(doing(script, retry=retry)) == 5

    script = Failing(Taken(), Unlucky(), Taken(), Unlucky(), Unlucky())
    with pytest.raises(Unlucky):
        await outbox.executor.execute(doing(script, retry=retry))


@pytest.mark.above_statements
async def test_a_custom_retry_entry_does_not_use_up_default_retries(outbox: Outbox) -> None:
    script = Failing(Taken(), StaleRecord("Wallet"), Taken(), StaleRecord("Wallet"))
    assert await outbox.executor.execute(doing(script, retry=Retry(on=Taken, attempts=3, delay=0))) == 5


@pytest.mark.above_statements
async def test_a_default_retry_is_disabled_with_one_attempt(outbox: Outbox) -> None:
    script = Failing(StaleRecord("Wallet"))
    with pytest.raises(StaleRecord):
        await outbox.executor.execute(doing(script), retry=Retry(on=StaleRecord, attempts=1))
    assert script.runs == 1


@pytest.mark.above_statements
async def test_a_base_exception_is_never_retried(outbox: Outbox) -> None:
    class Stop(BaseException):
        pass

    script = Failing(Stop())
    with pytest.raises(Stop):
        await outbox.executor.execute(doing(script, retry=Retry(on=BaseException, attempts=3, delay=0)))
    assert script.runs == 1


@pytest.mark.above_statements
async def test_a_cancellation_ends_the_wait_for_the_next_run(outbox: Outbox, look: Look, database_url: str) -> None:
    script = Failing(Taken(), Taken())
    waits = asyncio.Event()
    with log_lines("outboxio.actions.executor", lambda _: waits.set()):
        task = asyncio.create_task(
            outbox.executor.execute(doing(script, retry=Retry(on=Taken, attempts=3, delay="1h")))
        )
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert script.runs == 1
    assert await written(look) == []
    assert await open_transactions(database_url) == []


def test_an_invalid_retry_option_is_refused_where_it_is_written() -> None:
    with pytest.raises(SettingsError, match=r"Retry\.attempts = 0: expected 1 or more"):
        Retry(on=Taken, attempts=0)
    with pytest.raises(SettingsError, match=r"Retry\.delay = -1: expected a duration"):
        Retry(on=Taken, delay=-1)  # type: ignore[arg-type]
    for on in ("Taken", [Taken], None, int, (Taken, "SeatTaken"), Taken()):
        with pytest.raises(SettingsError, match=r"Retry\.on = .*expected an exception class"):
            Retry(on=on)  # type: ignore[arg-type]


# --- failures that are never retried ------------------------------------------------------------------------


async def test_a_connection_lost_during_commit_leaves_the_outcome_unknown(postgres_url: str) -> None:
    """A constraint checked at COMMIT that ends the session instead of responding."""
    look = Look(postgres_url)
    runs: list[UUID] = []

    async def run(tx: Transaction) -> None:
        runs.append(tx.action_id)
        tx.emit(WalletOpened(uuid4()))
        await tx.execute("INSERT INTO own VALUES (1)")

    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Setup") as tx:
            await tx.execute("CREATE TABLE own (id INT)")
            await tx.execute(
                "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS "
                "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'"
            )
            await tx.execute(
                "CREATE CONSTRAINT TRIGGER vanish AFTER INSERT ON own DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION vanish()"
            )
        # A retry of all errors does not help.
        retry = Retry(on=(OutboxError, asyncpg.PostgresError, OSError), attempts=5, delay=0)
        with pytest.raises(CommitUnknown, match="the connection was lost during COMMIT of Scripted") as caught:
            await outbox.executor.execute(doing(run, retry=retry))

        assert runs == [caught.value.action_id]
        assert f"action_id = '{caught.value.action_id}' in events" in str(caught.value)
        assert caught.value.__cause__ is not None
        assert await open_transactions(postgres_url) == []
        await outbox.executor.execute(Emit((1,)))
    assert [row["action_name"] for row in await written(look)] == ["Setup", "Emit"]


@needs_asyncpg
async def test_a_refused_commit_is_a_plain_error_on_a_clean_connection(postgres_url: str) -> None:
    async def twice(tx: Transaction) -> None:
        tx.emit(WalletOpened(uuid4()))
        await tx.execute("INSERT INTO own VALUES (1)")

    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Setup") as tx:
            await tx.execute("CREATE TABLE own (id INT UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        await outbox.executor.execute(doing(twice))
        with pytest.raises(asyncpg.UniqueViolationError):
            await outbox.executor.execute(doing(twice))
        assert await open_transactions(postgres_url) == []
        assert await Look(postgres_url).value("SELECT count(*) FROM own") == 1
        assert len(await written(Look(postgres_url))) == 2


@needs_asyncpg
async def test_a_connection_lost_before_commit_raises_the_drivers_error(server_url: str) -> None:
    acts, runs = actions_on(server_url), 0
    lost: list[BaseException] = []

    async def lose(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            try:
                await tx.fetch(acts.hang_up)
            except Exception as error:
                lost.append(error)
                raise
        return runs

    async with Outbox(server_url, namespace="app") as outbox:
        await outbox.migrate()
        with pytest.raises(acts.cut) as caught:
            await outbox.executor.execute(doing(lose))
        assert caught.value is lost[0]
        runs = 0
        retry = Retry(on=acts.cut, attempts=2, delay=0)
        assert await outbox.executor.execute(doing(lose, retry=retry)) == 2


@needs_asyncpg
async def test_an_action_that_ignores_its_lost_connection_fails(server_url: str) -> None:
    acts = actions_on(server_url)

    async def overlook(tx: Transaction) -> None:
        with pytest.raises(acts.cut):
            await tx.fetch(acts.hang_up)

    async with Outbox(server_url, namespace="app") as outbox:
        await outbox.migrate()
        with pytest.raises(acts.cut):
            await outbox.executor.execute(doing(overlook))
        await outbox.executor.execute(Emit((1,)))
    assert [row["action_name"] for row in await written(Look(server_url))] == ["Emit"]


async def test_a_failed_connection_reset_after_commit_fails_no_action(postgres_url: str) -> None:
    """The action is committed: an error now would make the application run it again."""
    resets = 0

    async def fail(connection: Any) -> None:
        nonlocal resets
        resets += 1
        raise ConnectionResetError

    async with Outbox(postgres_url, namespace="app") as other:
        await other.migrate()
    async with (
        asyncpg.create_pool(postgres_url, min_size=0, max_size=2, reset=fail) as pool,
        Outbox(pool, namespace="app") as outbox,
    ):
        for _ in range(3):
            await outbox.executor.execute(Emit((1,)), retry=Retry(on=OSError, attempts=3, delay=0))
        assert resets >= 3
    assert len(await written(Look(postgres_url))) == 3
