"""Forks: a child uses none of its parent's connections, and is refused an outbox that the parent had opened."""

from __future__ import annotations

import os

import pytest

from tests.kit.app import WALLETS, Look
from tests.kit.inline_programs import outcome

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

FORKING = """
    import contextlib, traceback, warnings
    from types import SimpleNamespace
    from outboxio import WrongProcess
    from tests.kit.app import Journal, WalletOpened
    from tests.kit.inside import owner_of
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on

    def forked(work):
        # The JSON that work() returns in a forked child.
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.write(writing, json.dumps(work()).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        with open(reading, "rb") as answer:
            said = answer.read()
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        return json.loads(said)

    async def in_transaction():
        async with outbox.transaction("Late"):
            raise AssertionError("begun")

    async def in_running():
        async with outbox.running():
            raise AssertionError("entered")

    async def reads():
        async with outbox.connection():
            raise AssertionError("connected")

    async def in_lifespan():
        async with outbox.lifespan(SimpleNamespace()):
            raise AssertionError("entered")

    async def wakes():
        outbox.wake()

    KINDS = {
        "execute": lambda: outbox.execute(Emit((99,))),
        "transaction": in_transaction,
        "connection": reads,
        "running": in_running,
        "lifespan": in_lifespan,
        "drain": lambda: outbox.drain("30s"),
        "record": lambda: outbox.record(object(), WalletOpened(uuid4()), action="Late"),
        "wake": wakes,
        "receive": lambda: outbox.inbox.receive(source="bank", external_id="1", event=WalletOpened(uuid4())),
        "counts": lambda: outbox.admin.counts(),
        "overview": lambda: outbox.admin.overview(),
        "pause": lambda: outbox.admin.pause("first"),
        "operations": lambda: outbox.admin.operations(),
        "health": lambda: outbox.health(),
        "migrate": lambda: outbox.migrate(),
        "check": lambda: outbox.check(),
        "close": lambda: outbox.close(),
    }

    def refused():
        # The kinds of use that are not refused by name, each with the error.
        wrong = {}

        async def use(kind):
            await KINDS[kind]()

        for kind in KINDS:
            try:
                asyncio.run(asyncio.wait_for(use(kind), 60))
            except WrongProcess as error:
                if (error.opened_in, error.process) != (os.getppid(), os.getpid()) or "'app'" not in str(error):
                    wrong[kind] = str(error)
            except BaseException as error:
                wrong[kind] = repr(error)
            else:
                wrong[kind] = "done"
        return wrong
"""


@pytest.fixture
async def look(database_url: str) -> Look:
    look = Look(database_url)
    await look.fetch(WALLETS)
    return look


@pytest.mark.above_statements
async def test_a_child_is_refused_an_outbox_its_parent_opened(database_url: str, look: Look) -> None:
    """The parent runs, handles an event, has a transaction open, and continues as if there were no child."""
    result = await outcome(database_url, FORKING + """
    journal, in_handler = Journal(), []

    @outbox.handler(WalletOpened, name="first")
    async def first(envelope):
        if not in_handler:
            in_handler.append(forked(refused))
        await journal(envelope)

    async def parent():
        await outbox.migrate()
        async with asyncio.timeout(90), outbox.running():
            async with outbox.transaction("Around") as tx:
                await add_wallet(tx, "before")
                around = forked(refused)
                await add_wallet(tx, "after")
                tx.emit(WalletOpened(uuid4()))
            await journal.calls(1, timeout=60)
            await asyncio.gather(*(outbox.execute(Emit((n,))) for n in range(5)))
            await outbox.drain("30s")
            events = (await outbox.admin.counts())["SUCCEEDED"]
        beside = forked(refused)
        await outbox.close()
        return around, in_handler, beside, events

    print(json.dumps(asyncio.run(parent())))
    """)  # fmt: skip

    assert result == [{}, [{}], {}, 1]
    assert [row["id"] for row in await look.fetch("SELECT id FROM wallets ORDER BY id")] == ["after", "before"]
    assert len(await look.events()) == 6


@pytest.mark.above_statements
async def test_an_outbox_left_only_by_its_event_loop_is_refused(database_url: str, look: Look) -> None:
    """Its connections are still open, because the outbox was not closed."""
    assert await outcome(database_url, FORKING + """
    asyncio.run(outbox.migrate())
    assert forked(refused) == {}
    asyncio.run(outbox.execute(Emit((1,))))  # in the parent the next event loop takes over
    print(json.dumps(forked(refused)))
    sys.stdout.flush()
    os._exit(0)
    """) == {}  # fmt: skip

    assert len(await look.events()) == 1


@pytest.mark.above_statements
async def test_a_grandchild_is_refused_what_the_child_opened(database_url: str, look: Look) -> None:
    assert await outcome(database_url, FORKING + """
    asyncio.run(outbox.migrate())
    asyncio.run(outbox.close())

    def child():
        asyncio.run(outbox.execute(Emit((1,))))
        return forked(refused)

    print(json.dumps(forked(child)))
    """) == {}  # fmt: skip

    assert len(await look.events()) == 1


@pytest.mark.above_statements
async def test_an_unopened_outbox_works_in_each_child_under_its_own_name(database_url: str, look: Look) -> None:
    """As in the workers of ``gunicorn --preload``: the module is imported, and the outbox created, before the forks."""
    children, name_of_parent = await outcome(database_url, FORKING + """
    journal = Journal()
    outbox.handler(WalletOpened, name="first")(journal)
    name = owner_of(outbox)
    asyncio.run(outbox.migrate())
    asyncio.run(outbox.close())  # from here on, the parent has nothing open

    async def works():
        async with asyncio.timeout(90), outbox.running():
            async with outbox.transaction("Open") as tx:
                await add_wallet(tx, str(os.getpid()))
                tx.emit(WalletOpened(uuid4()))
            await outbox.drain("60s")
            counts = await outbox.admin.counts()
            locks = await outbox.admin.locks()
        await outbox.close()
        return [os.getpid(), owner_of(outbox), counts["SUCCEEDED"], sorted({lock.owner for lock in locks})]

    children = [forked(lambda: asyncio.run(works())) for _ in range(3)]
    assert owner_of(outbox) == name  # the parent keeps its own name
    print(json.dumps([children, name]))
    """)  # fmt: skip

    names = [child[1] for child in children]
    assert [name.split(":")[1] for name in names] == [str(child[0]) for child in children]
    assert len({*[name.rpartition(":")[2] for name in names], name_of_parent.rpartition(":")[2]}) == 4
    assert [child[2] for child in children] == [1, 2, 3]
    assert [child[3] for child in children] == [[name] for name in names]  # the holders in ``leases``
    ids = [str(row["id"]) for row in await look.events()]
    assert len(set(ids)) == 3


async def test_a_parents_transaction_has_ended_in_the_child(database_url: str, look: Look) -> None:
    said = await outcome(database_url, FORKING + """
    async def parent():
        await outbox.migrate()
        async with outbox.transaction("Around") as tx:
            await add_wallet(tx, "before")

            def child():
                said = []
                for call in (lambda: add_wallet(tx, "child"), lambda: outbox.execute(Emit((1,)))):
                    try:
                        asyncio.run(call())
                    except Exception as error:
                        said.append(type(error).__name__)
                return said

            said = forked(child)
            await add_wallet(tx, "after")
        await outbox.close()
        return said

    print(json.dumps(asyncio.run(parent())))
    """)  # fmt: skip

    assert said == ["TransactionClosed", "WrongProcess"]
    assert [row["id"] for row in await look.fetch("SELECT id FROM wallets ORDER BY id")] == ["after", "before"]
