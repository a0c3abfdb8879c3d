"""Any failure of a job is contained, and its result is recorded once, on every database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from outboxio import CommitUnknown, DatabaseUnavailable, Job, Outbox, RetryAfter, RetryPolicy, Settings, Transaction
from outboxio.model.operating.operation import JobRow
from outboxio.storage.statement import Statement
from outboxio.storage.tables.jobs import END
from outboxio.testing import MovableClock
from tests.kit.app import eventually, hang
from tests.kit.inside import database_of, session_of
from tests.kit.jobs import ran, wake_jobs
from tests.kit.probes import MakeOutbox

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

NOON = datetime(2030, 1, 1, 12)
ONCE_MORE = RetryPolicy(max_attempts=2, base="1s", jitter=0)


class Odd(BaseException):
    """An error that is not an Exception."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise Odd

    @property
    def __class__(self) -> Any:  # type: ignore[override]  # an application may do this
        raise Odd


async def raises(error: BaseException) -> None:
    raise error


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def row_of(outbox: Outbox) -> JobRow:
    (row,) = await outbox.admin.jobs()
    return row


async def reaches(outbox: Outbox, state: str) -> JobRow:
    """The row of the only job as soon as it has this state."""
    found: list[JobRow] = []

    async def looks() -> bool:
        wake_jobs(outbox)
        found[:] = await outbox.admin.jobs()
        return bool(found) and found[0].state == state

    await eventually(looks)
    return found[0]


@pytest.mark.parametrize("takes_tx", [False, True])
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: raises(SystemExit(3)), "SystemExit: 3"),
        (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt: "),
        (lambda: raises(BaseExceptionGroup("group", [SystemExit(3)])), "BaseExceptionGroup: group"),
        (lambda: raises(asyncio.CancelledError("mine")), "CancelledError: mine"),
        (cancels_itself, "CancelledError: "),
        (lambda: raises(Odd("odd")), "Odd: odd"),
        (lambda: raises(Unprintable()), "Odd"),
    ],
)
async def test_any_exception_of_a_job_is_a_failed_attempt(
    make_outbox: MakeOutbox,
    clock: MovableClock,
    caplog: pytest.LogCaptureFixture,
    takes_tx: bool,
    end: Callable[[], Awaitable[None]],
    message: str,
) -> None:
    outbox = await make_outbox(clock=clock)

    async def run(job: Job) -> None:
        if job.attempt == 1:
            await end()

    async def run_in_transaction(job: Job, tx: Transaction) -> None:
        await tx.execute("SELECT 1")
        await run(job)

    outbox.job("tick", every="1h", retry=ONCE_MORE)(run_in_transaction if takes_tx else run)
    with caplog.at_level(logging.WARNING):
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")
            row = await reaches(outbox, "RETRYING")
            assert (row.result, row.failed, row.attempts) == ("FAILED", 1, 1)
            assert message in str(row.error)
            clock.advance("2s")
            await ran(outbox, succeeded=1, failed=1)
    assert "job 'tick' scheduled at" in caplog.text


