"""An operator reads who owns which partition, and sets the partition count of a handler."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, Literal

import msgspec
import pytest

from outboxio import Batch, ConfigurationError, HandlerPartitions, Outbox, UnknownHandler
from outboxio.cli.commands.cluster import PartitionRequest, partitions
from outboxio.cli.commands.operations import OutputFormat
from outboxio.cli.commands.status import status
from outboxio.cli.commands.worker import _names_with_due_rows
from outboxio.dashboard import Access, Dashboard
from outboxio.handlers.options import OLDER_FOR
from outboxio.model.lock_name import LockName
from outboxio.operations.partitions.owners import in_ranges
from outboxio.operations.retention import Housekeeping
from outboxio.runtime.environment import Roles
from outboxio.runtime.lock_manager import LockManager
from outboxio.storage.protocols import Instance, InstanceReport
from outboxio.support.clock import ShardClock
from outboxio.testing import MovableClock
from outboxio.version import __version__
from tests.kit.app import Journal, Look, MoneyDeposited, eventually
from tests.kit.dashboards import browser, send_form
from tests.kit.inside import clock_of, database_of, fresh_overview, owner_of, run_of, shard_of
from tests.kit.storage import NOW, Store

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements]

MakeOutbox = Callable[..., Awaitable[Outbox]]


@pytest.fixture
async def server(server_url: str, clock: MovableClock) -> AsyncIterator[Outbox]:
    """An outbox on a database that several processes share, with a handler ``score`` that has an alias."""
    async with Outbox(server_url, namespace="app", clock=clock) as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="score", aliases={"rating"})(Journal())
        yield outbox


@pytest.fixture
def server_look(server_url: str) -> Look:
    return Look(server_url)


async def numbers(outbox: Outbox, handler: str | None = None) -> dict[str, tuple[int, int]]:
    """The count of partitions and of active partitions, by stored name."""
    return {one.handler_name: (one.number, one.active) for one in await outbox.admin.partitions(handler)}


# --- owners --------------------------------------------------------------------------------------


async def test_a_running_process_owns_the_partition_of_its_handler(
    outbox: Outbox,
) -> None:
    outbox.handler(MoneyDeposited, name="score", aliases={"rating"})(Journal())

    async def owners() -> dict[str, Any]:
        return {one.handler_name: one.owners[0].owner for one in await outbox.admin.partitions("score")}

    assert await owners() == {"score": None, "rating": None}
    async with outbox.running():
        await eventually(lambda: _are(owners(), dict.fromkeys(("score", "rating"), owner_of(outbox))))
        now = await database_of(outbox).now()
        [_, one] = await outbox.admin.partitions("rating")
        assert (one.handler_name, one.shard, one.number, one.active, one.declared) == ("score", "default", 1, 1, 1)
        [owned] = one.owners
        assert owned.since is not None
        assert abs(owned.since - now) < timedelta(minutes=1)
        assert str(one) == f"handler 'score' has 1 partition: {owner_of(outbox)} owns 0"
    assert await owners() == {"score": None, "rating": None}


async def _are(found: Awaitable[Any], expected: Any) -> bool:
    return bool(await found == expected)


async def test_without_a_name_all_handlers_are_listed(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox.handler(MoneyDeposited, name="score", aliases={"rating"})(Journal())
    outbox.handler(MoneyDeposited, name="bank")(Journal())
    await outbox.drain()
    operator = await make_outbox(clock=clock)

    assert await numbers(operator) == {"bank": (1, 1), "rating": (1, 1), "score": (1, 1)}
    assert await numbers(operator, "rating") == {"rating": (1, 1), "score": (1, 1)}


async def test_processes_are_listed_with_the_partitions_they_own(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="score", aliases={"rating"})(Journal())
    assert await outbox.admin.instances() == []

    async with outbox.running():
        await eventually(lambda: _owned(outbox, {"score", "rating"}))
        [instance] = await outbox.admin.instances()

        assert (instance.instance, instance.shard, instance.fans_out) == (owner_of(outbox), "default", True)
        assert (instance.version, instance.is_alive) == (__version__, True)
        assert instance.last_seen_date is not None
        assert instance.partitions == {"rating": (0,), "score": (0,)}
        assert "owns fan-out, 'rating' 0, 'score' 0" in str(instance)


async def _owned(outbox: Outbox, names: set[str]) -> bool:
    found = await outbox.admin.instances()
    return bool(found) and found[0].partitions.keys() == names and found[0].fans_out and bool(found[0].version)


async def test_an_idle_process_is_listed_until_three_reports_are_missing(
    outbox: Outbox,
) -> None:
    database, now = database_of(outbox), clock_of(outbox)()
    for name, age in (("host:1:ab", 0), ("host:2:ab", 30)):
        seen = now - timedelta(seconds=age)
        report = InstanceReport(
            instance=name, version="0.1", started_date=seen, last_seen_date=seen, delay_seconds=10,
            report=msgspec.Raw(b"{}"),
        )  # fmt: skip
        await database.reports.write_report("app", report)

    alive, silent = await outbox.admin.instances()

    assert (alive.instance, alive.version, alive.is_alive, alive.partitions) == ("host:1:ab", "0.1", True, {})
    assert (silent.instance, silent.version, silent.is_alive) == ("host:2:ab", "0.1", False)
    assert silent.last_seen_date == now - timedelta(seconds=30)
    assert str(silent).endswith("UTC, unresponsive since")


async def test_a_process_without_partitions_is_listed_with_its_last_report(server: Outbox) -> None:
    await database_of(server).partitions.seen("app", Instance("host:1:ab", ("score",), NOW))
    await database_of(server).partitions.seen("other", Instance("host:2:ab", ("score",), NOW))

    [instance] = await server.admin.instances()

    assert (instance.instance, instance.last_seen_date, instance.partitions) == ("host:1:ab", NOW, {})
    assert not instance.fans_out
    assert str(instance) == "host:1:ab owns no partition, seen at 2030-01-01 12:00:00 UTC"


def test_partitions_are_shown_in_ranges() -> None:
    assert in_ranges(()) == ""
    assert in_ranges((5,)) == "5"
    assert in_ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


# --- changing the count --------------------------------------------------------------------------


async def test_the_partition_count_is_set_for_all_names_both_ways(server: Outbox, server_look: Look) -> None:
    other = Store(server, server_look, "other")
    await other.subscribe("score")

    [rating, score] = await server.admin.partitions("score", 8)
    assert (rating.handler_name, score.handler_name) == ("rating", "score")
    assert [one.partition for one in score.owners] == list(range(8))
    assert await numbers(server) == {"rating": (8, 8), "score": (8, 8)}

    assert (await server.admin.partitions("rating", 4))[1].number == 4
    assert await numbers(server) == {"rating": (4, 8), "score": (4, 8)}
    assert "4 partitions (8 still active)" in str((await server.admin.partitions("score"))[1])

    await server.admin.partitions("score", 64)
    assert await numbers(server) == {"rating": (64, 64), "score": (64, 64)}
    assert (await database_of(server).subscriptions.control_state("other")).partitions == []


async def test_declared_and_operator_set_counts_are_shown_separately(server: Outbox) -> None:
    await database_of(server).partitions.declare("app", {"score": 16}, NOW)

    [_, score] = await server.admin.partitions("score", 4)

    assert (score.number, score.active, score.declared) == (4, 16, 16)


async def test_an_equal_partition_count_changes_nothing(server: Outbox, clock: MovableClock) -> None:
    await server.admin.partitions("score", 4)
    before = (await database_of(server).subscriptions.control_state("app")).partitions
    clock.advance("5m")

    await server.admin.partitions("score", 4)

    assert (await database_of(server).subscriptions.control_state("app")).partitions == before


async def test_a_count_of_one_writes_no_row(server: Outbox) -> None:
    await server.admin.partitions("score", 1)

    assert (await database_of(server).subscriptions.control_state("app")).partitions == []


async def test_a_handler_may_be_known_by_its_subscription_alone(server: Outbox, server_url: str) -> None:
    await Store(server, Look(server_url)).subscribe("ledger", aliases=("book",))

    await server.admin.partitions("book", 4)

    assert await numbers(server, "ledger") == {"book": (4, 4), "ledger": (4, 4)}


async def test_auto_returns_the_partition_count_to_outboxio(server: Outbox) -> None:
    async def after(number: int | Literal["auto"]) -> HandlerPartitions:
        return next(one for one in await server.admin.partitions("score", number) if one.handler_name == "score")

    fresh = await after("auto")
    assert (fresh.number, fresh.source, fresh.why) == (1, None, "not shared")
    ordered = await after(4)
    assert (ordered.number, ordered.source) == (4, "operator")
    assert "set by an operator at" in str(ordered)
    for _ in range(2):
        returned = await after("auto")
        assert (returned.number, returned.source) == (4, "automatic")
    assert (await after(4)).source == "operator", "the operator now sets the number that outboxio had chosen"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes read the partition counts at startup, and later only after a wake-up."""
    monkeypatch.setattr("outboxio.runtime.run_loops.DECISIONS_DELAY", 1000.0)


