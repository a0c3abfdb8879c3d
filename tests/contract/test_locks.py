"""Keyed locks: one holder per key in the cluster, on every database. Two outboxes stand for two processes."""

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
    SelfDeadlock,
    Settings,
    SettingsError,
)
from tests.kit.app import Emit, Look, MoneyDeposited, eventually
from tests.kit.inside import lock_sessions_of, locked_keys_of
from tests.kit.keyed_locks import end_session
from tests.kit.probes import MakeOutbox
from tests.kit.proxy import proxy_to
from tests.kit.server_actions import actions_on
from tests.kit.sql import sql

pytestmark = pytest.mark.slow

PATIENCE = 60.0


class Holder:
    """A task that holds a key until it is released."""

    def __init__(self, lock: KeyedLock) -> None:
        self.lock = lock
        self.entered, self.may_release = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        async with self.lock:
            self.entered.set()
            await self.may_release.wait()

    async def leave(self) -> None:
        self.may_release.set()
        await self.task


@asynccontextmanager
async def held(outbox: Outbox, key: str, **options: Any) -> AsyncIterator[Holder]:
    """A block in which another task holds the key."""
    holder = Holder(outbox.lock(key, **options))
    try:
        async with asyncio.timeout(PATIENCE):
            await holder.entered.wait()
        yield holder
    finally:
        holder.may_release.set()
        await asyncio.wait([holder.task])  # the test itself checks the errors of the task


async def waiting(outbox: Outbox, key: str, **options: Any) -> Holder:
    """A task that waits for the key."""
    before = statistics(outbox).waiting
    holder = Holder(outbox.lock(key, **options))
    await eventually(lambda: statistics(outbox).waiting > before)
    return holder


def statistics(outbox: Outbox) -> Any:
    return outbox.statistics["default"].keyed_locks


async def test_one_task_at_a_time_holds_a_key_across_processes(make_outbox: MakeOutbox) -> None:
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


async def test_tasks_of_a_process_get_the_lock_in_arrival_order(make_outbox: MakeOutbox) -> None:
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
            (here, "another task of this process"),
            (there, "(another process|no lock session could be opened)"),
        ):
            with pytest.raises(
                LockTimeout, match=f"^lock 'invoice 7' on shard 'default' was not acquired .*: {by}"
            ) as caught:
                async with outbox.lock("invoice 7", timeout=timeout):
                    pass
            assert isinstance(caught.value, TimeoutError)
    async with there.lock("invoice 7", timeout=timeout and 60):
        pass
    assert (statistics(here).timeouts, statistics(there).timeouts, locked_keys_of(here)) == (1, 1, [])


async def test_a_free_lock_is_taken_with_a_timeout_of_zero(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    async with outbox.lock("k", timeout=0) as lock:
        assert lock.is_held


@pytest.mark.parametrize("queue", ["the queue of this process", "the queue of the cluster"])
async def test_a_cancelled_waiter_leaves_nothing_behind(make_outbox: MakeOutbox, queue: str) -> None:
    here, there = await make_outbox(), await make_outbox()
    waits = here if queue == "the queue of this process" else there
    async with held(here, "k") as holder:
        waiter = await waiting(waits, "k")
        waiter.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter.task
        assert (statistics(waits).waiting, locked_keys_of(there)) == (0, [])
        await holder.leave()
    for outbox in (here, there):
        async with outbox.lock("k", timeout=PATIENCE):
            pass
    assert locked_keys_of(here) == locked_keys_of(there) == []


async def test_a_task_cancelled_in_its_block_releases_the_lock(make_outbox: MakeOutbox) -> None:
    here, there = await make_outbox(), await make_outbox()
    async with held(here, "k") as holder:
        holder.task.cancel()
        async with there.lock("k", timeout=PATIENCE) as lock:
            assert lock.is_held
    assert holder.task.cancelled()


async def test_nesting_blocks_of_the_same_key_is_refused_by_name(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()

    async def again() -> None:
        async with outbox.lock("invoice 7"):
            pass

    async with outbox.lock("invoice 7"):
        with pytest.raises(LockHeld, match=r"^lock 'invoice 7' on shard 'default' is held by the enclosing block"):
            await again()
        with pytest.raises(LockHeld):  # the block waits for the task, as asyncio.wait_for does
            await asyncio.create_task(again())
        async with outbox.lock("invoice 8"):
            pass
    await again()


async def test_a_lock_object_is_for_one_block(make_outbox: MakeOutbox) -> None:
    lock = (await make_outbox()).lock("k")
    async with lock:
        pass
    with pytest.raises(KeyedLockError, match=r"lock 'k' .* was already entered: call outbox.lock\(\) for each block"):
        await lock.__aenter__()


async def test_a_lock_whose_session_ends_is_lost_to_the_next_holder(make_outbox: MakeOutbox, database_url: str) -> None:
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
                follower.may_release.set()
            await asyncio.gather(next_here.task, next_there.task)
        with pytest.raises(LockLost, match="lock 'k' on shard 'default' was lost with its session before the block"):
            await holder.leave()
    assert statistics(here).lost == 1
    assert (statistics(here).held, statistics(here).waiting, locked_keys_of(here)) == (0, 0, [])


async def test_an_error_of_a_block_takes_precedence_over_lock_loss(make_outbox: MakeOutbox, database_url: str) -> None:
    outbox = await make_outbox()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the block is the statement
        async with outbox.lock("k") as lock:
            await end_session(database_url, lock)
            async with asyncio.timeout(PATIENCE):
                await lock.lost.wait()
            raise ZeroDivisionError


async def test_a_loss_at_the_end_of_the_block_is_raised_too(make_outbox: MakeOutbox, database_url: str) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="1h"))
    with pytest.raises(LockLost):
        async with outbox.lock("k") as lock:
            await end_session(database_url, lock)
    assert lock.lost.is_set()


