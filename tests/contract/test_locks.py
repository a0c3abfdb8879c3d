"""Keyed locks: one holder in the cluster for a key, on every database. Two outboxes stand for two processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outboxio import (
    ConfigurationError,
    DatabaseUnavailable,
    EventEnvelope,
    KeyedLock,
    KeyedLockError,
    LockHeld,
    LockLost,
    LockTimeout,
    Outbox,
    Settings,
    SettingsError,
    WaitsForItself,
)
from tests.kit.app import Emit, Look, MoneyDeposited, eventually
from tests.kit.inside import lines_of, lock_sessions_of
from tests.kit.keyed_locks import end_session
from tests.kit.probes import MakeOutbox
from tests.kit.sql import sql

pytestmark = pytest.mark.slow

PATIENCE = 60.0


class Holder:
    """A task that holds a key until it is let go."""

    def __init__(self, lock: KeyedLock) -> None:
        self.lock = lock
        self.entered, self.may_leave = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        async with self.lock:
            self.entered.set()
            await self.may_leave.wait()

    async def leave(self) -> None:
        self.may_leave.set()
        await self.task


@asynccontextmanager
async def held(outbox: Outbox, key: str, **options: Any) -> AsyncIterator[Holder]:
    """A block in which a different task holds the key."""
    holder = Holder(outbox.lock(key, **options))
    try:
        async with asyncio.timeout(PATIENCE):
            await holder.entered.wait()
        yield holder
    finally:
        holder.may_leave.set()
        await asyncio.wait([holder.task])  # the test itself looks at errors of the task


async def waiting(outbox: Outbox, key: str, **options: Any) -> Holder:
    """A task that waits for the key."""
    before = statistics(outbox).waiting
    holder = Holder(outbox.lock(key, **options))
    await eventually(lambda: statistics(outbox).waiting > before)
    return holder


def statistics(outbox: Outbox) -> Any:
    return outbox.statistics["default"].keyed_locks


async def test_one_task_at_a_time_holds_a_key_over_tasks_and_processes(make_outbox: MakeOutbox) -> None:
    outboxes = [await make_outbox() for _ in range(2)]
    inside, most, turns = 0, 0, list[int]()

    async def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(4):
            async with outboxes[number % 2].lock("customer 7"):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                turns.append(number)
                inside -= 1

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(work(number))
    assert (most, len(turns)) == (1, 24)
    assert [statistics(outbox).taken for outbox in outboxes] == [12, 12]


async def test_different_keys_and_namespaces_have_different_locks(make_outbox: MakeOutbox) -> None:
    first, second = await make_outbox(), await make_outbox(namespace="other")
    async with held(first, "a"), held(first, "b"), held(second, "a"):
        assert (statistics(first).held, statistics(second).held) == (2, 1)


async def test_the_tasks_of_a_process_come_in_the_order_of_arrival(make_outbox: MakeOutbox) -> None:
    outbox, entered = await make_outbox(), list[int]()

    async def enter(number: int) -> None:
        async with outbox.lock("k"):
            entered.append(number)

    async with held(outbox, "k"):
        tasks = list[asyncio.Task[None]]()
        for number in range(8):
            tasks.append(asyncio.create_task(enter(number)))
            await eventually(lambda number=number: statistics(outbox).waiting == number + 1)
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*tasks)
    assert entered == list(range(8))


@pytest.mark.parametrize("timeout", [0, "0s", 0.05, "1200ms"])
async def test_a_wait_ends_with_its_timeout_and_names_the_key(make_outbox: MakeOutbox, timeout: Any) -> None:
    here, there = await make_outbox(), await make_outbox()
    async with held(here, "invoice 7"):
        for outbox, by in (
            (here, "a different task of this process"),
            (there, "(a different process|no session was open)"),
        ):
            with pytest.raises(
                LockTimeout, match=f"^lock 'invoice 7' on shard 'default' was not taken .*: {by}"
            ) as caught:
                async with outbox.lock("invoice 7", timeout=timeout):
                    pass
            assert isinstance(caught.value, TimeoutError)
    async with there.lock("invoice 7", timeout=timeout and 60):
        pass
    assert (statistics(here).timeouts, statistics(there).timeouts, lines_of(here)) == (1, 1, [])


async def test_a_free_lock_is_taken_with_a_timeout_of_zero(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    async with outbox.lock("k", timeout=0) as lock:
        assert lock.is_held


@pytest.mark.parametrize("place", ["the line of this process", "the line of the processes"])
async def test_a_cancelled_waiter_leaves_nothing_behind(make_outbox: MakeOutbox, place: str) -> None:
    here, there = await make_outbox(), await make_outbox()
    waits = here if place == "the line of this process" else there
    async with held(here, "k") as holder:
        waiter = await waiting(waits, "k")
        waiter.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter.task
        assert (statistics(waits).waiting, lines_of(there)) == (0, [])
        await holder.leave()
    for outbox in (here, there):
        async with outbox.lock("k", timeout=PATIENCE):
            pass
    assert lines_of(here) == lines_of(there) == []


async def test_a_task_that_is_cancelled_in_its_block_releases_the_lock(make_outbox: MakeOutbox) -> None:
    here, there = await make_outbox(), await make_outbox()
    async with held(here, "k") as holder:
        holder.task.cancel()
        async with there.lock("k", timeout=PATIENCE) as lock:
            assert lock.is_held
    assert holder.task.cancelled()


async def test_a_block_inside_the_block_of_the_same_key_is_refused_by_name(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()

    async def again() -> None:
        async with outbox.lock("invoice 7"):
            pass

    async with outbox.lock("invoice 7"):
        with pytest.raises(
            LockHeld, match=r"^lock 'invoice 7' on shard 'default' is held by the block around this call"
        ):
            await again()
        with pytest.raises(LockHeld):  # the block waits for the task, as asyncio.wait_for does
            await asyncio.create_task(again())
        async with outbox.lock("invoice 8"):
            pass
    await again()


async def test_a_lock_serves_one_block(make_outbox: MakeOutbox) -> None:
    lock = (await make_outbox()).lock("k")
    async with lock:
        pass
    with pytest.raises(KeyedLockError, match=r"lock 'k' .* was entered before: call outbox.lock\(\) for each block"):
        await lock.__aenter__()


async def test_a_lock_whose_session_ends_is_lost_and_the_next_holder_enters(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    here, there = await make_outbox(), await make_outbox(settings=Settings(lock_heartbeat="60s"))
    async with held(here, "k") as holder:
        next_here, next_there = await waiting(here, "k"), await waiting(there, "k")
        await end_session(database_url, holder.lock)
        async with asyncio.timeout(PATIENCE):
            await holder.lock.lost.wait()
            assert not holder.lock.is_held
            with pytest.raises(LockLost):
                await holder.lock.term()
            for follower in (next_here, next_there):
                follower.may_leave.set()
            await asyncio.gather(next_here.task, next_there.task)
        with pytest.raises(LockLost, match="lock 'k' on shard 'default' was lost with its session before the block"):
            await holder.leave()
    assert statistics(here).lost == 1
    assert (statistics(here).held, statistics(here).waiting, lines_of(here)) == (0, 0, [])


async def test_the_error_of_a_block_is_not_replaced_by_the_loss_of_its_lock(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    outbox = await make_outbox()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the block is the statement
        async with outbox.lock("k") as lock:
            await end_session(database_url, lock)
            async with asyncio.timeout(PATIENCE):
                await lock.lost.wait()
            raise ZeroDivisionError


async def test_a_loss_that_shows_only_at_the_end_of_the_block_is_told_too(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="1h"))
    with pytest.raises(LockLost):
        async with outbox.lock("k") as lock:
            await end_session(database_url, lock)
    assert lock.lost.is_set()


async def test_each_block_has_a_larger_term_and_a_late_writer_is_refused(make_outbox: MakeOutbox, look: Look) -> None:
    here, there = await make_outbox(), await make_outbox()
    await look.fetch("CREATE TABLE own (body VARCHAR(40), term BIGINT)")
    await look.fetch("INSERT INTO own VALUES ('old', 0)")

    async def write(body: str, term: int) -> None:
        async with here.transaction("Write") as tx:
            await tx.execute(sql(tx, "UPDATE own SET body = $1, term = $2 WHERE term <= $3"), body, term, term)

    terms = list[int]()
    for outbox in (here, there, here):
        async with outbox.lock("report") as lock:
            terms += [await lock.term(), await lock.term()]
    assert terms[0] == terms[1] < terms[2] == terms[3] < terms[4] == terms[5]

    await write("new", terms[4])
    await write("late", terms[2])
    assert await look.fetch("SELECT body, term FROM own") == [{"body": "new", "term": terms[4]}]


async def test_more_keys_than_sessions_wait_for_a_session(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(lock_sessions=2))
    async with held(outbox, "a") as first, held(outbox, "b"):
        for timeout in (0, 0.05):
            with pytest.raises(LockTimeout, match=r"all 2 lock sessions .* in use.* raise the setting lock_sessions"):
                async with outbox.lock("c", timeout=timeout):
                    pass
        third = await waiting(outbox, "c")
        await first.leave()
        async with asyncio.timeout(PATIENCE):
            await third.entered.wait()
        assert len(lock_sessions_of(outbox)) == 2
        await third.leave()
    assert statistics(outbox).timeouts == 2


async def test_a_block_inside_a_block_shares_the_session_if_all_are_in_use(make_outbox: MakeOutbox) -> None:
    here, there = await make_outbox(settings=Settings(lock_sessions=1)), await make_outbox()
    async with held(there, "foreign") as foreign, here.lock("outer") as outer:
        with pytest.raises(LockTimeout):
            async with here.lock("foreign", timeout=0.05):
                pass
        waiter = await waiting(here, "foreign")
        waiter.task.cancel()  # a cancelled wait does not drop the session, which holds the outer lock
        await asyncio.wait([waiter.task])
        await foreign.leave()
        async with here.lock("foreign", timeout=PATIENCE) as inner:
            assert outer.is_held
            assert inner.is_held
        assert len(lock_sessions_of(here)) == 1
    assert not outer.lost.is_set()


async def test_idle_sessions_are_closed_and_opened_again(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="50ms"))
    for _ in range(2):
        async with held(outbox, "a"), held(outbox, "b"):
            pass
        await eventually(lambda: not lock_sessions_of(outbox))


async def test_a_held_lock_is_proven_for_longer_than_the_server_bears_silence(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="1s"))
    async with held(outbox, "k") as holder:
        [session] = lock_sessions_of(outbox)
        for _ in range(3):
            proven = session._proven_at
            await eventually(lambda proven=proven: session._proven_at > proven)
        assert holder.lock.is_held


async def test_the_end_of_the_outbox_releases_locks_and_ends_waits(make_outbox: MakeOutbox) -> None:
    here, there = await make_outbox(), await make_outbox()
    async with held(there, "foreign"), held(here, "k") as holder:
        waiters = [await waiting(here, key) for key in ("k", "foreign")]
        await here.close()
        assert holder.lock.lost.is_set()
        for waiter in waiters:
            with pytest.raises(DatabaseUnavailable):
                await waiter.task
        async with there.lock("k", timeout=PATIENCE):
            pass
        with pytest.raises(LockLost):
            await holder.leave()
    async with here.lock("k", timeout=PATIENCE):  # the outbox may be used again
        pass


async def test_locks_work_inside_handlers_and_never_meet_the_locks_of_the_loops(make_outbox: MakeOutbox) -> None:
    outbox, done = await make_outbox(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="first")
    async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
        async with outbox.lock("first"):
            done.set()

    async with held(outbox, "fanout"), held(outbox, "dispatch/first"), outbox.running():
        await outbox.execute(Emit((1,)))
        async with asyncio.timeout(PATIENCE):
            await done.wait()


async def test_a_lock_needs_no_tables_but_a_term_does(database_url: str) -> None:
    async with Outbox(database_url, namespace="app") as outbox, outbox.lock("migration") as lock:
        await outbox.migrate()
        assert await lock.term() == 1


@pytest.mark.not_on("postgres", "mysql", "mariadb", why="a term waits for no transaction there")
async def test_a_term_is_refused_inside_a_transaction_that_it_would_wait_for(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    async with outbox.lock("k") as lock:
        async with outbox.transaction("Write"):
            with pytest.raises(WaitsForItself, match=r"lock.term\(\)"):
                await lock.term()
        assert await lock.term() == 1


@pytest.mark.parametrize(
    ("key", "because"),
    [
        ("", "is blank"),
        ("  ", "is blank"),
        (7, "is no string"),
        (None, "is no string"),
        ("a" * 256, "has 256 characters"),
        ("a\0b", "contains NUL"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_before_any_connection(key: Any, because: str) -> None:
    outbox = Outbox("postgresql://nowhere.invalid/app", namespace="app")
    with pytest.raises(ConfigurationError, match=f"^lock key: .*{because}"):
        outbox.lock(key)


def test_a_shard_and_a_timeout_that_cannot_be_used_are_refused_before_any_connection() -> None:
    outbox = Outbox("postgresql://nowhere.invalid/app", namespace="app")
    with pytest.raises(ConfigurationError, match="there is no shard 'west'"):
        outbox.lock("k", shard="west")
    for timeout in (-1, "soon"):
        with pytest.raises(SettingsError, match="lock timeout"):
            outbox.lock("k", timeout=timeout)


async def test_locks_of_two_shards_are_two_locks(make_outbox: MakeOutbox, database_url: str, second_url: str) -> None:
    outbox = await make_outbox(database={"east": database_url, "west": second_url})
    async with outbox.lock("k") as east, outbox.lock("k", shard="west") as west:
        assert (east.shard, west.shard) == ("east", "west")
        assert repr(west) == "<KeyedLock 'k' on shard 'west', held>"


async def test_a_server_that_is_away_is_told(server_url: str) -> None:
    scheme = server_url.partition("://")[0]
    outbox = Outbox(f"{scheme}://127.0.0.1:1/app", namespace="app")
    with pytest.raises(DatabaseUnavailable):
        await outbox.lock("k", timeout="30s").__aenter__()
    assert lines_of(outbox) == []
