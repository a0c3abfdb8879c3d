"""The rights in docs/operate/security.md are sufficient for each user, and none is superfluous."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from outboxio import Filter, Finding, Outbox, Received, RetryPolicy, RightsMissing
from outboxio.dashboard import Dashboard, allow_all
from outboxio.model.operating.operation import JobRow
from outboxio.testing import MovableClock
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.dashboards import browser, send_form
from tests.kit.inside import database_of, finding_watch_of

pytestmark = pytest.mark.usefixtures("patient_pages")

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "security.md"
HEADINGS = {"postgres": "Privileges on PostgreSQL", "mysql": "Privileges on MySQL and MariaDB"}
ROLES = ("app_producer", "app_worker", "app_operator")

HOUR = timedelta(hours=1)
Open = Callable[[str], Outbox]


def grants(dialect: str) -> list[str]:
    """The statements on the page for a database."""
    section = PAGE.read_text("utf-8").partition(f"### {HEADINGS[dialect]}\n")[2].partition("\n#")[0]
    [block] = re.findall(r"^```sql\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [statement.strip() for statement in re.sub(r"--[^\n]*", "", block).split(";") if statement.strip()]


@asynccontextmanager
async def granted(look: Look) -> AsyncIterator[None]:
    """Three users with the rights on the page."""
    is_postgres = look.driver == "asyncpg"
    try:
        for role in ROLES:
            await look.fetch(f"CREATE ROLE {role} LOGIN" if is_postgres else f"CREATE USER {role} IDENTIFIED BY 'pw'")
            if not is_postgres:  # on the application's own database
                await look.fetch(f"GRANT SELECT ON {urlsplit(look.url).path[1:]}.* TO {role}")
        for statement in grants("postgres" if is_postgres else "mysql"):
            await look.fetch(statement)
        yield
    finally:
        for role in ROLES:
            if is_postgres:
                await look.fetch(f"DROP OWNED BY {role}")
            await look.fetch(f"DROP ROLE IF EXISTS {role}" if is_postgres else f"DROP USER IF EXISTS {role}")


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


@pytest.fixture
async def owner(server_url: str, clock: MovableClock) -> AsyncIterator[Outbox]:
    """The user that created the tables."""
    async with Outbox(server_url, namespace="app", clock=clock) as outbox:
        await outbox.migrate()
        yield outbox


@pytest.fixture
async def open_as(owner: Outbox, rows: Look, server_url: str, clock: MovableClock) -> AsyncIterator[Open]:
    """Opens the test's database as another user."""
    opened: list[Outbox] = []

    def open_as(role: str) -> Outbox:
        parts = urlsplit(server_url)
        user = role if parts.scheme not in mysql.SCHEMES else f"{role}:pw"
        url = parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()
        opened.append(Outbox(url, namespace="app", clock=clock))
        return opened[-1]

    async with granted(rows):
        try:
            yield open_as
        finally:
            for each in opened:
                await each.close()


async def refused(ways: list[Callable[[], Awaitable[object]]]) -> None:
    for way in ways:
        with pytest.raises(Exception, match=r"(?i)permission denied|command denied|access denied"):
            await way()


async def test_a_producer_may_add_events_but_not_read_them(open_as: Open, rows: Look) -> None:
    producer = open_as("app_producer")

    await producer.executor.execute(Emit((1, 2)))
    received = [
        await producer.inbox.receive(source="billing", external_id="7", type="Paid", payload={"n": n})
        for n in (1, 1, 2)
    ]

    assert received == [Received.RECEIVED, Received.DUPLICATE, Received.CONFLICT]
    assert len(await rows.events()) == 3
    table = rows.table("events")
    for statement in (f"SELECT payload FROM {table}", f"UPDATE {table} SET topic = 'x'", f"DELETE FROM {table}"):
        with pytest.raises(Exception, match=r"(?i)permission denied|command denied"):
            async with producer.transaction("Look") as tx:
                await tx.execute(statement)
    await refused([producer.admin.counts, producer.admin.list])
    with pytest.raises(RightsMissing, match=r"user app_producer.* lacks .*SELECT.* on eventlog.event_notifications"):
        await producer.drain()


async def test_a_producer_reports_missing_tables_and_not_missing_rights(open_as: Open, rows: Look) -> None:
    producer = open_as("app_producer")
    await rows.fetch("DROP TABLE {events}")

    with pytest.raises(Exception, match=r"events.* (does not|doesn't) exist") as caught:
        await producer.executor.execute(Emit((1,)))
    assert not isinstance(caught.value, RightsMissing)