@pytest.mark.usefixtures("patient")
async def test_the_dashboard_returns_the_partition_count_to_outboxio(server: Outbox) -> None:
    dashboard = Dashboard(server, authorize=lambda request: Access("ada", can={"pause"}))
    await server.admin.partitions("score", 4)
    async with browser(dashboard) as client:
        assert "Set automatically" in (await client.get("/handlers/score")).text

        await send_form(client, "/operations/partitions", {"handler": "score", "number": "auto"})

        assert (await server.admin.partitions("score"))[0].source == "automatic"
        [newest] = await server.admin.operations(1)
        assert (newest.kind, newest.actor, newest.origin) == ("partitions", "ada", "dashboard")
        assert "Set automatically" not in (await client.get("/handlers/score")).text
        assert (
            await send_form(client, "/operations/partitions", {"handler": "score", "number": "8"})
        ).status_code == 400


async def test_a_running_process_takes_new_partitions_at_once(server: Outbox) -> None:
    async with server.running():
        await eventually(lambda: _owned(server, {"score", "rating"}))

        await server.admin.partitions("score", 4)

        await eventually(lambda: _owns(server, "score", (0, 1, 2, 3)))


@pytest.mark.usefixtures("patient")
async def test_a_partition_change_wakes_other_processes(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as worker, Outbox(postgres_url, namespace="app") as operator:
        await worker.migrate()
        worker.handler(MoneyDeposited, name="score")(Journal())
        async with worker.running():
            await eventually(lambda: _owned(worker, {"score"}))

            await operator.admin.partitions("score", 4)

            await eventually(lambda: _owns(worker, "score", (0, 1, 2, 3)))


async def _owns(outbox: Outbox, handler: str, expected: tuple[int, ...]) -> bool:
    [instance] = await outbox.admin.instances()
    return instance.partitions.get(handler) == expected


# --- refused counts ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 65, 1.5, True, "8"])
async def test_a_partition_count_outside_1_to_64_is_refused(outbox: Outbox, number: Any) -> None:
    outbox.handler(MoneyDeposited, name="score")(Journal())

    with pytest.raises(ConfigurationError, match=r"expected .auto., or a whole number from 1 to 64"):
        await outbox.admin.partitions("score", number)


async def test_a_partition_count_without_a_handler_is_refused(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="names no handler"):
        await outbox.admin.partitions(number=4)


async def test_an_unknown_handler_is_refused_with_the_nearest_name(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="score")(Journal())

    for arguments in (("scor",), ("scor", 1)):
        with pytest.raises(UnknownHandler, match="did you mean 'score'"):
            await outbox.admin.partitions(*arguments)


async def test_a_single_writer_database_has_a_single_partition(sqlite_url: str) -> None:
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="score", partitions=16)(Journal())

        with pytest.raises(ConfigurationError, match="sqlite, which has a single writer"):
            await outbox.admin.partitions("score", 2)
        [score] = await outbox.admin.partitions("score", 1)
        assert (score.number, score.active) == (1, 1)