async def test_each_block_has_a_larger_term_to_refuse_late_writers(make_outbox: MakeOutbox, look: Look) -> None:
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


async def test_a_nested_block_shares_the_session_if_all_are_used(make_outbox: MakeOutbox) -> None:
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


async def test_idle_sessions_are_closed_and_reopened(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="50ms"))
    for _ in range(2):
        async with held(outbox, "a"), held(outbox, "b"):
            pass
        await eventually(lambda: not lock_sessions_of(outbox))


async def test_a_held_lock_is_proven_beyond_the_servers_idle_timeout(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="2s"))
    async with held(outbox, "k") as holder:
        [session] = lock_sessions_of(outbox)
        for _ in range(3):
            proven = session._proven_at
            await eventually(lambda proven=proven: session._proven_at > proven)
        assert holder.lock.is_held


async def test_closing_the_outbox_releases_locks_and_ends_waits(make_outbox: MakeOutbox) -> None:
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


def closing_statement(url: str) -> bytes:
    """The statement that an outbox sends on a lock session before it closes the session."""
    return b"pg_advisory_unlock_all" if url.startswith("postgres") else b"release_all_locks"


async def test_a_lock_survives_another_session_lost_while_closing(server_url: str) -> None:
    settings = Settings(lock_heartbeat="2s")
    async with (
        proxy_to(server_url) as proxy,
        Outbox(proxy.url, namespace="app", settings=settings) as outbox,
        held(outbox, "k") as holder,
    ):
        [session] = lock_sessions_of(outbox)
        async with held(outbox, "idle"):
            proxy.cut_at(closing_statement(server_url), lets_through=False)
        await eventually(lambda: not proxy.waits_to_cut)
        proven = session._proven_at
        await eventually(lambda: session._proven_at > proven or holder.lock.lost.is_set())
        assert holder.lock.is_held


async def test_an_outbox_closes_all_sessions_even_if_one_is_lost(server_url: str) -> None:
    async with proxy_to(server_url) as proxy:
        outbox = Outbox(proxy.url, namespace="app")
        async with held(outbox, "a"), held(outbox, "b"):
            proxy.cut_at(closing_statement(server_url), lets_through=False)
        await outbox.close()
        assert not proxy.waits_to_cut

        async def has_no_session() -> bool:
            return not await actions_on(server_url).sessions()

        await eventually(has_no_session)


async def test_locks_in_handlers_do_not_conflict_with_internal_locks(make_outbox: MakeOutbox) -> None:
    outbox, done = await make_outbox(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="first")
    async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
        async with outbox.lock("first"):
            done.set()

    async with held(outbox, "fanout"), held(outbox, "dispatch/first"), outbox.running():
        await outbox.execute(Emit((1,)))
        async with asyncio.timeout(PATIENCE):
            await done.wait()


async def test_a_lock_needs_no_tables_unless_it_uses_a_term(database_url: str) -> None:
    async with Outbox(database_url, namespace="app") as outbox, outbox.lock("migration") as lock:
        await outbox.migrate()
        assert await lock.term() == 1


@pytest.mark.not_on("postgres", "mysql", "mariadb", why="a term waits for no transaction there")
async def test_a_term_is_refused_inside_a_transaction_it_would_wait_for(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    async with outbox.lock("k") as lock:
        async with outbox.transaction("Write"):
            with pytest.raises(SelfDeadlock, match=r"lock.term\(\)"):
                await lock.term()
        assert await lock.term() == 1


@pytest.mark.parametrize(
    ("key", "because"),
    [
        ("", "is blank"),
        ("  ", "is blank"),
        (7, "is not a string"),
        (None, "is not a string"),
        ("a" * 256, "has 256 characters"),
        ("a\0b", "contains NUL"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_an_invalid_key_is_refused_before_any_connection(key: Any, because: str) -> None:
    outbox = Outbox("postgresql://nowhere.invalid/app", namespace="app")
    with pytest.raises(ConfigurationError, match=f"^lock key: .*{because}"):
        outbox.lock(key)


def test_an_invalid_shard_or_timeout_is_refused_before_any_connection() -> None:
    outbox = Outbox("postgresql://nowhere.invalid/app", namespace="app")
    with pytest.raises(ConfigurationError, match="there is no shard 'west'; the shards are 'default'"):
        outbox.lock("k", shard="west")
    for timeout in (-1, "soon"):
        with pytest.raises(SettingsError, match="lock timeout"):
            outbox.lock("k", timeout=timeout)


async def test_locks_of_two_shards_are_independent(make_outbox: MakeOutbox, database_url: str, second_url: str) -> None:
    outbox = await make_outbox(database={"east": database_url, "west": second_url})
    async with outbox.lock("k") as east, outbox.lock("k", shard="west") as west:
        assert (east.shard, west.shard) == ("east", "west")
        assert repr(west) == "<KeyedLock 'k' on shard 'west', held>"


async def test_an_unreachable_server_is_reported(server_url: str) -> None:
    scheme = server_url.partition("://")[0]
    outbox = Outbox(f"{scheme}://127.0.0.1:1/app", namespace="app")
    with pytest.raises(DatabaseUnavailable):
        await outbox.lock("k", timeout="30s").__aenter__()
    assert locked_keys_of(outbox) == []
