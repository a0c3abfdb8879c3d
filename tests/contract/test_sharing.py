"""Processes that share handlers: who owns which partition, and what a move costs.

Each outbox of a test stands for a process with its own name, locks and session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import EventEnvelope, Outbox, Settings
from tests.kit.app import Look, MoneyDeposited, eventually, opened
from tests.kit.inside import database_of, locks_of, owner_of, run_of, seen_owners_of, shard_of
from tests.kit.partitions import SHARED_WITHIN
from tests.kit.server_actions import actions_on

pytestmark = pytest.mark.with_tables

UNPURGED = Settings(purge_enabled=False)
HEARTBEAT = UNPURGED.lock_heartbeat.total_seconds()
NAME = "score"


class Calls:
    """A handler that records which outbox handled which amount."""

    def __init__(self) -> None:
        self.of: dict[str, list[int]] = {}
        self.sleep = 0.0

    def as_process(self, process: str) -> Callable[[EventEnvelope[MoneyDeposited]], Any]:
        async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await asyncio.sleep(self.sleep)
            self.of.setdefault(process, []).append(int(envelope.event.amount))

        return handle

    @property
    def amounts(self) -> list[int]:
        return sorted(amount for amounts in self.of.values() for amount in amounts)


class Fleet:
    """Outboxes of one database, each with the same handler."""

    def __init__(self, url: str, stack: AsyncExitStack, settings: Settings, options: dict[str, Any]) -> None:
        self.calls = Calls()
        self.members: dict[str, Outbox] = {}
        self._url, self._stack, self._settings, self._options = url, stack, settings, options
        self._running: dict[str, Any] = {}

    async def join(self, process: str) -> Outbox:
        outbox = Outbox(self._url, namespace="app", settings=self._settings)
        outbox.handler(MoneyDeposited, name=NAME, **self._options)(self.calls.as_process(process))
        await self._stack.enter_async_context(opened(outbox))
        self.members[process] = outbox
        self._running[process] = outbox.running()
        await self._running[process].__aenter__()
        return outbox

    async def leave(self, process: str) -> None:
        del self.members[process]
        await self._running.pop(process).__aexit__(None, None, None)

    async def die(self, process: str) -> None:
        """End the lock session, and never reconnect: to other processes the process is dead."""
        outbox = self.members.pop(process)
        run = shard_of(outbox).work
        run.loops.locks.stop()
        run.loops.share.stop()
        await actions_on(self._url).end([actions_on(self._url).outbox_sessions(outbox)["lock"]])

    def owned(self, process: str) -> list[int]:
        """The partitions that a process owns."""
        held = locks_of(self.members[process]).held
        return sorted(name.partition for name in held if name.role == "dispatch")

    def seen_owners(self, process: str) -> set[str]:
        """The owners of partitions in the newest view of a process."""
        return seen_owners_of(self.members[process])

    def shares(self) -> list[int]:
        return sorted(len(self.owned(process)) for process in self.members)

    async def until_shares_are(self, *sizes: int, within: float = SHARED_WITHIN) -> None:
        await eventually(lambda: self.shares() == sorted(sizes), timeout=within)

    async def stop(self) -> None:
        self.members.clear()
        for running in self._running.values():
            await running.__aexit__(None, None, None)


@pytest.fixture
async def fleet(server_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with make_fleet(server_url) as fleet:
        yield fleet


@asynccontextmanager
async def make_fleet(url: str, settings: Settings = UNPURGED, **options: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(url, stack, settings, {"partitions": 8, **options})
        try:
            yield fleet
        finally:
            await fleet.stop()


async def post(outbox: Outbox, *amounts: int) -> None:
    async with outbox.transaction("Post") as tx:
        for amount in amounts:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), model_id=amount)


async def test_a_single_process_owns_every_partition(fleet: Fleet) -> None:
    outbox = await fleet.join("a")
    await fleet.until_shares_are(8)
    await post(outbox, *range(50))
    await eventually(lambda: fleet.calls.amounts == [*range(50)])


async def test_processes_share_partitions_evenly_and_handle_their_own(fleet: Fleet) -> None:
    for process in ("a", "b", "c"):
        await fleet.join(process)
    await fleet.until_shares_are(2, 3, 3)
    owned = [partition for process in fleet.members for partition in fleet.owned(process)]
    assert sorted(owned) == [*range(8)]

    await post(fleet.members["a"], *range(300))
    await eventually(lambda: fleet.calls.amounts == [*range(300)])
    assert set(fleet.calls.of) == {"a", "b", "c"}


async def test_a_joining_process_moves_few_other_partitions(fleet: Fleet) -> None:
    await fleet.join("a")
    await fleet.until_shares_are(8)
    await fleet.join("b")
    await fleet.until_shares_are(4, 4)
    before = {process: set(fleet.owned(process)) for process in ("a", "b")}
    await fleet.join("c")
    await fleet.until_shares_are(2, 3, 3)
    kept = [before[process] & set(fleet.owned(process)) for process in ("a", "b")]
    assert sum(map(len, kept)) >= 4, "5 or 6 is the most; the views of two processes may differ briefly"


async def test_a_slowly_leaving_process_releases_its_idle_partitions(
    fleet: Fleet, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaver = await fleet.join("a")
    await fleet.until_shares_are(8)
    await fleet.join("b")
    await fleet.until_shares_are(4, 4)
    leaving = run_of(leaver)
    monkeypatch.setattr(type(leaving), "in_flight", lambda run, slot: int(run is leaving and slot.partition == 0))
    await leaving.membership.begin_to_leave()
    await fleet.until_shares_are(1, 7)
    assert fleet.owned("a") == [0]

    # The new process has never seen the leaving process alive, and sees it only as the owner of partition 0.
    await Look(server_url).fetch("UPDATE eventlog.instances SET last_seen_date = '2026-01-01'")
    await fleet.die("b")
    await fleet.join("c")
    await eventually(lambda: fleet.owned("c") == [*range(1, 8)], timeout=10)
    assert fleet.owned("a") == [0]


async def test_moving_partitions_under_load_loses_and_repeats_nothing(fleet: Fleet) -> None:
    fleet.calls.sleep = 0.005
    outbox = await fleet.join("a")
    posted = 0
    for step in ("join b", "join c", "leave a", "join d", "leave b"):
        for _ in range(5):
            await post(fleet.members[next(iter(fleet.members))], *range(posted, posted + 40))
            posted += 40
            await eventually(lambda: posted - len(fleet.calls.amounts) <= 40)  # noqa: B023  # it is awaited here
        verb, process = step.split()
        await (fleet.join(process) if verb == "join" else fleet.leave(process))
    await eventually(lambda: fleet.calls.amounts == [*range(posted)])
    assert outbox is not None


async def test_partitions_of_a_dead_process_are_owned_again_at_once(fleet: Fleet, server_url: str) -> None:
    for process in ("a", "b"):
        await fleet.join(process)
    await fleet.until_shares_are(4, 4)
    dead = owner_of(fleet.members["b"])
    await eventually(lambda: dead in fleet.seen_owners("a"))
    await fleet.die("b")
    await fleet.until_shares_are(8, within=1.8 * HEARTBEAT)  # an unresponsive process counts as dead later

    rows = Look(server_url)
    await eventually(lambda: _is_forgotten(rows, dead))


async def _is_forgotten(rows: Look, owner: str) -> bool:
    return owner not in [row["instance"] for row in await rows.fetch("SELECT instance FROM eventlog.instances")]


@pytest.mark.above_statements
async def test_an_unhealthy_process_releases_its_partitions_and_reports_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for process in ("a", "b"):
        await fleet.join(process)
    await fleet.until_shares_are(4, 4)
    unhealthy = run_of(fleet.members["a"])
    monkeypatch.setattr(type(unhealthy), "is_stalled", lambda run, now: run is unhealthy)

    await eventually(lambda: (fleet.owned("a"), len(fleet.owned("b"))) == ([], 8))
    views = set[float]()

    def several_views_later() -> bool:
        views.add(unhealthy.loops.share.began)
        return len(views) > 3

    await eventually(several_views_later)  # and the process is as unhealthy as before
    logged = [record for record in caplog.records if "releasing the partitions of this process" in record.message]
    assert len(logged) == 1
    assert (fleet.owned("a"), len(fleet.owned("b"))) == ([], 8)


@pytest.mark.above_statements
async def test_an_operator_changes_the_partition_count_while_running(fleet: Fleet) -> None:
    for process in ("a", "b"):
        await fleet.join(process)
    await fleet.until_shares_are(4, 4)
    database = database_of(fleet.members["a"])
    await database.partitions.set_number("app", NAME, 16, await database.now())
    await fleet.until_shares_are(8, 8)
    await post(fleet.members["a"], *range(100))
    await eventually(lambda: fleet.calls.amounts == [*range(100)])


@pytest.mark.above_statements
async def test_a_drain_takes_free_partitions_without_joining(fleet: Fleet, server_url: str) -> None:
    await fleet.join("a")
    await fleet.until_shares_are(8)
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name=NAME, partitions=8)(fleet.calls.as_process("drain"))
        await post(outbox, *range(20))
        await outbox.drain(timeout="10s")
    assert fleet.calls.amounts == [*range(20)]
    assert fleet.shares() == [8]


@pytest.mark.above_statements
async def test_balance_all_spreads_all_handlers(server_url: str) -> None:
    settings = Settings(purge_enabled=False, balance="all")
    async with AsyncExitStack() as stack:
        outboxes: list[Outbox] = []
        for _ in range(2):
            outbox = Outbox(server_url, namespace="app", settings=settings)
            for number in range(6):
                outbox.handler(MoneyDeposited, name=f"h{number}")(Calls().as_process("x"))
            await stack.enter_async_context(opened(outbox))
            await stack.enter_async_context(outbox.running())
            outboxes.append(outbox)

        def owned() -> list[int]:
            return [sum(name.role == "dispatch" for name in locks_of(outbox).held) for outbox in outboxes]

        await eventually(lambda: owned() == [3, 3], timeout=SHARED_WITHIN)