async def test_a_failing_backoff_function_is_replaced_by_the_default(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    def backoff(attempts: int, error: BaseException) -> timedelta:
        raise SystemExit(3)

    outbox = await make_outbox(clock=clock)

    @outbox.job("tick", every="1h", retry=RetryPolicy(backoff=backoff))
    async def tick() -> None:
        raise ValueError("no mail server")

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("tick")
        row = await reaches(outbox, "RETRYING")
    assert NOON + timedelta(seconds=25) < row.due_date < NOON + timedelta(seconds=35)
    assert "using the default backoff" in caplog.text


async def test_retry_after_can_leave_the_attempt_uncounted(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, attempts = await make_outbox(clock=clock), list[int]()

    @outbox.job("tick", every="1h")
    async def tick(job: Job) -> None:
        attempts.append(job.attempt)
        if len(attempts) == 1:
            raise RetryAfter(60, count_attempt=False)

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("tick")
        row = await reaches(outbox, "RETRYING")
        assert (row.due_date, row.attempts, row.failed) == (NOON + timedelta(minutes=1), 0, 0)
        clock.advance("1m")
        await ran(outbox, succeeded=1)
    assert attempts == [1, 1]


# --- the record ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_only_the_write_of_a_result_is_retried(
    make_outbox: MakeOutbox,
    clock: MovableClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: bool,
) -> None:
    outbox, runs = await make_outbox(clock=clock), list[int]()
    table, problems = database_of(outbox).jobs, [OSError("the session was terminated"), RuntimeError("cannot switch")]
    write = table.write

    async def write_or_fail(statement: Statement, **values: Any) -> bool:
        if statement is END and problems:
            raise problems.pop()
        return bool(await write(statement, **values))

    monkeypatch.setattr(table, "write", write_or_fail)

    @outbox.job("tick", every="1h")
    async def tick(job: Job) -> None:
        runs.append(job.attempt)
        if fails:
            raise ValueError("no mail server")

    with caplog.at_level(logging.WARNING):
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")
            await ran(outbox, succeeded=1 - fails, failed=int(fails))
    row = await row_of(outbox)
    assert (runs, problems, row.result, row.attempts) == ([1], [], "FAILED" if fails else "SUCCEEDED", 1)
    assert caplog.text.count("cannot write the result of job 'tick'; retrying") == 1


async def test_a_refused_error_text_does_not_lose_the_result(
    make_outbox: MakeOutbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await make_outbox(clock=clock)
    database, refusal = database_of(outbox), ValueError("this encoding has no such character")
    write, refuses_value = database.jobs.write, database.refuses_value

    async def write_or_fail(statement: Statement, **values: Any) -> bool:
        if any("\N{SNOWMAN}" in str(value) for value in values.values()):
            raise refusal
        return bool(await write(statement, **values))

    def refuses(error: BaseException) -> bool:
        return error is refusal or refuses_value(error)

    monkeypatch.setattr(database.jobs, "write", write_or_fail)
    monkeypatch.setattr(database, "refuses_value", refuses)

    @outbox.job("tick", every="1h")
    async def tick() -> None:
        raise ValueError("\N{SNOWMAN}")

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("tick")
        await ran(outbox, failed=1)
    assert (await row_of(outbox)).error == "the database refused this error's text"


async def test_leaving_discards_a_result_that_cannot_be_written(
    make_outbox: MakeOutbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outboxio.jobs.scheduler.PATIENCE", 0.0)
    outbox, refused = await make_outbox(clock=clock, settings=Settings(shutdown_timeout="50ms")), asyncio.Event()
    table = database_of(outbox).jobs
    write = table.write

    async def write_or_fail(statement: Statement, **values: Any) -> bool:
        if statement is END:
            refused.set()
            raise OSError("the server is away")
        return bool(await write(statement, **values))

    monkeypatch.setattr(table, "write", write_or_fail)

    @outbox.job("tick", every="1h")
    async def tick() -> None: ...

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("tick")
        await refused.wait()
    assert "result of job 'tick' not written; the run will be recorded as interrupted" in caplog.text


@pytest.mark.parametrize(
    ("commits", "error", "runs"),
    [
        (True, ValueError("after the COMMIT"), 1),
        (True, asyncio.CancelledError(), 1),
        (True, CommitUnknown("job tick", uuid4()), 1),
        (False, CommitUnknown("job tick", uuid4()), 2),
    ],
    ids=str,
)
async def test_the_committed_record_is_the_result(
    make_outbox: MakeOutbox,
    clock: MovableClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    commits: bool,
    error: BaseException,
    runs: int,
) -> None:
    outbox, attempts = await make_outbox(clock=clock), list[int]()
    commit, errors = Transaction.commit, [error]

    async def commit_and_fail(tx: Transaction, *args: Any) -> None:
        if not errors:
            return await commit(tx, *args)
        if commits:
            await commit(tx, *args)
            tx.is_committed = not isinstance(error, CommitUnknown)
        else:
            await session_of(tx).rollback()
        raise errors.pop()

    monkeypatch.setattr(Transaction, "commit", commit_and_fail)

    @outbox.job("tick", every="1h")
    async def tick(job: Job, tx: Transaction) -> None:
        attempts.append(job.attempt)

    with caplog.at_level(logging.WARNING):
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")
            if runs == 2:
                await reaches(outbox, "RETRYING")
                clock.advance("2s")
            await ran(outbox, succeeded=1)
    row = await row_of(outbox)
    assert (attempts, row.result, row.failed) == ([1] * runs, "SUCCEEDED", 0)
    assert "job 'tick' failed" not in caplog.text
    assert "a different process has taken the run over" not in caplog.text


# --- transactions --------------------------------------------------------------------------------------


async def test_jobs_waiting_for_transactions_are_not_missed(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, inside, most, free = await make_outbox(clock=clock), 0, 0, asyncio.Event()
    limit = database_of(outbox).handler_transactions

    async def tick(tx: Transaction) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await free.wait()
        inside -= 1

    for number in range(limit + 2):
        outbox.job(f"tick {number}", every="1h")(tick)
    async with outbox.running():
        await eventually(lambda: _all(outbox, lambda row: row.next_date == NOON + timedelta(hours=1)))
        clock.advance("1h")
        await eventually(lambda: inside == limit)
        clock.advance("10m")  # jobs that wait for a transaction do not count as missed
        free.set()
        await eventually(lambda: _all(outbox, lambda row: row.succeeded == 1))
        rows = await outbox.admin.jobs()
    assert most == limit
    assert {(row.failed, row.missed, row.attempts, row.moment_date) for row in rows} == {
        (0, 0, 1, NOON + timedelta(hours=1))
    }


async def _all(outbox: Outbox, holds: Callable[[JobRow], bool]) -> bool:
    rows = await outbox.admin.jobs()
    return bool(rows) and all(map(holds, rows))


async def test_a_job_whose_transaction_cannot_begin_uses_no_attempt(
    make_outbox: MakeOutbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, attempts = await make_outbox(clock=clock), list[int]()
    database, refusals = database_of(outbox), [DatabaseUnavailable("default", "here", "no connection is left")]
    session = database.session

    def refusing() -> AbstractAsyncContextManager[Any]:
        if refusals:
            raise refusals.pop()
        opened: AbstractAsyncContextManager[Any] = session()
        return opened

    @outbox.job("tick", every="1h")
    async def tick(job: Job, tx: Transaction) -> None:
        attempts.append(job.attempt)

    async with outbox.running():
        await ran(outbox)
        monkeypatch.setattr(database, "session", refusing)
        await outbox.admin.run_job_now("tick")
        row = await reaches(outbox, "RETRYING")
        assert (row.attempts, row.failed) == (0, 0)
        clock.advance("2s")
        await ran(outbox, succeeded=1)
    assert attempts == [1]
    assert "job 'tick' scheduled at 2030-01-01 12:00:00 will be retried without counting an attempt: " in caplog.text


async def test_leaving_before_the_transaction_begins_uses_no_attempt(
    make_outbox: MakeOutbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await make_outbox(clock=clock, settings=Settings(shutdown_timeout="50ms"))
    database, waits = database_of(outbox), asyncio.Event()

    @asynccontextmanager
    async def waiting() -> AsyncGenerator[Any]:
        waits.set()
        await hang()
        yield

    @outbox.job("tick", every="1h")
    async def tick(tx: Transaction) -> None: ...

    async with outbox.running():
        await ran(outbox)
        monkeypatch.setattr(database, "session", waiting)
        await outbox.admin.run_job_now("tick")
        await waits.wait()
    row = await row_of(outbox)
    assert (row.state, row.attempts, row.failed) == ("RETRYING", 0, 0)


async def test_leaving_interrupts_a_job_run(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, started = await make_outbox(clock=clock, settings=Settings(shutdown_timeout="50ms")), asyncio.Event()

    @outbox.job("tick", every="1h")
    async def tick() -> None:
        started.set()
        try:
            await hang()
        finally:
            raise ValueError("while cleaning up")

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("tick")
        await started.wait()
    row = await row_of(outbox)
    assert (row.result, row.failed, row.error) == ("INTERRUPTED", 1, "the process left running() during the run")