async def test_more_partitions_than_concurrent_runs_are_refused(server: Outbox) -> None:
    server.handler(MoneyDeposited, name="bank", total_concurrency=4)(Journal())

    with pytest.raises(ConfigurationError, match=r"total_concurrency=4, so with 5 partitions some .* never run"):
        await server.admin.partitions("bank", 5)
    assert await numbers(server, "bank") == {"bank": (1, 1)}
    await server.admin.partitions("bank", 4)
    assert await numbers(server, "bank") == {"bank": (4, 4)}


async def test_a_report_has_a_single_partition(server: Outbox) -> None:
    server.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 0 * * *"))(Journal())

    with pytest.raises(ConfigurationError, match="makes a single call"):
        await server.admin.partitions("report", 2)
    await server.admin.partitions("report", 1)


async def test_raising_the_count_is_refused_beside_an_older_version(
    server: Outbox, server_look: Look, clock: MovableClock
) -> None:
    await server.admin.partitions("score", 4)
    await Store(server, server_look).subscribe("score", aliases=("rating",))
    older = "UPDATE {subscriptions} SET last_seen_date = $1 WHERE handler_name = 'score'"
    await server_look.fetch(older, NOW + timedelta(seconds=1))  # an older version leaves partitioned_seen_date as it is

    for number in (5, 64):
        with pytest.raises(ConfigurationError, match="within the last 2 minutes by a process with an older version"):
            await server.admin.partitions("rating", number)
    assert await numbers(server) == {"rating": (4, 4), "score": (4, 4)}

    await server.admin.partitions("score", 2)  # a smaller number helps an older version
    clock.advance(OLDER_FOR + timedelta(seconds=2))
    await server.admin.partitions("score", 64)
    assert await numbers(server) == {"rating": (64, 64), "score": (64, 64)}