async def test_a_worker_may_do_everything_except_change_the_tables(
    open_as: Open, rows: Look, clock: MovableClock
) -> None:
    worker = open_as("app_worker")
    worker.handler(MoneyDeposited, name="plain")(Journal(lambda e: ValueError() if e.event.amount == 2 else None))
    worker.handler(MoneyDeposited, name="exact", delivery="transactional", ordered=True)(Journal())
    assert await worker.migrate() == {"default": []}
    await worker.check()
    await worker.executor.execute(Emit((1, 2)))

    async with worker.running():
        await worker.drain()
    done = Counter(record.state for record in await worker.admin.list())
    clock.advance("30d")
    removed = await worker.admin.purge()

    assert done == {"SUCCEEDED": 3, "FAILED": 1}
    assert removed.notifications == 3
    assert (await worker.inbox.receive(source="b", external_id="1", type="Paid", payload={})) is Received.RECEIVED
    for statement in (f"DROP TABLE {rows.table('events')}", f"ALTER TABLE {rows.table('events')} DROP COLUMN topic"):
        with pytest.raises(Exception, match=r"(?i)must be owner|command denied|ends the transaction"):
            async with worker.transaction("Break") as tx:
                await tx.execute(statement)


async def test_an_operator_may_read_and_repair_but_not_emit(open_as: Open, owner: Outbox, clock: MovableClock) -> None:
    owner.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError()))
    await owner.executor.execute(Emit((1, 2)))
    await owner.drain()
    await database_of(owner).jobs.insert("app", [JobRow("tick", "every 60 s", "WAITING", clock.now(), clock.now())])
    operator = open_as("app_operator")
    await operator.check()

    one, other = await operator.admin.list(state="FAILED")
    assert (await operator.admin.counts())["FAILED"] == 2
    assert [(await operator.admin.retry([one.id])).done, (await operator.admin.skip([other.id])).done] == [1, 1]
    assert await operator.admin.replay("first", since=other.event_date, states={"SKIPPED"}) == 1
    assert await operator.admin.resume("first", "none") == 0
    assert await operator.admin.backfill("first", since=other.event_date) == 0
    await operator.admin.pause("first")
    assert await operator.admin.paused() == {"first"}
    assert await operator.admin.unpause("first")
    assert [one.number for one in await operator.admin.partitions("first", 4)] == [4]
    assert await operator.admin.instances() == []
    assert await operator.admin.unsubscribe("first") == 1
    assert await operator.admin.pause_job("tick")
    assert await operator.admin.unpause_job("tick")
    await operator.admin.run_job_now("tick")
    await operator.admin.remove_job("tick")
    await refused([lambda: operator.executor.execute(Emit((3,)))])
    with pytest.raises(RightsMissing, match=r"DELETE on eventlog\.consumed_events"):
        await operator.admin.purge()


async def test_missing_operator_rights_are_reported_before_the_first_operation(open_as: Open, rows: Look) -> None:
    operator, producer = open_as("app_operator"), open_as("app_producer")

    assert await operator.admin.operations_unavailable() == {}
    assert "lacks" in (await producer.admin.operations_unavailable())["default"]
    await rows.fetch(f"REVOKE UPDATE ON {rows.table('event_notifications')} FROM app_operator")

    reason = (await operator.admin.operations_unavailable())["default"]
    assert "UPDATE on eventlog.event_notifications" in reason
    assert "app_operator" in reason


#: The rights of each operation, beside those that all operations need.
NEEDED = {
    "retry": {"event_notifications": "UPDATE"},
    "skip": {"event_notifications": "UPDATE"},
    "resume": {"event_notifications": "UPDATE"},
    "replay": {"event_notifications": "UPDATE"},
    "backfill": {"event_notifications": "INSERT"},
    "pause": {"pauses": "INSERT"},
    "unpause": {"pauses": "UPDATE"},
    "partitions": {"handler_partitions": "INSERT"},
    "unsubscribe": {"subscriptions": "DELETE"},
    "pause_job": {"jobs": "UPDATE"},
    "unpause_job": {"jobs": "UPDATE"},
    "run_job_now": {"jobs": "UPDATE"},
    "remove_job": {"jobs": "DELETE"},
    "purge": {"events": "DELETE"},
}


def call_of(outbox: Outbox, kind: str, clock: MovableClock) -> Awaitable[object]:
    """Call the operation of this kind, on everything."""
    admin, of_job = outbox.admin, kind in ("pause_job", "unpause_job", "run_job_now", "remove_job")
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "retry": lambda: admin.retry(Filter(handler="first")),
        "skip": lambda: admin.skip(Filter(handler="first")),
        "resume": lambda: admin.resume("first", "k"),
        "replay": lambda: admin.replay("first", since=clock.now() - HOUR),
        "backfill": lambda: admin.backfill("first", since=clock.now() - HOUR),
        "partitions": lambda: admin.partitions("first", 4),
        "purge": admin.purge,
    }
    return calls[kind]() if kind in calls else getattr(admin, kind)("tick" if of_job else "first")


