"""What an application's tests rely on: ``simulate``, ``World``, ``Process`` and ``SimulationFailed``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import Action, Event, EventEnvelope, Filter, Outbox, RetryPolicy, Transaction
from outboxio.errors import ConfigurationError
from outboxio.testing import SimulationFailed, World, simulate
from outboxio.testing.simulation.remote import ProcessKilled

ONE = [1]  # a seed


class Placed(Event):
    number: int


class Place(Action):
    number: int

    async def perform(self, tx: Transaction) -> int:
        tx.emit(Placed(self.number), model_id=self.number, model_type="Order")
        return self.number + 1


Handle = Callable[[EventEnvelope[Placed]], Awaitable[None]]


def application(handle: Any = None, **options: Any) -> Callable[[str], Outbox]:
    """An outbox with one handler, which is called with each event."""

    async def do_nothing(envelope: EventEnvelope[Placed]) -> None: ...

    def make_outbox(database: str) -> Outbox:
        outbox = Outbox(database, namespace="app")
        outbox.handler(Placed, name="handler", **options)(handle or do_nothing)
        return outbox

    return make_outbox


def failure_of(scenario: Callable[[World], Any], **options: Any) -> SimulationFailed:
    with pytest.raises(SimulationFailed) as raised:
        simulate(scenario, **{"seeds": ONE, "faults": False, **options})
    return raised.value


def handled(handle: Any, **options: Any) -> Callable[[World], Awaitable[None]]:
    """A scenario: an event, and its handler."""

    async def scenario(world: World) -> None:
        process = await world.process(application(handle, **options))
        await process.outbox.execute(Place(1))
        await world.settle()

    return scenario


# --- calls into a process --------------------------------------------------------------------------


def test_actions_blocks_and_operations_work() -> None:
    seen: list[int] = []

    async def handle(envelope: EventEnvelope[Placed]) -> None:
        seen.append(envelope.event.number)

    async def scenario(world: World) -> None:
        seen.clear()
        process = await world.process(application(handle))
        assert await process.outbox.execute(Place(1)) == 2
        async with process.outbox.transaction("Place") as tx:
            tx.emit(Placed(2), model_id=2, model_type="Order")
            assert await tx.fetchval("SELECT 1") == 1
        await world.settle()
        assert sorted(seen) == [1, 2]
        assert await process.outbox.admin.count(Filter(handler="handler")) == 2
        await process.outbox.admin.pause("handler")
        assert world.fetch("SELECT count(*) FROM eventlog_event_notifications WHERE state = 'SUCCEEDED'") == [(2,)]

    simulate(scenario, seeds=ONE, faults=False)


def test_an_exception_of_a_process_reaches_the_scenario() -> None:
    class Refused(Action):
        async def perform(self, tx: Transaction) -> None:
            raise LookupError("no such order")

    async def scenario(world: World) -> None:
        process = await world.process(application())
        with pytest.raises(LookupError, match="no such order"):
            await process.outbox.execute(Refused())
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the block is left by the exception
            async with process.outbox.transaction("Place") as tx:
                tx.emit(Placed(2), model_id=2, model_type="Order")
                raise ZeroDivisionError
        assert world.fetch("SELECT count(*) FROM eventlog_events") == [(0,)]

    simulate(scenario, seeds=ONE, faults=False)


def test_a_process_without_running_handles_nothing() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application(), running=False)
        await process.outbox.execute(Place(1))
        await world.settle()

    assert "an event Placed has no notifications" in str(failure_of(scenario))


# --- kill, freeze, resume --------------------------------------------------------------------------


def test_a_killed_process_restarts_with_a_new_outbox() -> None:
    made: list[Outbox] = []

    def make_outbox(database: str) -> Outbox:
        made.append(application()(database))
        return made[-1]

    async def scenario(world: World) -> None:
        made.clear()
        process = await world.process(make_outbox)
        await world.kill(process)
        assert not process.is_alive
        await world.settle()
        assert process.is_alive
        await process.outbox.execute(Place(1))
        assert len(made) == 2

    simulate(scenario, seeds=ONE, faults=False)


def test_a_call_into_a_killed_process_restarts_it() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application())
        await world.kill(process)
        assert await process.outbox.execute(Place(1)) == 2
        await world.kill(process)
        async with process.outbox.transaction("Place") as tx:
            tx.emit(Placed(2), model_id=2, model_type="Order")
        await world.settle()

    simulate(scenario, seeds=ONE, faults=False)


def test_a_killed_process_runs_no_code_and_commits_nothing() -> None:
    async def scenario(world: World) -> None:
        ended: list[str] = []

        async def handle(envelope: EventEnvelope[Placed]) -> None:
            try:
                await envelope.tx.execute("INSERT INTO seen VALUES (1)")
                started.set()
                await asyncio.sleep(1)
            finally:
                ended.append("finally")

        started = asyncio.Event()
        world.execute("CREATE TABLE seen (number INTEGER)")
        process = await world.process(application(handle, delivery="transactional"))
        await process.outbox.execute(Place(1))
        assert await world.until(started.is_set, 10)
        await world.kill(process)
        await asyncio.sleep(5)
        assert ended == []
        assert world.fetch("SELECT * FROM seen") == []
        await world.settle()
        assert ended == ["finally"]
        assert world.fetch("SELECT * FROM seen") == [(1,)]

    simulate(scenario, seeds=ONE, faults=False)


def test_a_frozen_process_does_nothing_until_it_is_resumed() -> None:
    async def scenario(world: World) -> None:
        worker, producer = await world.process(application()), await world.process(application(), running=False)
        await world.freeze(worker)
        await producer.outbox.execute(Place(1))
        await asyncio.sleep(30)
        assert world.fetch("SELECT count(*) FROM eventlog_event_notifications") == [(0,)]
        await world.resume(worker)
        await asyncio.sleep(5)
        assert world.fetch("SELECT state FROM eventlog_event_notifications") == [("SUCCEEDED",)]

    simulate(scenario, seeds=ONE, faults=False)


def test_a_kill_inside_a_block_is_raised_by_the_next_call() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application())
        with pytest.raises(ProcessKilled):  # noqa: PT012  # the block is left by the exception
            async with process.outbox.transaction("Place") as tx:
                tx.emit(Placed(1), model_id=1, model_type="Order")
                await world.kill(process)
                await tx.fetchval("SELECT 1")
        assert world.fetch("SELECT count(*) FROM eventlog_events") == [(0,)]

    simulate(scenario, seeds=ONE, faults=False)


def test_calls_of_the_scenario_are_not_affected_by_faults() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application(retry=RetryPolicy(base="50ms")))
        for number in range(12):
            await process.outbox.execute(Place(number))
            await asyncio.sleep(world.random.random() * 0.2)
            async with process.outbox.transaction("Place") as tx:
                await asyncio.sleep(world.random.random() * 0.2)
                tx.emit(Placed(number), model_id=number, model_type="Order")
        await world.settle()

    simulate(scenario, seeds=range(1, 40, 2))


# --- failures --------------------------------------------------------------------------------------


def test_an_exception_of_the_scenario_fails_with_its_seed() -> None:
    async def scenario(world: World) -> None:
        await world.process(application())
        assert world.seed < 7, "an odd number"

    failed = failure_of(scenario, seeds=range(5, 9))

    assert failed.seed == 7
    assert "an odd number" in str(failed)
    assert "simulate(scenario, seeds=[7])" in str(failed)
    assert isinstance(failed.__cause__, AssertionError)


def test_a_scenario_that_keeps_state_between_runs_is_named() -> None:
    runs: list[int] = []

    async def scenario(world: World) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise LookupError("the first run")

    text = str(failure_of(scenario))

    assert text.startswith("LookupError('the first run')")
    assert "A second run with the same seed ended differently (it passed)" in text


def test_a_broken_guarantee_fails() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application())
        await process.outbox.execute(Place(1))
        await world.settle()
        world.execute("UPDATE eventlog_event_notifications SET state = 'PENDING', attempts = 0")

    assert "went from SUCCEEDED to PENDING" in str(failure_of(scenario))


def test_a_handler_that_always_fails_is_named_with_its_error() -> None:
    async def handle(envelope: EventEnvelope[Placed]) -> None:
        raise ValueError("the order is wrong")

    text = str(failure_of(handled(handle)))

    assert "a notification of handler is FAILED after" in text
    assert 'attempts: {"number":1}, the last error is ValueError: the order is wrong' in text


def test_the_message_names_the_line_where_the_process_was_killed() -> None:
    charges: list[int] = []

    async def charge() -> None:
        charges.append(1)
        await asyncio.sleep(0.01)

    async def handle(envelope: EventEnvelope[Placed]) -> None:
        await charge()

    async def scenario(world: World) -> None:
        charges.clear()
        await handled(handle)(world)
        assert len(charges) == 1, f"charged {len(charges)} times"

    failed = failure_of(scenario, seeds=range(0, 100, 2), faults=True)

    line = charge.__code__.co_firstlineno + 2
    assert "charged 2 times" in str(failed)
    assert f"is killed at simulation/test_users.py:{line} in charge, called at" in str(failed)
    assert "starts again" in str(failed)
    assert 'handler with {"number":1}: PENDING -> SUCCEEDED' in str(failed)


def test_the_same_seed_gives_the_same_trace() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application(retry=RetryPolicy(base="50ms")))
        for number in range(3):
            await process.outbox.execute(Place(number))
            await asyncio.sleep(world.random.random())
        await world.settle()
        raise LookupError

    first, again = (failure_of(scenario, seeds=[5], faults=True) for _ in range(2))

    assert first.trace == again.trace
    assert first.trace != failure_of(scenario, seeds=[7], faults=True).trace
    assert all(isinstance(line, str) for line in first.trace)


def test_without_faults_nothing_happens_to_a_process() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(application())
        await process.outbox.execute(Place(1))
        await asyncio.sleep(60)
        raise LookupError

    for seed in range(4):
        notes = [line for line in failure_of(scenario, seeds=[seed]).trace if "** " in line and " -> " not in line]
        assert [line.split("** ")[1] for line in notes] == ["starts"]


# --- handlers --------------------------------------------------------------------------------------


def test_plain_functions_threads_timeouts_and_groups_work_in_handlers() -> None:
    seen: list[str] = []

    def plain(envelope: EventEnvelope[Placed]) -> None:
        seen.append("plain")

    async def threads(envelope: EventEnvelope[Placed]) -> None:
        seen.append(await asyncio.to_thread(str.upper, "thread"))

    async def timeouts(envelope: EventEnvelope[Placed]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 5)
        seen.append("timeout")

    async def groups(envelope: EventEnvelope[Placed]) -> None:
        async with asyncio.TaskGroup() as group:
            for name in ("one", "two"):
                group.create_task(asyncio.sleep(1)).add_done_callback(lambda _, name=name: seen.append(name))

    for handle, expected in ((plain, "plain"), (threads, "THREAD"), (timeouts, "timeout"), (groups, "one two")):
        seen.clear()
        simulate(handled(handle), seeds=ONE, faults=False)
        assert " ".join(seen) == expected
        simulate(handled(handle), seeds=range(6))


def test_real_connections_are_refused_with_the_fix() -> None:
    async def connects(envelope: EventEnvelope[Placed]) -> None:
        await asyncio.open_connection("localhost", 80)

    async def looks_up(envelope: EventEnvelope[Placed]) -> None:
        await asyncio.get_running_loop().getaddrinfo("localhost", 80)

    async def uses_asyncpg(envelope: EventEnvelope[Placed]) -> None:
        import asyncpg

        await asyncpg.connect("postgresql://localhost/app")

    async def uses_httpx(envelope: EventEnvelope[Placed]) -> None:
        import httpx

        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get("http://localhost/")

    for handle in (connects, looks_up, uses_asyncpg, uses_httpx):
        text = str(failure_of(handled(handle)))
        assert "a simulated event loop has no sockets" in text, handle
        assert "give the handler a fake service" in text


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_outbox", "error", "says"),
    [
        (lambda database: None, TypeError, "make_outbox(database) must return an Outbox, but returned None"),
        (lambda database: Outbox("sqlite://", namespace="app"), ConfigurationError, "is in memory"),
        (lambda database: Outbox("sqlite:///x.db", namespace="app"), ConfigurationError, "is in the file"),
        (lambda database: Outbox("postgresql://h/d", namespace="app"), ConfigurationError, "is on postgres"),
    ],
)
def test_an_outbox_outside_of_the_process_is_refused(make_outbox: Any, error: type[Exception], says: str) -> None:
    async def scenario(world: World) -> None:
        await world.process(make_outbox)

    failed = failure_of(scenario)

    assert isinstance(failed.__cause__, error)
    assert says in str(failed)


def test_an_error_of_make_outbox_fails_the_scenario() -> None:
    async def scenario(world: World) -> None:
        made: list[int] = []

        def make_outbox(database: str) -> Outbox:
            made.append(1)
            if len(made) == 2:
                raise LookupError("no second outbox")
            return application()(database)

        process = await world.process(make_outbox)
        await world.kill(process)
        await world.settle()

    assert "no second outbox" in str(failure_of(scenario))


def test_a_scenario_that_is_not_async_is_refused() -> None:
    with pytest.raises(TypeError, match="must be an async function of a World"):
        simulate(lambda world: None)  # type: ignore[arg-type,return-value]


def test_seeds_must_be_integers_and_not_empty() -> None:
    async def scenario(world: World) -> None: ...

    with pytest.raises(ValueError, match="seeds is empty"):
        simulate(scenario, seeds=[])
    with pytest.raises(TypeError, match="seeds must be integers, not 'x'"):
        simulate(scenario, seeds=["x"])  # type: ignore[list-item]


async def test_simulate_is_refused_in_an_event_loop() -> None:
    async def scenario(world: World) -> None: ...

    with pytest.raises(RuntimeError, match="call it from a plain function"):
        simulate(scenario)


def test_the_simulation_is_imported_on_first_use() -> None:
    code = (
        "import sys, outboxio.testing; assert 'outboxio.testing.simulation' not in sys.modules;"
        "from outboxio.testing import simulate, World; assert callable(simulate)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