async def test_a_count_refused_by_one_shard_changes_no_shard(server_url: str) -> None:
    async with Outbox({"eu": server_url, "us": "sqlite://"}, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="score")(Journal())

        with pytest.raises(ConfigurationError, match="shard 'us' is sqlite"):
            await outbox.admin.partitions("score", 4)
        assert {one.shard: one.number for one in await outbox.admin.partitions("score")} == {"eu": 1, "us": 1}

        [eu] = await outbox.admin.partitions("score", 4, shard="eu")
        assert (eu.shard, eu.number) == ("eu", 4)


# --- housekeeping --------------------------------------------------------------------------------


def housekeeping_of(outbox: Outbox, *, receives_partition_counts: bool = False) -> Housekeeping:
    """Housekeeping of the process that fans out, as in ``running()``."""
    clock: ShardClock = clock_of(outbox)
    return Housekeeping(
        "app", database_of(outbox), clock, outbox.settings, fans_out=lambda: True,
        seen_since=lambda: clock() - outbox.settings.subscription_ttl, expired=lambda number: None,
        receives_partition_counts=receives_partition_counts,
    )  # fmt: skip


async def test_surplus_partitions_are_forgotten_once_fan_out_cannot_write_there(
    server: Outbox, server_look: Look, clock: MovableClock
) -> None:
    await server.admin.partitions("score", 8)
    await server.admin.partitions("score", 2)
    housekeeping = housekeeping_of(server)

    clock.advance(2 * server.settings.statement_timeout - timedelta(seconds=1))
    await housekeeping.run_once()
    assert await numbers(server, "score") == {"rating": (2, 8), "score": (2, 8)}

    clock.advance("2s")
    await housekeeping.run_once()
    assert await numbers(server, "score") == {"rating": (2, 2), "score": (2, 2)}


