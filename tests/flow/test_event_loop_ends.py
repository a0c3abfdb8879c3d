"""Several event loops in one process, and the state they leave to the next loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outboxio import Outbox
from tests.kit.app import WALLETS, Emit, Journal, Look, MoneyDeposited
from tests.kit.inline_programs import outcome
from tests.kit.probes import open_transactions

pytestmark = pytest.mark.above_statements


@pytest.fixture
async def look(database_url: str) -> Look:
    look = Look(database_url)
    await look.fetch(WALLETS)
    return look


async def test_actions_of_two_threads_commit_entirely_or_are_refused(database_url: str, look: Look) -> None:
    """Each thread runs an event loop for each action, as ``asyncio.run`` in a request's thread does."""
    succeeded, failed = await outcome(database_url, """
        succeeded, failed = [], Counter()

        async def act(name, fails):
            async with asyncio.timeout(60), outbox.transaction("Act") as tx:
                await add_wallet(tx, name)
                await asyncio.sleep(0.001)
                tx.emit(WalletOpened(uuid4()), model_id=name)
                if fails:
                    raise LookupError

        def requests(letter):
            for number in range(15):
                try:
                    asyncio.run(act(f"{letter}{number}", number % 3 == 0))
                except Exception as error:
                    failed[type(error).__name__] += 1
                else:
                    succeeded.append(f"{letter}{number}")

        asyncio.run(outbox.migrate())
        threads = [threading.Thread(target=requests, args=(letter,)) for letter in "ab"]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(json.dumps([succeeded, failed]))
    """)  # fmt: skip

    assert succeeded
    assert {row["id"] for row in await look.fetch("SELECT id FROM wallets")} == set(succeeded)
    assert {row["model_id"] for row in await look.events()} == set(succeeded)
    assert set(failed) <= {"LookupError", "WrongEventLoop"}


async def test_transactions_of_a_closed_loop_do_not_affect_later_ones(database_url: str, look: Look) -> None:
    """Tasks of a closed event loop end when they are collected: here inside a later transaction."""
    ended = await outcome(database_url, """
        async def leave_open():
            begun = asyncio.Event()

            async def never_ends():
                async with outbox.transaction("Left") as tx:
                    await add_wallet(tx, "left")
                    begun.set()
                    await asyncio.sleep(3600)

            task = asyncio.create_task(never_ends())
            await begun.wait()
            return task.get_coro()

        async def resume(left):
            async with outbox.transaction("Next") as tx:
                await add_wallet(tx, "next")
                try:
                    left.close()  # as when the task is collected
                except Exception:
                    pass  # on its way out it waits for an answer of its connection
                await asyncio.sleep(0.05)
                await add_wallet(tx, "later")
            async with outbox.transaction("Beside"):
                await asyncio.gather(*(outbox.admin.counts() for _ in range(3)))
            await outbox.close()
            return "ended"

        asyncio.run(outbox.migrate())
        loop = asyncio.new_event_loop()
        left = loop.run_until_complete(leave_open())
        loop.close()
        print(json.dumps(asyncio.run(resume(left))))
        sys.stdout.flush()
        os._exit(0)
    """)  # fmt: skip

    assert ended == "ended"
    assert [row["id"] for row in await look.fetch("SELECT id FROM wallets ORDER BY id")] == ["later", "next"]
    assert await open_transactions(database_url) == []


async def test_a_running_block_of_a_closed_loop_has_ended(database_url: str, look: Look) -> None:
    """``loop.close()`` ends no task: the outbox must not appear to be running in the next event loop."""
    succeeded = await outcome(database_url, """
        from tests.kit.app import Journal, MoneyDeposited
        journal = Journal()
        outbox.handler(MoneyDeposited, name="first")(journal)
        kept = []

        async def forget_to_leave():
            await outbox.migrate()
            kept.append(outbox.running())
            await kept[0].__aenter__()
            await outbox.executor.execute(Emit((1,)))
            await journal.calls(1)

        async def run_again():
            journal.__init__()
            async with outbox.running():
                await outbox.executor.execute(Emit((2,)))
                await journal.calls(1)
                await outbox.drain("30s")
            counts = await outbox.admin.counts()
            await outbox.close()
            return counts["SUCCEEDED"]

        loop = asyncio.new_event_loop()
        loop.run_until_complete(forget_to_leave())
        kept += asyncio.all_tasks(loop)
        loop.close()
        print(json.dumps(asyncio.run(run_again())))
        sys.stdout.flush()
        os._exit(0)
    """)  # fmt: skip

    assert succeeded == 2


def test_in_memory_a_running_block_of_a_closed_loop_has_ended() -> None:
    """The data stays, and so would its locks, which are only names in a set."""
    outbox, journal, kept = Outbox("sqlite://", namespace="app"), Journal(), list[Any]()
    outbox.handler(MoneyDeposited, name="first")(journal)

    async def forget_to_leave() -> None:
        await outbox.migrate()
        kept.append(outbox.running())
        await kept[0].__aenter__()
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        kept.extend(asyncio.all_tasks() - {asyncio.current_task()})

    async def run_again() -> int:
        await outbox.executor.execute(Emit((2,)))
        await outbox.drain("30s")
        counts = await outbox.admin.counts()
        await outbox.close()
        return counts["SUCCEEDED"]

    loop = asyncio.new_event_loop()
    loop.run_until_complete(forget_to_leave())
    loop.close()
    journal._called = asyncio.Condition()
    try:
        assert asyncio.run(run_again()) == 2
    finally:
        for task in kept[1:]:
            task._log_destroy_pending = False  # left open on purpose