@pytest.mark.parametrize("kind", NEEDED)
async def test_an_operation_names_its_missing_right(
    open_as: Open, owner: Outbox, rows: Look, clock: MovableClock, kind: str
) -> None:
    fails = Journal(lambda envelope: ValueError())
    owner.handler(MoneyDeposited, name="first", ordered=True, retry=RetryPolicy(max_attempts=1))(fails)
    async with owner.transaction("Pay") as tx:
        for amount in (1, 2):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="k")
    await owner.drain()
    await database_of(owner).jobs.insert("app", [JobRow("tick", "every 60 s", "WAITING", clock.now(), clock.now())])
    operator = open_as("app_operator")
    [(table, right)] = NEEDED[kind].items()
    if kind != "purge":  # the right for which no operator has a grant
        assert kind not in await operator.admin.operations_refused()
        await rows.fetch(f"REVOKE {right} ON {rows.table(table)} FROM app_operator")

    assert right in (await operator.admin.operations_refused())[kind]
    with pytest.raises(RightsMissing, match=rf"app_operator.* lacks .*{right}.* on eventlog\.{table}.*GRANT .*{right}"):
        await call_of(operator, kind, clock)

    operations = await owner.admin.operations()
    assert [(one.kind, one.state, "lacks" in (one.error or "")) for one in operations] == [(kind, "FAILED", True)]


async def test_an_unrecordable_operation_names_its_missing_right(open_as: Open, rows: Look) -> None:
    operator = open_as("app_operator")
    await rows.fetch(f"REVOKE INSERT ON {rows.table('operations')} FROM app_operator")

    with pytest.raises(RightsMissing, match=r"INSERT on eventlog\.operations"):
        await operator.admin.retry(Filter())


@pytest.mark.above_statements
async def test_the_dashboard_has_no_button_for_a_missing_right(open_as: Open, owner: Outbox, rows: Look) -> None:
    owner.handler(MoneyDeposited, name="first")(Journal())
    await owner.executor.execute(Emit((1,)))
    await owner.drain()
    operator = open_as("app_operator")
    await rows.fetch(f"REVOKE INSERT ON {rows.table('pauses')} FROM app_operator")

    async with browser(Dashboard(operator, authorize=allow_all)) as client:
        pages = {path: (await client.get(path)).text for path in ("/handlers/first", "/shards")}
        answers = {
            "purge": await send_form(client, "/operations/purge", {"sure": "yes", "typed": "app"}),
            "pause": await send_form(client, "/operations/pause", {"sure": "yes", "handler": "first"}),
        }

    assert "/operations/replay" in pages["/handlers/first"]
    assert "/operations/pause" not in pages["/handlers/first"]
    assert "/operations/purge" not in pages["/shards"]
    for page in pages.values():
        assert "2 operations not available" in page
        assert "DELETE on eventlog.events" in page
    assert {kind: answer.status_code for kind, answer in answers.items()} == {"purge": 403, "pause": 403}
    assert "INSERT on eventlog.pauses" in answers["pause"].text


@pytest.mark.above_statements
async def test_a_page_that_cannot_read_a_table_names_the_right(open_as: Open) -> None:
    async with browser(Dashboard(open_as("app_producer"), authorize=allow_all)) as client:
        for path in ("/", "/notifications", "/dead", "/events", "/jobs", "/keys", "/operations"):
            answer = await client.get(path)
            assert answer.status_code != 500, path
            assert "SELECT" in answer.text, path
            assert "app_producer" in answer.text, path


async def test_an_operator_watches_findings_in_memory(
    open_as: Open, owner: Outbox, rows: Look, caplog: pytest.LogCaptureFixture
) -> None:
    owner.handler(MoneyDeposited, name="receipt")(Journal())
    await owner.executor.execute(Emit((1,)))
    await owner.drain()
    got: list[str] = []

    async def receive(finding: Finding) -> None:
        got.append(finding.rule)

    watch = finding_watch_of(open_as("app_operator"), "pager", receive)
    for _ in range(3):
        await watch.run_once()

    assert got == ["no_instance"]
    assert caplog.text.count("keeping them in memory") == 1

    allowed = "GRANT INSERT, UPDATE, DELETE ON eventlog.instance_reports TO app_operator"
    await rows.fetch(allowed)
    await watch.run_once()
    assert await rows.value("SELECT count(*) FROM eventlog.instance_reports WHERE namespace = ''") == 1
    await watch.close()