async def test_surplus_partitions_stay_while_they_have_rows(
    server: Outbox, server_look: Look, clock: MovableClock
) -> None:
    await server.admin.partitions("score", 8)
    store = Store(server, server_look)
    await store.subscribe("score", aliases=("rating",))
    await store.insert_notifications(*map(str, range(40)))
    await server.admin.partitions("score", 2)
    clock.advance("1h")

    await housekeeping_of(server).run_once()
    assert await numbers(server, "score") == {"rating": (2, 2), "score": (2, 8)}

    await server_look.fetch("UPDATE {event_notifications} SET state = 'SUCCEEDED'")
    await housekeeping_of(server).run_once()
    assert await numbers(server, "score") == {"rating": (2, 2), "score": (2, 2)}


async def test_housekeeping_queries_nothing_while_all_partitions_are_needed(
    server: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shrunk, partitions] = [list[str](), database_of(server).partitions]
    monkeypatch.setattr(partitions, "shrink", lambda namespace, changed_before: _noted(shrunk, namespace))
    housekeeping = housekeeping_of(server, receives_partition_counts=True)

    await housekeeping.run_once()
    housekeeping.apply_partition_counts([])
    await housekeeping.run_once()
    await server.admin.partitions("score", 8)
    housekeeping.apply_partition_counts((await database_of(server).subscriptions.control_state("app")).partitions)
    await housekeeping.run_once()
    assert shrunk == []

    await server.admin.partitions("score", 2)
    housekeeping.apply_partition_counts((await database_of(server).subscriptions.control_state("app")).partitions)
    await housekeeping.run_once()
    assert shrunk == ["app"]


async def test_dead_processes_without_partitions_are_forgotten_after_a_day(server: Outbox, clock: MovableClock) -> None:
    repository = database_of(server).partitions
    housekeeping = housekeeping_of(server, receives_partition_counts=True)
    await repository.seen("app", Instance("dead", ("score",), NOW))
    clock.advance("23h")
    await repository.seen("app", Instance("alive", ("score",), clock.now()))

    async def listed() -> list[str]:
        await housekeeping.run_once()
        return [one.instance for one in await server.admin.instances()]

    await server.admin.partitions("score", 4)
    housekeeping.apply_partition_counts((await database_of(server).subscriptions.control_state("app")).partitions)
    assert await listed() == ["alive", "dead"]
    clock.advance("59m")
    assert await listed() == ["alive", "dead"]
    clock.advance("2m")
    assert await listed() == ["alive"]


async def test_without_shared_handlers_processes_are_not_read(server: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_of(server).partitions, "view", None)
    housekeeping = housekeeping_of(server, receives_partition_counts=True)

    housekeeping.apply_partition_counts([])

    await housekeeping.run_once()


