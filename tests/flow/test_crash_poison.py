"""An event for which a handler ends its process: the event ends DEAD, and no other event is affected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Outbox
from tests.kit.app import Look, MoneyDeposited, eventually
from tests.kit.probes import MakeOutbox
from tests.kit.processes import Worker

pytestmark = pytest.mark.above_statements

StartProgram = Callable[..., Awaitable[Worker]]

EVENTS, KEYS = 200, 10
POISON = 137
ALL_BUT_ONE = {"SUCCEEDED": EVENTS - 1, "DEAD": 1}
CRASHES = 4  # one crash that is not counted, plus the setting max_crashes
MOST = 12
QUICK = {"handling_poll_delay": "50ms", "fanout_poll_delay": "50ms", "lock_heartbeat": "1s"}


class Supervisor:
    """Restarts a program whenever it ends, until the notifications are in the given states."""

    def __init__(self, start_program: StartProgram, look: Look) -> None:
        self._start_program = start_program
        self._look = look
        self.workers: list[Worker] = []

    async def start(self, *handlers: dict[str, Any], **settings: Any) -> Worker:
        worker = await self._start_program(
            "tests.flow.poison_worker", database=self._look.url, handlers=handlers, settings={**QUICK, **settings}
        )
        self.workers.append(worker)
        return worker

    async def run(self, states: dict[str, int], *handlers: dict[str, Any], **settings: Any) -> None:
        while True:
            worker = await self.start(*handlers, **settings)
            await eventually(partial(self._is_over, worker, states), timeout=60)
            if not worker.is_gone:
                return await worker.leave()
            assert len(self.workers) < MOST, f"the process keeps dying: {await self._look.states()}"

    async def _is_over(self, worker: Worker, states: dict[str, int]) -> bool:
        return worker.is_gone or await self._look.states() == states

    @property
    def crashes(self) -> int:
        return len(self.workers) - 1

    def numbers(self, what: str, **like: Any) -> list[int]:
        """The reports of a kind: the numbers of the events, in order."""
        reports = [report for worker in self.workers for report in worker.of(what, **like)]
        return [number for report in reports for number in report.get("numbers", [report.get("number")])]


@pytest.fixture
def supervisor(start_program: StartProgram, look: Look) -> Supervisor:
    return Supervisor(start_program, look)


@pytest.fixture
async def recorded(make_outbox: MakeOutbox, look: Look) -> Outbox:
    """An outbox without handlers, with committed events: twenty for each of ten keys."""
    outbox = await make_outbox()
    await look.fetch("CREATE TABLE effects (number INT NOT NULL)")
    async with outbox.transaction("Deposits") as tx:
        for number in range(EVENTS):
            tx.emit(MoneyDeposited(uuid4(), Decimal(number)), model_id=number, ordering_key=number % KEYS)
    return outbox


async def dead_of(outbox: Outbox) -> list[tuple[str, int]]:
    return [(row.handler_name, int(row.model_id or -1)) for row in await outbox.admin.list(state="DEAD")]


async def attempts(look: Look, state: str) -> Counter[int]:
    return Counter(row["attempts"] for row in await look.notifications() if row["state"] == state)


async def require_dead_alone(outbox: Outbox, look: Look, name: str) -> None:
    """The poison row is DEAD with the reason, the other rows have lost no attempt, and no record is left."""
    assert await dead_of(outbox) == [(name, POISON)]
    (dead,) = await outbox.admin.list(state="DEAD")
    assert (dead.errors[-1]["type"], dead.attempts) == ("CrashedProcess", 1)
    assert "was started 3 times" in str(dead.errors[-1]["message"])
    assert set(await attempts(look, "SUCCEEDED")) == {1}
    assert await look.fetch("SELECT * FROM {started_runs}") == []


@pytest.mark.parametrize("how", ["exit", "fault"])
async def test_a_row_that_kills_its_process_is_dead_alone(
    recorded: Outbox, look: Look, supervisor: Supervisor, how: str
) -> None:
    await supervisor.run(ALL_BUT_ONE, {"name": "mail", "poison": [POISON], "how": how, "sleep": 0.005, "hook": True})

    assert supervisor.crashes == CRASHES
    await require_dead_alone(recorded, look, "mail")
    assert set(supervisor.numbers("done")) == set(range(EVENTS)) - {POISON}
    assert supervisor.numbers("buried") == [POISON], "its hook was not called"


async def test_the_setting_allows_fewer_crashes(recorded: Outbox, look: Look, supervisor: Supervisor) -> None:
    await supervisor.run(ALL_BUT_ONE, {"name": "mail", "poison": [POISON], "sleep": 0.005}, max_crashes=1)

    assert supervisor.crashes == 3
    assert await dead_of(recorded) == [("mail", POISON)]


async def test_transactional_writes_of_other_rows_happen_exactly_once(
    recorded: Outbox, look: Look, supervisor: Supervisor
) -> None:
    await supervisor.run(
        ALL_BUT_ONE, {"name": "books", "poison": [POISON], "delivery": "transactional", "sleep": 0.002}
    )

    assert supervisor.crashes == CRASHES
    await require_dead_alone(recorded, look, "books")
    effects = [row["number"] for row in await look.fetch("SELECT number FROM effects ORDER BY number")]
    assert effects == [number for number in range(EVENTS) if number != POISON]


@pytest.mark.parametrize("on_dead_key", ["park", "continue"])
async def test_a_key_continues_or_parks_behind_a_poison_row(
    recorded: Outbox, look: Look, supervisor: Supervisor, on_dead_key: str
) -> None:
    behind = list(range(POISON + KEYS, EVENTS, KEYS))
    parks = on_dead_key == "park"
    states = {"SUCCEEDED": EVENTS - 1 - len(behind), "DEAD": 1, "BLOCKED": len(behind)} if parks else ALL_BUT_ONE

    ledger = {"name": "ledger", "poison": [POISON], "ordered": True, "on_dead_key": on_dead_key, "sleep": 0.002}
    await supervisor.run(states, ledger)

    assert supervisor.crashes == CRASHES
    await require_dead_alone(recorded, look, "ledger")
    for key in range(KEYS):
        done = list(dict.fromkeys(number for number in supervisor.numbers("done") if number % KEYS == key))
        assert done == [n for n in range(key, EVENTS, KEYS) if n != POISON and not (parks and n in behind)]


async def test_only_the_poison_row_of_a_batch_is_dead(recorded: Outbox, look: Look, supervisor: Supervisor) -> None:
    await supervisor.run(ALL_BUT_ONE, {"name": "report", "poison": [POISON], "batch": 20, "sleep": 0.01})

    assert supervisor.crashes == CRASHES
    await require_dead_alone(recorded, look, "report")
    assert set(supervisor.numbers("done")) == set(range(EVENTS)) - {POISON}


async def test_rows_of_other_handlers_are_not_affected(recorded: Outbox, look: Look, supervisor: Supervisor) -> None:
    """Their rows run in the same process, so they are suspects as well, but never two at once."""
    names = ("mail", "slow", "search")
    handlers = [{"name": name, "sleep": 0.05 if name == "slow" else 0.002} for name in names]
    handlers[0]["poison"] = [POISON]

    await supervisor.run({"SUCCEEDED": 3 * EVENTS - 1, "DEAD": 1}, *handlers, concurrency=20)

    assert supervisor.crashes == CRASHES
    await require_dead_alone(recorded, look, "mail")


async def test_two_poison_rows_are_both_found(recorded: Outbox, look: Look, supervisor: Supervisor) -> None:
    await supervisor.run({"SUCCEEDED": EVENTS - 2, "DEAD": 2}, {"name": "mail", "poison": [3, POISON], "sleep": 0.005})

    assert sorted(await dead_of(recorded)) == [("mail", 3), ("mail", POISON)]
    assert set(await attempts(look, "SUCCEEDED")) == {1}


async def test_a_hook_that_kills_its_process_is_abandoned(recorded: Outbox, look: Look, supervisor: Supervisor) -> None:
    mail = {"name": "mail", "poison": [POISON], "hook": True, "crash_in_hook": True, "sleep": 0.002}
    await supervisor.run(ALL_BUT_ONE, mail)

    assert await dead_of(recorded) == [("mail", POISON)]
    (dead,) = await recorded.admin.list(state="DEAD")
    assert [error["type"] for error in dead.errors] == ["Unprocessable", "CrashedProcess"]
    assert (dead.attempts, supervisor.crashes) == (1, CRASHES)


async def test_killing_healthy_processes_makes_nothing_dead(
    recorded: Outbox, look: Look, supervisor: Supervisor
) -> None:
    """Each process is killed with rows in flight, with a few more rows done than its predecessor."""
    mail = {"name": "mail", "sleep": 0.02}
    for done in (20, 30, 5, 40):
        worker = await supervisor.start({**mail, "holds_after": done}, concurrency=10, purge_enabled=False)
        await worker.until("done", done)
        worker.kill()
        await eventually(lambda: worker.is_gone)  # noqa: B023  # awaited here

    await supervisor.run({"SUCCEEDED": EVENTS}, mail, purge_enabled=False)

    assert [bool(worker.of("queried")) for worker in supervisor.workers] == [False, True, True, True, True]
    assert await attempts(look, "SUCCEEDED") == {1: EVENTS}
    assert await look.fetch("SELECT * FROM {started_runs}") == []


async def test_a_process_that_leaves_releases_its_locks_without_suspects(
    recorded: Outbox, look: Look, supervisor: Supervisor
) -> None:
    """During its work."""
    for done in (20, 40):
        mail = {"name": "mail", "sleep": 0.02, "holds_after": done}
        worker = await supervisor.start(mail, concurrency=10, purge_enabled=False)
        await worker.until("done", done)
        await worker.leave()
        assert await look.fetch("SELECT name FROM {leases} WHERE released_term <> term") == []

    assert [worker.of("queried") for worker in supervisor.workers] == [[], []]


async def test_an_operator_may_retry_a_poison_event_after_a_fix(
    recorded: Outbox, look: Look, supervisor: Supervisor
) -> None:
    await supervisor.run(ALL_BUT_ONE, {"name": "mail", "poison": [POISON], "sleep": 0.005})
    (dead,) = await recorded.admin.list(state="DEAD")
    await recorded.admin.retry([dead.id])

    await supervisor.run({"SUCCEEDED": EVENTS}, {"name": "mail"})

    assert await look.states() == {"SUCCEEDED": EVENTS}
