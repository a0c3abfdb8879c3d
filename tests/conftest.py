"""Fixtures that give each test an empty database on a real server.

``database_url`` runs the test on every dialect and version of this machine (``postgres15``, ``postgres18``,
``sqlite``); ``server_url`` on all but files; ``postgres_url``, ``mysql_url`` (MariaDB too) and ``sqlite_url`` only on
their dialects. The sources of the servers are in ``tests/kit/servers.py``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Set
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from outboxio import Outbox
from outboxio.testing import MovableClock
from tests.__main__ import WITHOUT_DATABASES
from tests.kit import opened_by
from tests.kit.app import WALLETS, Look
from tests.kit.brokers import Broker, OwnNats, OwnRabbitmq, OwnRedis, brokers
from tests.kit.process_state import pytest_runtest_setup, pytest_runtest_teardown, restored
from tests.kit.programs import programs
from tests.kit.properties import use_profile
from tests.kit.servers import DIALECTS, Servers, Slot
from tests.kit.virtual_time import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories", "pytest_runtest_setup", "pytest_runtest_teardown"]  # hooks

TESTS = Path(__file__).parent

SERVERS = pytest.StashKey[Servers]()

#: Rules of code above the statements are the same on every dialect, so they run on the first of these that a test
#: allows and that is here. A file costs a third of a server.
ABOVE_STATEMENTS = ("sqlite", "postgres", "mariadb", "mysql")

#: The dialect that runs the tests marked ``one_of_family``, and the dialect that it spares: outboxio has the same code,
#: driver and statements for both, and MySQL costs twice the computing time.
RUNS, SPARED = "mariadb", "mysql"

#: Seconds after which a hanging test is stopped, with its stack: several times the slowest test's time on a busy
#: machine.
HANGS = 180.0
LONG = ("OUTBOXIO_TEST_FULL_SIZE", "OUTBOXIO_TEST_STORM_SECONDS")

#: The dialects of each fixture.
FIXTURES = {
    "database_url": frozenset(DIALECTS),
    "server_url": frozenset(DIALECTS) - {"sqlite"},
    "postgres_url": {"postgres"},
    "mysql_url": {"mysql", "mariadb"},
    "sqlite_url": {"sqlite"},
}


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database, in turn on each dialect and version."""
    yield from _fresh_database(request, tmp_path)


@pytest.fixture
def server_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of a server, in turn on each dialect and version with servers."""
    yield from _fresh_database(request, tmp_path)


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, in turn on each version."""
    yield from _fresh_database(request, tmp_path)


@pytest.fixture
def mysql_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of MySQL, and in turn of MariaDB."""
    yield from _fresh_database(request, tmp_path)


@pytest.fixture
def sqlite_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an SQLite file that does not exist yet."""
    yield from _fresh_database(request, tmp_path)


@pytest.fixture
def second_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a second empty database beside the test's own, which can be a second shard."""
    [slot] = [value for name, value in request.node.callspec.params.items() if name in FIXTURES]
    if DIALECTS[slot.dialect].one_outbox_per_server:
        slot = slot.another()
    directory = tmp_path / "second"
    directory.mkdir()
    yield from _fresh_database_of(slot, request, directory)


def _fresh_database(request: pytest.FixtureRequest, directory: Path) -> Iterator[str]:
    yield from _fresh_database_of(request.param, request, directory)


def _fresh_database_of(slot: Slot, request: pytest.FixtureRequest, directory: Path) -> Iterator[str]:
    server = request.config.stash[SERVERS].take(slot)
    tables = None
    if "make_outbox" in request.fixturenames or _has(request.node, "with_tables"):
        tables = WALLETS if "wallets_table" in request.fixturenames else ""
    with DIALECTS[server.dialect].fresh_database(server, directory, tables=tables) as url:
        yield url