async def test_a_running_process_queries_nothing_until_a_count_shrank(
    server: Outbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk, partitions = list[str](), database_of(server).partitions
    monkeypatch.setattr(partitions, "shrink", lambda namespace, changed_before: _noted(shrunk, namespace))
    async with server.running():
        run = run_of(server)
        await eventually(lambda: _owned(server, {"score", "rating"}))
        assert await run.housekeeping.run_once() is not None
        assert shrunk == []

        await server.admin.partitions("score", 4)
        await server.admin.partitions("score", 2)
        await eventually(lambda: _shrinks(run, shrunk))


@pytest.mark.parametrize(("handling", "expected_reads"), [(True, []), (False, ["app"])])
async def test_only_a_process_without_handlers_reads_before_knowing_the_counts(
    server: Outbox, monkeypatch: pytest.MonkeyPatch, handling: bool, expected_reads: list[str]
) -> None:
    shrunk, partitions = list[str](), database_of(server).partitions
    monkeypatch.setattr(partitions, "shrink", lambda namespace, changed_before: _noted(shrunk, namespace))
    monkeypatch.setattr(LockManager, "holds", lambda self, name: True)

    await shard_of(server).start_run(Roles(fanout=True, handling=handling)).housekeeping.run_once()

    assert shrunk == expected_reads


async def _shrinks(run: Any, shrunk: list[str]) -> bool:
    await run.housekeeping.run_once()
    return bool(shrunk)


async def _noted(noted: list[str], namespace: str) -> int:
    noted.append(namespace)
    return 0


# --- the command line ----------------------------------------------------------------------------


async def test_the_command_shows_processes_and_unowned_partitions(
    outbox: Outbox, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox.handler(MoneyDeposited, name="score")(Journal())

    await partitions(outbox, PartitionRequest(handler="score"), OutputFormat())
    assert capsys.readouterr().out.split()[-4:] == ["1", "no", "process", "0"]

    async with outbox.running():
        await eventually(lambda: _owned(outbox, {"score"}))
        await partitions(outbox, PartitionRequest(handler="score"), OutputFormat())
        output = "".join(capsys.readouterr().out.split())
        assert owner_of(outbox)[:20] in output
        assert "noprocess" not in output


async def test_the_command_has_json_output(outbox: Outbox, capsys: pytest.CaptureFixture[str]) -> None:
    outbox.handler(MoneyDeposited, name="score")(Journal())

    await partitions(outbox, PartitionRequest(), OutputFormat(as_json=True))

    assert json.loads(capsys.readouterr().out) == [
        {
            "handler_name": "score", "shard": "default", "number": 1, "active": 1, "declared": 1,
            "owners": [{"partition": 0, "owner": None, "since": None}], "source": None, "changed_date": None,
        }
    ]  # fmt: skip


async def test_the_command_reports_what_a_new_count_changes(server: Outbox, capsys: pytest.CaptureFixture[str]) -> None:
    await server.admin.partitions("score", 4)

    await partitions(server, PartitionRequest(handler="score", number=16), OutputFormat())

    output = capsys.readouterr().out
    assert "score: 4 -> 16 partitions" in output
    assert "rating: 4 -> 16 partitions" in output
    assert "0-15" in output


async def test_status_counts_owned_and_unowned_partitions(
    server: Outbox, server_look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    await status(server, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["partitions"] == []

    await server.admin.partitions("score", 4)
    lock = database_of(server).cluster_lock("host:1:ab", None, 5.0)
    await lock.listen(lambda payload: None)
    try:
        [_, score] = await server.admin.partitions("score")
        await lock.acquire(_locks_of(score)[:3])
        await status(server, as_json=True)
        answer = json.loads(capsys.readouterr().out)
        assert answer["partitions"][1]["owners"] == {"host:1:ab": 3}
        assert not answer["overview"]["figures"]["reasons"]["no_owner"]  # no row is due

        store = Store(server, server_look)
        await store.subscribe("score", aliases=("rating",))
        await store.insert_notifications(*map(str, range(40)))
        await fresh_overview(server)
        await status(server, as_json=True)
        [handler] = json.loads(capsys.readouterr().out)["overview"]["handlers"]
        assert (handler["handler_name"], handler["reasons"].keys()) == ("score", {"queued", "no_owner"})

        await status(server, as_json=False)
        output = capsys.readouterr().out
    finally:
        await lock.close()
    assert "host:1:ab" in output
    assert f"no_owner {handler['reasons']['no_owner']}" in output


def _locks_of(one: HandlerPartitions) -> list[Any]:
    return [LockName("app", "dispatch", one.handler_name, each.partition) for each in one.owners]


async def test_a_worker_drain_includes_due_rows_of_every_partition(server: Outbox, server_look: Look) -> None:
    await server.admin.partitions("score", 8)
    store = Store(server, server_look)
    await store.subscribe("score")
    assert await _names_with_due_rows(server) == []
    for key in range(8):
        await store.insert_notifications(str(key))
        assert await _names_with_due_rows(server) == ["score"]
        await server_look.fetch("UPDATE {event_notifications} SET state = 'SUCCEEDED'")