def pytest_configure(config: pytest.Config) -> None:
    opened_by.use()
    use_profile()
    servers = config.stash[SERVERS] = Servers.find(os.environ)
    config.add_cleanup(servers.close)
    config.add_cleanup(brokers.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the garbage collector, which would scan thousands of tests again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # the collected tests stay until the end
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    slots = metafunc.config.stash[SERVERS].slots
    for fixture in FIXTURES.keys() & set(metafunc.fixturenames):
        chosen = _chosen(metafunc.definition, slots, FIXTURES[fixture])
        metafunc.parametrize(fixture, [_parameter(slot) for slot in chosen] or [_LEFT_OUT], indirect=True)


def _chosen(test: pytest.Item, slots: list[Slot], dialects: Set[str]) -> list[Slot]:
    """The slots that a test runs on, by its fixture's dialects and its marks."""
    slots = [slot for slot in slots if slot.dialect in dialects]
    if not os.environ.get("OUTBOXIO_TEST_FULL_SIZE"):
        others_run = "OUTBOXIO_TEST_IN_PARTS" in os.environ  # and each part has one dialect
        refused = {dialect for mark in test.iter_markers("not_on") for dialect in mark.args}
        here = (dialects if others_run else {slot.dialect for slot in slots if slot.offers}) - refused
        if _has(test, "above_statements"):
            first = next((one for one in ABOVE_STATEMENTS if one in here), None)
            slots = [slot for slot in slots if slot.dialect == first]
        elif _has(test, "one_of_family") and RUNS in here:
            slots = [slot for slot in slots if slot.dialect != SPARED]
    if not test.get_closest_marker("every_version"):
        slots = list({slot.dialect: slot for slot in reversed(slots)}.values())[::-1]
    return slots


def _has(test: pytest.Item, name: str) -> bool:
    """True if the test has the mark. The mark of a module is undone by the same mark with ``False``."""
    mark = test.get_closest_marker(name)
    return mark is not None and mark.args != (False,)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {item: why for item in items if (why := _why_left_out(item))}
    if len(left_out) < len(items):
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    else:  # if only these tests were selected, say why none of them runs
        for item, why in left_out.items():
            item.add_marker(pytest.mark.skip(why))
    for item in items:
        if isinstance(item, pytest.Function) and FIXTURES.keys() & set(item.fixturenames):
            item.add_marker(pytest.mark.database)
            if item.path.relative_to(TESTS).parts[0] in WITHOUT_DATABASES:
                raise pytest.UsageError(f"{item.nodeid} has a database, but no part runs it: see tests/__main__.py")
        if not any(map(os.environ.get, LONG)):
            item.add_marker(pytest.mark.timeout(HANGS))


def _parameter(slot: Slot) -> object:
    return pytest.param(slot, id=slot.id)


_LEFT_OUT = pytest.param(None, id="left-out")


def _why_left_out(item: pytest.Item) -> str | None:
    """The reason why a test does not run on the dialect of its parameters, if it does not."""
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    for slot in (value for name, value in parameters.items() if name in FIXTURES):
        if slot is None:
            return "OUTBOXIO_TEST_ONLY leaves out every dialect that this test runs on"
        for mark in item.iter_markers("not_on"):
            assert set(mark.args) <= set(DIALECTS), f"{item.nodeid}: not_on{mark.args} names an unknown dialect"
            if slot.dialect in mark.args:
                return f"not on {slot.dialect}: {mark.kwargs['why']}"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    there = [*config.stash[SERVERS].report(), *((line, True) for line in brokers.report())]
    lines = [*there, *((line, False) for line in programs.report())]
    if lines:
        terminalreporter.section("databases, brokers and programs")
    for line, is_there in lines:
        terminalreporter.line(line, **{} if is_there else {"red": True, "bold": True})


@pytest.fixture
def nats() -> Broker:
    """A running NATS with JetStream, which other tests use too."""
    return brokers.take("nats")


@pytest.fixture
def rabbitmq() -> Broker:
    """A running RabbitMQ, which other tests use too."""
    return brokers.take("rabbitmq")


@pytest.fixture
def redis() -> Broker:
    """A running Redis, which other tests use too."""
    return brokers.take("redis")


@pytest.fixture
def own_nats() -> OwnNats:
    """A running private NATS, which the test may stop."""
    return brokers.take_own(OwnNats)


@pytest.fixture
def own_rabbitmq() -> OwnRabbitmq:
    """A running private RabbitMQ, which the test may stop."""
    return brokers.take_own(OwnRabbitmq)


@pytest.fixture
def own_redis() -> OwnRedis:
    """A running private Redis, which the test may stop."""
    return brokers.take_own(OwnRedis)


@pytest.fixture
def patient_pages() -> Iterator[None]:
    """Let dashboard pages wait longer than their usual 2 s, for busy machines."""
    from tests.kit.dashboards import patient_pages

    with patient_pages():
        yield


@pytest.fixture
def patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``health()`` wait longer than its usual 1 s, and report no blocked event loop, for busy machines."""
    from outboxio.health import reader, rules

    monkeypatch.setattr(reader, "TIMEOUT", 60.0)
    monkeypatch.setattr(reader.HealthReader.read, "__defaults__", (60.0,))
    monkeypatch.setattr(rules, "BLOCKED_FOR", 0.0)


@pytest.fixture
def in_process() -> Iterator[None]:
    """For tests that run a program in their own process, which it may configure: the process is restored."""
    with restored():
        yield


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(datetime(2030, 1, 1, 12))


@pytest.fixture
def look(database_url: str) -> Look:
    """The rows of the test's database."""
    return Look(database_url)


@pytest.fixture
async def make_outbox(database_url: str) -> AsyncIterator[Callable[..., Awaitable[Outbox]]]:
    """Creates outboxes with tables on the test's database; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def make(namespace: str = "app", **options: Any) -> Outbox:
            database = options.pop("database", database_url)
            outbox = await stack.enter_async_context(Outbox(database, namespace=namespace, **options))
            if database is not database_url:  # which has the tables already
                await outbox.migrate()
            return outbox

        yield make


@pytest.fixture
def wallets_table(database_url: str) -> None:
    """The test's database has a table ``wallets``: the database is created with the table."""


@pytest.fixture
async def outbox(make_outbox: Callable[..., Awaitable[Outbox]], clock: MovableClock, wallets_table: None) -> Outbox:
    """An outbox on the test's database that uses ``clock``, and whose database has a ``wallets`` table."""
    return await make_outbox(clock=clock)
